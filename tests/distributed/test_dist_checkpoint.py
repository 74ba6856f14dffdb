"""Distributed checkpoints: exact round trips, other numbers of ranks, full, sharded and asynchronous."""

from __future__ import annotations

import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # loaded once, before the processes fork
from processes import needs_processes, run
from torch import nn

import rpt

pytestmark = needs_processes

STEPS = 3


def build(kind):
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 35), nn.LayerNorm(35), nn.Linear(35, 3)
    ).double()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net[2])
        fully_shard(net)
    return net


def make(kind):
    net = build(kind)
    if kind == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 3e-3, max_root_staleness=2)
    return net, optimizer


def train(net, optimizer, start, steps):
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    for n in range(start, start + steps):
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(12, 6, generator=generator, dtype=torch.float64).chunk(size)[rank]
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(net):
    return [
        p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
        for p in net.parameters()
    ]


def states(net, optimizer, **options):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(net, optimizer, options=StateDictOptions(**options))


def save(folder, net, optimizer, asynchronous=False):
    import torch.distributed.checkpoint as dcp

    model_state, optimizer_state = states(net, optimizer)
    content = {"model": model_state, "optimizer": optimizer_state}
    if asynchronous:
        dcp.async_save(content, checkpoint_id=folder).result()
    else:
        dcp.save(content, checkpoint_id=folder)


def load(folder, net, optimizer):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model_state, optimizer_state = states(net, optimizer)
    content = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )


def _save_and_go_on(kind, folder, asynchronous=False):
    net, optimizer = make(kind)
    train(net, optimizer, 0, STEPS)
    save(folder, net, optimizer, asynchronous)
    train(net, optimizer, STEPS, STEPS)
    return whole(net)


def _load_and_go_on(kind, folder, again=None):
    net, optimizer = make(kind)
    load(folder, net, optimizer)
    if again:
        save(again, net, optimizer)
    train(net, optimizer, STEPS, STEPS)
    return whole(net)


def _uninterrupted():
    net, optimizer = make("single")
    train(net, optimizer, 0, 2 * STEPS)
    return whole(net)


