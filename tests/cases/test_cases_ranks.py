"""Acceptance cases 43, 63, 64, 65 and 69: manifolds and state over ranks, and decompositions that fail."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # loaded once, before the processes fork
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from processes import needs_processes, run
from rpt.geometry import lorentz

import rpt

# -- 43: points stay points under FSDP2, materialisation and conversions ----------------------------


class Points(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.table = lorentz.LorentzEmbedding(count, 3)
        self.read = nn.Linear(3, 2)

    def forward(self, tokens):
        a, u = self.table(tokens)
        return self.read(u) * a[..., None].cosh()


def points_step(net, optimizer, part=0, parts=1):
    target = torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2)
    tokens = torch.arange(6) % net.table.num_embeddings
    error = net(tokens.chunk(parts)[part]) - target.chunk(parts)[part].to(net.read.weight.dtype)
    error.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(net):
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in net.parameters()
    ]


def _case_43_points(wrap, count, ownership):
    """Three steps, through a checkpoint, two more."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    out = {}
    for build in (rpt.ResidualPolarTransport, lorentz.RiemannianAdamW):
        torch.manual_seed(0)
        net = Points(count).double()
        inner, part, parts = net, 0, 1
        if wrap == "fsdp":
            fully_shard(net)
        if wrap == "ddp":
            net = nn.parallel.DistributedDataParallel(net)
            net.table = inner.table
            net.read = inner.read
        if wrap:
            part, parts = dist.get_rank(), dist.get_world_size()
        options = {"ownership": ownership} if build is rpt.ResidualPolarTransport else {}

        def make(net=net, build=build, options=options):
            return build(net.parameters(), 0.1, betas=(0.9, 0.95), weight_decay=0.01, **options)

        optimizer = make()
        for _ in range(3):
            points_step(net, optimizer, part, parts)
        if build is rpt.ResidualPolarTransport:
            again = make()
            for flat in (False, True):
                kind = StateDictOptions(flatten_optimizer_state_dict=flat)
                state = get_optimizer_state_dict(inner, optimizer, options=kind)
                set_optimizer_state_dict(inner, again, state, options=kind)
                optimizer, again = again, make()
        for _ in range(2):
            points_step(net, optimizer, part, parts)
        out[build.__name__] = weights(inner)
    return out


@needs_processes
@pytest.mark.parametrize(
    ("wrap", "count", "ownership"),
    [("fsdp", 6, "auto"), ("fsdp", 1, "auto"), ("fsdp", 5, "replicated"), ("ddp", 6, "auto")],
)
def test_case_43_points_of_several_ranks_are_those_of_one(wrap, count, ownership):
    expected = _case_43_points("", count, "auto")
    for result in run(_case_43_points, 2, wrap, count, ownership):
        for name, values in expected.items():
            for value, reference in zip(result[name], values, strict=True):
                torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-9)
            length = result[name][0][:, 1:].norm(dim=1)
            torch.testing.assert_close(length, torch.ones_like(length))


def _case_43_split():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    net = lorentz.LorentzEmbedding(6, 3)
    fully_shard(net, shard_placement_fn=lambda _: Shard(1))
    optimizer = rpt.ResidualPolarTransport(net.named_parameters(), 0.1)
    before = net.weight.full_tensor()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), torch.equal(before, net.weight.full_tensor())


@needs_processes
def test_case_43_points_cut_apart_are_refused():
    for message, unchanged in run(_case_43_split, 2):
        assert "weight (6, 4) lives on a manifold and is sharded along its coordinates" in message
        assert unchanged


def converted(how):
    """A model after some conversion, float64, and the points it should have."""
    torch.manual_seed(0)
    if how == "meta":
        with torch.device("meta"):
            net = Points()
        net.to_empty(device="cpu")
        net.double()
        net.table.reset_parameters()
        net.read.reset_parameters()
        return net
    net = Points()
    if how in ("overwrite", "swap"):
        switch = getattr(torch.__future__, f"set_{how}_module_params_on_conversion")
        switch(True)
        try:
            return net.double()
        finally:
            switch(False)
    if how == "assign":
        state = {name: value.double() for name, value in net.state_dict().items()}
        net.load_state_dict(state, assign=True)
        return net
    if how == "plain parameter":
        net.table.weight = nn.Parameter(net.table.weight.detach().clone())
    return net.double()


