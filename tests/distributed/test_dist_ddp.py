"""Replicas (DDP): the numbers of a single process, equal bits everywhere, and no deadlocks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from processes import needs_processes, run
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import rpt

pytestmark = needs_processes


def build(dtype=torch.float32):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(12, 20),
        nn.Tanh(),
        nn.Linear(20, 20),
        nn.LayerNorm(20),
        nn.Linear(20, 20, bias=False),
        nn.Linear(20, 7),
    )
    return net.to(dtype)


def batches(steps, seed=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(24, 12, generator=generator, dtype=dtype)
        yield x, torch.randn(24, 7, generator=generator, dtype=dtype)


def train(net, optimizer, data, accumulate=1):
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = dist.get_world_size() if dist.is_initialized() else 1
    for n, (x, y) in enumerate(data):
        x, y = x.chunk(size)[rank], y.chunk(size)[rank]
        last = n % accumulate == accumulate - 1
        ready = net.no_sync if hasattr(net, "no_sync") and not last else _now
        with ready():
            ((net(x) - y).square().mean() / accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


class _now:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def single(data, dtype=torch.float32, observe=False, accumulate=1, **options):
    net = build(dtype)
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 3e-3, **options)
    if observe:
        optimizer.attach_model(net, observe_every=1)
    train(net, optimizer, data, accumulate)
    return weights(net), optimizer


CONFIGURATIONS = {
    "drop_in": {},
    "float32": {},
    "paper": {"preset": "paper"},
    "replicated": {"ownership": "replicated"},
    "tensor_lr": {"lr": torch.tensor(3e-3), "max_root_staleness": 2},
}


def _many(names):
    out = {}
    for name in names:
        dtype = torch.float32 if name == "float32" else torch.float64
        net = DistributedDataParallel(build(dtype))
        options = {"lr": 3e-3} | CONFIGURATIONS[name]
        optimizer = rpt.ResidualPolarTransport(net.parameters(), **options)
        train(net, optimizer, batches(6, dtype=dtype), accumulate=2 if name == "paper" else 1)
        saved = optimizer.state_dict()["state"]
        out[name] = {
            "weights": weights(net),
            "keys": {i: sorted(record) for i, record in saved.items()},
            "momentum": [saved[i]["momentum"] for i in range(len(saved))],
            "small": [
                [
                    float(optimizer.state[p][key])
                    for key in ("step", "polar_weight", "frame_coherence")
                ]
                for p in net.parameters()
            ],
            "bytes": rpt_bytes(optimizer),
            "gain": float(optimizer.param_groups[0]["gain"]),
            "telemetry": str(optimizer.telemetry()).count("\n"),
        }
    return out


def rpt_bytes(optimizer):
    from rpt.distributed import report

    return report(optimizer)["state_bytes"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp_gives_the_numbers_of_a_single_process(ranks):
    results = run(_many, ranks, list(CONFIGURATIONS))
    for name, options in CONFIGURATIONS.items():
        alone = {k: v for k, v in options.items() if k not in ("ownership", "lr")}
        # Six steps amplify the rounding of the mean gradient, through roots of nearly singular metrics
        # and polar factors of nearly singular updates; float64 shows that nothing else differs.
        dtype, tolerance = torch.float64, 1e-8
        if name == "float32":
            dtype, tolerance = torch.float32, 1e-3
        data = batches(6, dtype=dtype)
        expected, optimizer = single(data, dtype, accumulate=2 if name == "paper" else 1, **alone)
        first = results[0][name]
        for result in results:
            mine = result[name]
            for value, other, reference in zip(
                mine["weights"], first["weights"], expected, strict=True
            ):
                assert torch.equal(value, other), name
                torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance)
            assert mine["keys"] == first["keys"]
            assert mine["small"] == first["small"]
            assert mine["gain"] == pytest.approx(float(optimizer.param_groups[0]["gain"]), rel=1e-6)
            assert mine["telemetry"] == first["telemetry"]
            (group,) = optimizer.param_groups
            for value, p in zip(mine["momentum"], group["params"], strict=True):
                reference = optimizer.state[p]["momentum"]
                torch.testing.assert_close(
                    value, reference, rtol=10 * tolerance, atol=10 * tolerance
                )
        whole = results[0]["replicated"]["bytes"]
        if name == "drop_in":
            # What ranks own adds up to the whole, and none holds most of it.
            assert sum(r[name]["bytes"] for r in results) < 1.2 * whole
            assert max(r[name]["bytes"] for r in results) < 0.75 * whole


def _observed(ownership):
    net = DistributedDataParallel(build())
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 3e-3, ownership=ownership)
    optimizer.attach_model(net.module, observe_every=1)
    train(net, optimizer, batches(5))
    state = [optimizer.state[p] for p in net.parameters()]
    return (
        weights(net),
        [float(r["polar_weight"]) for r in state],
        [float(r["residual_entropy_rank"]) for r in state],
        [int(r["observations"]) for r in state],
    )


def test_observed_ranks_are_averaged_over_replicas():
    """Replicas see different data; polar weights, and with them the weights, stay identical."""
    for ownership in ("owner", "replicated"):
        (first, polar, ranks, counts), (second, *rest) = run(_observed, 2, ownership)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert rest == [polar, ranks, counts]
        assert any(0 < r < 1 for r in ranks)
        assert len({round(p, 6) for p in polar if p}) > 1
        assert set(counts) == {0, 5}


def _mean_of_two():
    """One observation per rank, known ranks: the polar weight must use their mean."""
    weight = nn.Parameter(torch.eye(4))
    optimizer = rpt.ResidualPolarTransport([weight], 1e-3, polar_beta=0.5, polar_prior=0.0)
    optimizer.set_residual_entropy_rank(0.2 + 0.4 * dist.get_rank(), weight)
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    return float(optimizer.state[weight]["polar_weight"])


def test_the_mean_observation_is_what_every_rank_uses():
    # r = mean(0.2, 0.6) = 0.4; α = 0.5·0 + 0.5·(1 - 0.4)
    assert run(_mean_of_two, 2) == pytest.approx([0.3, 0.3], abs=1e-6)


def _faults():
    """Every fault in one process group; returns what each rank saw."""
    rank, seen = dist.get_rank(), {}

    def attempt(name, change, **options):
        net = build()
        parameters = list(net.parameters())
        optimizer = rpt.ResidualPolarTransport(parameters, 1e-2, **options)
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        before = weights(net)
        change(parameters, optimizer)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            message = ""
        except RuntimeError as error:
            message = str(error)
        after = weights(net)
        for p in parameters:
            p.grad = torch.ones_like(p)
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        skipped = [optimizer.state[p].get("skipped", 0) for p in parameters]
        if not message:
            optimizer.step()
        seen[name] = (message, moved, weights(net), skipped)

    def only_on_one(change):
        return lambda parameters, optimizer: change(parameters, optimizer) if rank == 1 else None

    attempt("none", lambda *_: None)
    attempt("missing", only_on_one(lambda ps, _: setattr(ps[2], "grad", None)))
    attempt("all missing", only_on_one(lambda ps, _: [setattr(p, "grad", None) for p in ps]))
    attempt("nan", only_on_one(lambda ps, _: ps[0].grad.fill_(torch.nan)))
    attempt("strict", only_on_one(lambda ps, _: ps[0].grad.fill_(torch.inf)), nonfinite="raise")
    attempt("sparse", only_on_one(lambda ps, _: setattr(ps[0], "grad", ps[0].grad.to_sparse())))

    def broken(_, optimizer):
        def fail(*_):
            raise ValueError("a broken backend")

        from rpt.roots import FullRoots

        backend = FullRoots()
        optimizer._stacks.plans.clear()
        for stack in optimizer._stacks.registry._home.values():
            if stack.backend is not None:
                stack.backend = backend
                object.__setattr__(backend, "accumulate", fail)

    attempt("broken", only_on_one(broken), roots="full", root_drift_threshold=None)
    return seen


@pytest.fixture(scope="module")
def faults():
    return run(_faults, 2, limit=60)


def _equal_everywhere(results, name):
    first, second = (r[name][2] for r in results)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["missing", "all missing", "nan"])
def test_a_gradient_missing_or_broken_on_one_rank_deadlocks_nobody(faults, name):
    assert [r[name][0] for r in faults] == ["", ""]
    assert _equal_everywhere(faults, name)
    assert faults[0][name][3] == faults[1][name][3]


def test_a_missing_gradient_is_the_mean_of_those_present(faults):
    # All gradients are ones: with or without rank 1 the mean is the same, and so is the result.
    for name in ("missing", "all missing"):
        for value, reference in zip(faults[0][name][2], faults[0]["none"][2], strict=True):
            assert torch.equal(value, reference)


def test_one_rank_with_a_nan_makes_all_skip_that_parameter(faults):
    _, moved, _, skipped = faults[0]["nan"]
    assert skipped[0] == 1
    assert not any(skipped[1:])
    assert not moved[0]
    assert all(moved[1:])


def test_an_error_on_one_rank_is_an_error_on_all(faults):
    assert all("non-finite gradient" in r["strict"][0] for r in faults)
    assert "sparse" in faults[1]["sparse"][0]
    assert "rank(s) [1] refused" in faults[0]["sparse"][0]
    assert not any(r["sparse"][1][i] for r in faults for i in range(7))
    assert "a broken backend" in faults[1]["broken"][0]
    assert "rank(s) [1] failed" in faults[0]["broken"][0]
    # Weights stay equal even then.
    assert _equal_everywhere(faults, "broken")


def _different():
    torch.manual_seed(dist.get_rank())
    out = []
    net = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = rpt.ResidualPolarTransport(net.parameters(), 1e-3)
        net.weight.grad = torch.randn(4, 4)
        before = net.weight.detach().clone()
        optimizer.step()
        out.append([str(w.message) for w in caught])
        out.append(not torch.equal(before, net.weight))
    for mode in ("owner", "replicated", "local"):
        optimizer = rpt.ResidualPolarTransport(net.parameters(), 1e-3, ownership=mode)
        try:
            optimizer.step()
            out.append("")
        except RuntimeError as error:
            out.append(str(error))
    return out


def test_ranks_with_models_of_their_own_are_left_alone():
    for told, moved, owner, replicated, local in run(_different, 2):
        assert any("different values on different ranks" in text for text in told)
        assert moved
        assert "Broadcast the model" in owner
        assert "Broadcast the model" in replicated
        assert local == ""


def _uneven():
    from rpt.distributed.join import JoinableOptimizer

    net = DistributedDataParallel(build())
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 3e-3)
    data = list(batches(3 + 2 * dist.get_rank()))
    with Join([net, JoinableOptimizer(optimizer)]):
        for x, y in data:
            (net(x[:4]) - y[:4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(net), optimizer.state_dict()["state"][0]["step"]


def test_ranks_may_run_out_of_data_at_different_times():
    (first, steps), (second, _) = run(_uneven, 2)
    assert steps == 5
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _branches():
    """A parameter group added in the middle, frozen parameters, float64 and bfloat16, a static graph."""
    net = build()
    net[5].requires_grad_(False)
    ddp = DistributedDataParallel(net, static_graph=True)
    optimizer = rpt.ResidualPolarTransport([p for p in net.parameters() if p.requires_grad], 3e-3)
    train(ddp, optimizer, batches(2))
    net[5].requires_grad_(True)
    optimizer.add_param_group({"params": list(net[5].parameters()), "lr": 1e-3})
    net[5].weight.grad = torch.ones_like(net[5].weight)
    train(DistributedDataParallel(net), optimizer, batches(2))
    out = [weights(net)]
    for dtype in (torch.float64, torch.bfloat16):
        ddp = DistributedDataParallel(build(dtype))
        optimizer = rpt.ResidualPolarTransport(ddp.parameters(), 3e-3)
        train(ddp, optimizer, batches(3, dtype=dtype))
        out.append(weights(ddp))
        assert all(p.dtype == dtype for p in ddp.parameters())
    return out


def test_groups_added_later_and_other_dtypes():
    first, second = run(_branches, 2)
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    expected, _ = single(batches(3, dtype=torch.float64), dtype=torch.float64)
    for value, reference in zip(first[1], expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10)


def _alone():
    net = nn.Linear(4, 4)
    dist.broadcast(net.weight.detach(), 0)
    dist.broadcast(net.bias.detach(), 0)
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 1e-3)
    net.weight.grad = torch.ones(4, 4)
    optimizer.step()
    if dist.get_rank() == 0:
        from datetime import timedelta

        from rpt.distributed import agreement

        agreement.PATIENCE = timedelta(seconds=1)
        try:
            optimizer.state_dict()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_state_dict_on_one_rank_only_is_an_error_with_the_remedy():
    message, _ = run(_alone, 2, limit=30)
    assert "rank(s) [1] have not called state_dict()" in message
    assert "ownership='replicated'" in message