def _close(results, expected, exact=False):
    for result in results:
        for value, reference in zip(result, expected, strict=True):
            if exact:
                assert torch.equal(value, reference)
            else:
                torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_round_trip_and_one_process(kind, tmp_path):
    two = str(tmp_path / "two")
    went_on = run(_save_and_go_on, 2, kind, two)
    expected = _uninterrupted()
    _close(went_on, expected)
    # 2 -> 2 exactly.
    _close(run(_load_and_go_on, 2, kind, two), went_on[0], exact=True)
    # 2 -> 1 without any process group, saved again, 1 -> 2.
    one = str(tmp_path / "one")
    _close([_load_and_go_on("single", two, one)], expected)
    _close(run(_load_and_go_on, 2, kind, one), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_resharding_to_four_ranks_and_back(kind, tmp_path):
    two, four = str(tmp_path / "two"), str(tmp_path / "four")
    run(_save_and_go_on, 2, kind, two)
    expected = _uninterrupted()
    _close(run(_load_and_go_on, 4, kind, two, four, limit=120), expected)
    _close(run(_load_and_go_on, 2, kind, four), expected)


@pytest.mark.slow
def test_an_asynchronous_save_holds_the_state_of_its_moment(tmp_path):
    folder = str(tmp_path / "async")
    went_on = run(_save_and_go_on, 2, "fsdp", folder, True)
    _close(run(_load_and_go_on, 2, "fsdp", folder), went_on[0], exact=True)


def _full(kind, path):
    """Full state dicts: written by rank 0, given back to fresh objects from there."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    net, optimizer = make(kind)
    train(net, optimizer, 0, STEPS)
    model_state, optimizer_state = states(net, optimizer, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        torch.save((model_state, optimizer_state), path)
        for record in optimizer_state["state"].values():
            assert not any(hasattr(v, "full_tensor") for v in record.values())
    dist.barrier()
    train(net, optimizer, STEPS, STEPS)
    expected = whole(net)
    results = []
    for broadcast in (False, True):
        again, optimizer = make(kind)
        model_state, optimizer_state = {}, {}
        if not broadcast or dist.get_rank() == 0:
            model_state, optimizer_state = torch.load(path)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        # One by one: with nothing for the model, set_state_dict would skip it on the other ranks.
        set_model_state_dict(again, model_state, options=options)
        set_optimizer_state_dict(again, optimizer, optimizer_state, options=options)
        train(again, optimizer, STEPS, STEPS)
        results.append(whole(again))
    return expected, results


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_full_state_dicts(kind, tmp_path):
    for expected, results in run(_full, 2, kind, str(tmp_path / "full.pt"), limit=30):
        _close(results, expected)


def _plain(path):
    """The usual idiom: state_dict() everywhere, one rank writes, every rank reads."""
    net, optimizer = make("ddp")
    train(net, optimizer, 0, STEPS)
    saved = optimizer.state_dict()
    if dist.get_rank() == 0:
        torch.save((net.module.state_dict(), saved), path)
    dist.barrier()
    train(net, optimizer, STEPS, STEPS)
    expected = whole(net)
    again, optimizer = make("ddp")
    model_state, saved = torch.load(path)
    again.module.load_state_dict(model_state)
    optimizer.load_state_dict(saved)
    small = [float(optimizer.state[p]["polar_weight"]) for p in again.parameters()]
    train(again, optimizer, STEPS, STEPS)
    return expected, whole(again), small


def test_torch_save_by_one_rank(tmp_path):
    path = tmp_path / "plain.pt"
    for expected, result, small in run(_plain, 2, str(path)):
        _close([result], expected, exact=True)
        assert small[0] == 1.0
    # And a single process continues from the same file.
    net, optimizer = make("single")
    model_state, saved = torch.load(path)
    net.load_state_dict(model_state)
    optimizer.load_state_dict(saved)
    train(net, optimizer, STEPS, STEPS)
    _close([whole(net)], _uninterrupted())


def _fresh():
    """What DCP's zero-gradient step makes, and that it changes nothing."""
    net, optimizer = make("fsdp")
    optimizer.attach_model(net)
    before = whole(net)
    with warnings.catch_warnings():
        # Nothing was forwarded, so nothing was missed.
        warnings.filterwarnings("error", message="observed layers produced no statistics")
        _, optimizer_state = states(net, optimizer)
    optimizer.remove_observers()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, whole(net), strict=True))
    kinds = {
        f"{name}.{key}": type(value).__name__
        for name, record in optimizer_state["state"].items()
        for key, value in record.items()
    }
    sharded = all(
        record["momentum"].placements == p.placements
        for record, p in zip(optimizer_state["state"].values(), net.parameters(), strict=True)
    )
    train(net, optimizer, 0, 1)
    return unchanged, kinds, sharded, whole(net)


def test_a_fresh_optimizer_has_every_key_after_dcps_own_step():
    results = run(_fresh, 2)
    net, optimizer = make("single")
    # The step on zero gradients counts as one, here as there and with AdamW.
    states(net, optimizer)
    train(net, optimizer, 0, 1)
    expected = whole(net)
    for unchanged, kinds, sharded, weights in results:
        assert unchanged
        assert sharded
        assert kinds == results[0][1]
        assert kinds["2.weight.momentum"] == kinds["2.weight.metric.left_root"] == "DTensor"
        for value, reference in zip(weights, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10)


def _killed(victim, moment, old, new):
    net, optimizer = make("ddp")
    train(net, optimizer, 0, STEPS)
    save(old, net, optimizer)
    train(net, optimizer, STEPS, STEPS)
    if dist.get_rank() == victim:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(FileSystemWriter, moment, die)
    save(new, net, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "moment"),
    # Before a rank's own file is written; after all files are, before the list of them is.
    [(1, "write_data"), (0, "write_data"), (0, "finish")],
)
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before_usable(victim, moment, tmp_path):
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    with pytest.raises(Exception, match=r"SIGKILL|terminated|Connection|closed"):
        run(_killed, 2, victim, moment, old, new, limit=60)
    assert not os.path.exists(os.path.join(new, ".metadata"))
    written = [name for name in os.listdir(new) if name.endswith(".distcp")]
    assert len(written) == {"write_data": 1, "finish": 2}[moment]
    _close(run(_load_and_go_on, 2, "ddp", old), _uninterrupted())