@pytest.mark.parametrize("build", [rpt.ResidualPolarTransport, lorentz.RiemannianAdamW])
@pytest.mark.parametrize("how", ["meta", "overwrite", "swap", "assign", "plain parameter"])
def test_case_43_a_converted_model_keeps_its_points(how, build):
    net = converted(how)
    twin = Points().double()
    twin.load_state_dict(net.state_dict())
    for copied in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert copied.table.weight.manifold.k is copied.table.curvature
        reference = copy.deepcopy(twin)
        for model in (copied, reference):
            optimizer = build(model.parameters(), 0.1)
            for _ in range(3):
                points_step(model, optimizer)
        for value, expected in zip(copied.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(value.data, expected.data, rtol=1e-12, atol=1e-12)
        length = copied.table.weight[:, 1:].norm(dim=1)
        torch.testing.assert_close(length, torch.ones_like(length))


# -- 63: the same keys on every rank ---------------------------------------------------------------


def _case_63(wrap):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Linear(40, 30)).double()
    inner = net
    if wrap == "fsdp":
        fully_shard(net)
    else:
        net = nn.parallel.DistributedDataParallel(net)

    def train(optimizer, steps, seed):
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        for _ in range(steps):
            x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def make():
        return rpt.ResidualPolarTransport(net.parameters(), 3e-3)

    first = make()
    train(first, 2, 10)
    keys = [sorted(first.state[p]) for p in net.parameters()]
    held = sum(
        value.numel() * value.element_size()
        for record in first.state.values()
        for value in record.values()
        if isinstance(value, torch.Tensor)
    )
    kind = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(inner, first, options=kind)
    start = {name: value.clone() for name, value in inner.state_dict().items()}
    train(first, 2, 20)
    expected = weights(inner)
    inner.load_state_dict(start)
    second = make()
    set_optimizer_state_dict(inner, second, saved, options=kind)
    loaded = [sorted(second.state[p]) for p in net.parameters()]
    train(second, 2, 20)
    return keys, loaded, held, expected, weights(inner)


@needs_processes
@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_case_63_flattened_optimizer_states_go_round(wrap):
    results = run(_case_63, 2, wrap)
    for keys, loaded, _, expected, found in results:
        assert keys == results[0][0] == loaded
        for value, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-10)
    # What stands for another rank's tensors takes no memory.
    held = [result[2] for result in results]
    assert max(held) < 0.9 * sum(held)


# -- 65 and 69: who trains together, and who apart -------------------------------------------------


def told(caught):
    return [str(w.message) for w in caught if "rank" in str(w.message)]


def _case_65(ownership):
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = rpt.ResidualPolarTransport(
        [("head.weight", weight)], 1e-2, ownership=ownership, weight_decay=0.0
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            weight.grad = torch.eye(2) * (1.0 if dist.get_rank() == 0 else -3.0)
            optimizer.step()
    return told(caught), weight.detach()


@needs_processes
@pytest.mark.parametrize("ownership", ["auto", "replicated", "local"])
def test_case_65_replicas_that_nothing_synchronises(ownership):
    (first, a), (second, b) = run(_case_65, 2, ownership)
    if ownership == "local":
        assert first == second == []
        # Each its own step, as with AdamW.
        assert (a - 1).diagonal().max() < 0 < (b - 1).diagonal().min()
        return
    for messages in (first, second):
        assert len(messages) == 1, "one warning, not one for each step"
        assert "head.weight (2, 2)" in messages[0]
        assert "ownership='local'" in messages[0]
    assert torch.equal(a, b) == (ownership == "auto")


def _case_65_synchronised(kinds):
    """How many warnings there were after each of five steps."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    out = {}
    for kind in kinds:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        if kind == "bfloat16":
            net.bfloat16()
        ddp = nn.parallel.DistributedDataParallel(net)
        optimizer = rpt.ResidualPolarTransport(ddp.parameters(), 1e-3)
        if kind == "compressed":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if kind == "local SGD":
            state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
            ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
            optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(2, warmup_steps=2))
        out[kind] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(5):
                x = torch.randn(6, 4, generator=generator).to(net[0].weight.dtype)
                ddp(x).square().mean().backward()
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                out[kind].append(len(told(caught)))
    return out


@needs_processes
def test_case_65_averaged_gradients_are_told_from_others():
    """Whatever averages gradients gives no warning, in any precision; local SGD gives one."""
    for counts in run(_case_65_synchronised, 2, ["plain", "bfloat16", "compressed", "local SGD"]):
        assert counts.pop("local SGD") == [0, 0, 1, 1, 1]
        for kind, none in counts.items():
            assert none == [0] * 5, kind


def chain(sizes):
    """Linear layers with the same values everywhere."""
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for layer in layers:
        for p in layer.parameters():
            nn.init.constant_(p, 0.1)
    return nn.Sequential(*layers).double()


def _case_69(sizes):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = nn.parallel.DistributedDataParallel(chain(sizes))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=rpt.ResidualPolarTransport, lr=1e-2
        )
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            x = torch.randn(6, sizes[0], generator=generator, dtype=torch.float64)
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return told(caught), weights(net)


@needs_processes
@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 12, 3)])
def test_case_69_zero_redundancy_optimizer_is_not_warned_of(sizes):
    """Equal shapes and values on both ranks must not be taken for replicas either."""
    net = chain(sizes)
    optimizer = rpt.ResidualPolarTransport(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(6, sizes[0], generator=generator, dtype=torch.float64)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for messages, found in run(_case_69, 2, sizes):
        assert messages == []
        for value, expected in zip(found, weights(net), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-8)
