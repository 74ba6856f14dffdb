"""Shards (FSDP2 and tensor parallelism): whole-matrix updates, whatever the layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # loaded once, before the processes fork
from processes import needs_processes, run
from torch import nn

import rpt

pytestmark = needs_processes

STEPS = 5


def build(dtype=torch.float64):
    """Weights of 8×6, 5×6 (rows 3+2 on two ranks) and 1×6 (rows 1+0), a convolution, a norm."""
    torch.manual_seed(3)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(2, 5, 3, padding=1)
            self.first = nn.Linear(10, 8)
            self.norm = nn.LayerNorm(8)
            self.a = nn.Linear(8, 6)
            self.wide = nn.Linear(6, 8, bias=False)
            self.odd = nn.Linear(6, 5)
            self.one = nn.Linear(6, 1)

        def forward(self, x):
            x = self.conv(x).flatten(1)
            x = self.a(torch.tanh(self.norm(self.first(x))))
            return torch.cat([self.wide(x), self.odd(x), self.one(x)], dim=1)

    return Net().to(dtype)


def batches(steps, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x = torch.randn(12, 2, 2, generator=generator, dtype=dtype)
        yield x, torch.randn(12, 14, generator=generator, dtype=dtype)


def train(net, optimizer, data, parts=1, part=0):
    for x, y in data:
        x, y = x.chunk(parts)[part], y.chunk(parts)[part]
        (net(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(net):
    return [
        p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
        for p in net.parameters()
    ]


def single(dtype=torch.float64, **options):
    net = build(dtype)
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 3e-3, **options)
    train(net, optimizer, batches(STEPS, dtype))
    return whole(net)


def shard(net, mesh, **options):
    from torch.distributed.fsdp import fully_shard

    for module in (net.first, net.a, net.odd):
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def _layouts(names):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from rpt.distributed import report

    size, rank = dist.get_world_size(), dist.get_rank()
    out = {}
    for name in names:
        options, layout, dtype = {}, {}, torch.float64
        mesh = init_device_mesh("cpu", (size,))
        parts, part = size, rank
        if name == "paper":
            options = {"preset": "paper"}
        elif name.startswith("bound"):
            # So small a share that every matrix's step is cut to it.
            options = {"max_relative_step": 1e-3}
            options |= {"ownership": "replicated"} if "replicated" in name else {}
        elif name == "replicated":
            options = {"ownership": "replicated"}
        elif name == "float32":
            dtype = torch.float32
        elif name == "offload":
            layout = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        elif name == "bf16 compute":
            dtype = torch.float32
            layout = {
                "mp_policy": MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
                )
            }
        elif name == "hsdp":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        net = shard(build(dtype), mesh, **layout)
        optimizer = rpt.ResidualPolarTransport(net.parameters(), 3e-3, **options)
        if name == "observed":
            optimizer.attach_model(net)
        train(net, optimizer, batches(STEPS, dtype), parts, part)
        state = [optimizer.state[p] for p in net.parameters()]
        out[name] = {
            "weights": whole(net),
            "capped": [float(r["step_capped"]) for r in state],
            "polar": [float(r["polar_weight"]) for r in state],
            "report": report(optimizer),
            "rows": [p.to_local().shape[0] for p in net.parameters()],
        }
    return out


# In float64 a wrong layout cannot hide; in float32 five steps amplify the rounding of the mean gradient.
TOLERANCES = {"bf16 compute": 3e-2, "float32": 1e-3}


def _compare(results, name, expected):
    tolerance = TOLERANCES.get(name, 1e-10)
    for result in results:
        for value, reference in zip(result[name]["weights"], expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance)
            assert torch.isfinite(value).all()


def test_fsdp2_equals_the_unsharded_step():
    names = ["rows", "paper", "replicated", "float32", "bf16 compute", "observed", "offload"]
    names += ["bound", "bound, replicated"]
    results = run(_layouts, 2, names)
    for name in names:
        options = {"preset": "paper"} if name == "paper" else {}
        options |= {"max_relative_step": 1e-3} if name.startswith("bound") else {}
        dtype = torch.float32 if name in TOLERANCES else torch.float64
        if name != "observed":
            _compare(results, name, single(dtype, **options))
    # The case is really there: a rank without a row of the 1×6 weight.
    assert results[1]["rows"]["rows"][-2] == 0
    # The share of a matrix is that of the whole one, on every rank alike; thin ones are vectors.
    for r in results:
        assert sum(r["bound"]["capped"]) == sum(r["bound, replicated"]["capped"]) == 5
        assert sum(r["rows"]["capped"]) == 0
    first, second = (r["observed"] for r in results)
    assert first["polar"] == second["polar"]
    assert any(0 < p < 0.999 for p in first["polar"])
    held = [r["rows"]["report"]["state_bytes"] for r in results]
    complete = results[0]["replicated"]["report"]["state_bytes"]
    assert sum(held) < 1.25 * complete
    assert max(held) < 0.8 * complete


def test_more_ranks_than_rows_and_hybrid_sharding():
    results = run(_layouts, 4, ["rows", "hsdp"])
    expected = single()
    for name in ("rows", "hsdp"):
        _compare(results, name, expected)
    assert any(r["rows"]["rows"][-2] == 0 for r in results)


def _tensor_parallel(with_fsdp):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    if with_fsdp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        if with_fsdp:
            x = x.chunk(2)[mesh["dp"].get_local_rank()]
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(net)


@pytest.mark.parametrize(("ranks", "with_fsdp"), [(2, False), (4, True)])
def test_tensor_parallel_parameters(ranks, with_fsdp):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        net(torch.randn(8, 6, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in run(_tensor_parallel, ranks, with_fsdp):
        for value, reference in zip(result, whole(net), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-10)


def _accumulated(names):
    """Two micro-batches a step, the first without synchronisation; one of it is thrown away midway."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    size, rank = dist.get_world_size(), dist.get_rank()
    out = {}
    for name in names:
        dtype = torch.float32 if name == "fsdp bf16" else torch.float64
        net = build(dtype)
        if name == "ddp":
            net = nn.parallel.DistributedDataParallel(net)
        elif name == "fsdp bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            net = shard(net, None, mp_policy=policy)
        else:
            net = shard(net, None)
        optimizer = rpt.ResidualPolarTransport(net.parameters(), 3e-3)
        optimizer.attach_model(net, observe_every=1)
        staged = []
        data = list(batches(6, dtype))
        for n, (x, y) in enumerate(data):
            last = n % 2 == 1
            if name == "ddp":
                net.require_backward_grad_sync = last
            else:
                net.set_requires_gradient_sync(last)
            x, y = x.chunk(size)[rank], y.chunk(size)[rank]
            ((net(x) - y).square().mean() / 2).backward()
            staged.append(len(optimizer._observing.stage))
            if n == 3:
                # As after a loss scale's overflow: no step, and gradients cleared by the model.
                net.zero_grad()
            elif last:
                optimizer.step()
                optimizer.zero_grad()
        ranks = [float(optimizer.state[p]["residual_entropy_rank"]) for p in net.parameters()]
        out[name] = staged, ranks, whole(net)
    return out


def test_accumulation_without_synchronisation_counts_every_micro_batch():
    for result in run(_accumulated, 2, ["ddp", "fsdp", "fsdp bf16"]):
        sites = result["ddp"][0][0]
        for staged, _, _ in result.values():
            # What belonged to the thrown away gradients goes when the next backward begins.
            assert staged == [sites, 2 * sites, sites, 2 * sites, sites, 2 * sites]
        assert result["fsdp"][1] == pytest.approx(result["ddp"][1], abs=1e-9)
        for value, reference in zip(result["fsdp"][2], result["ddp"][2], strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10)


def _refusals():
    from torch.distributed.fsdp import FullyShardedDataParallel

    out = []
    net = shard(build(), None)
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 1e-3, ownership="local")
    try:
        optimizer.step()
    except RuntimeError as error:
        out.append(str(error))
    old = FullyShardedDataParallel(build(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = rpt.ResidualPolarTransport(old.parameters(), 1e-3)
    try:
        optimizer.step()
    except RuntimeError as error:
        out.append(str(error))
    return out


def test_what_cannot_work_is_refused_with_the_remedy():
    for local, old in run(_refusals, 2):
        assert "Leave ownership out" in local
        assert "fully_shard" in old
