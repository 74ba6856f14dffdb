"""Acceptance cases 9, 10 and 14: missing gradients, local shards, DCP's zero-gradient start."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # loaded once, before the processes fork
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from processes import needs_processes, run

import rpt


def _case_09():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    optimizer = rpt.ResidualPolarTransport(layers.parameters(), 1e-2)
    history = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        used = layers[:2] if step == 0 and dist.get_rank() == 1 else layers
        for layer in used:
            for p in layer.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
        history.append([p.detach().clone() for p in layers.parameters()])
        if step == 0:
            keys = {k: sorted(v) for k, v in optimizer.state_dict()["state"].items()}
    return history, keys


@needs_processes
def test_case_09_a_gradient_missing_on_one_rank():
    (first, keys), (second, others) = run(_case_09, 2, limit=30)
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert keys == others
    assert len(keys) == 6


SHAPES = ((8, 6), (5, 6), (1, 6))


def _gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(cols, rows, bias=False) for rows, cols in SHAPES))


def _case_10():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    layers = _layers()
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)
    optimizer = rpt.ResidualPolarTransport(layers.parameters(), 1e-2)
    history = []
    for step in range(5):
        for p, gradient in zip(layers.parameters(), _gradients(step), strict=True):
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)
        optimizer.step()
        history.append([p.full_tensor().detach() for p in layers.parameters()])
    rows = [p.to_local().shape[0] for p in layers.parameters()]
    state = get_optimizer_state_dict(layers, optimizer)["state"]
    held = [record["momentum"].to_local().shape[0] for record in state.values()]
    return history, rows, held


@needs_processes
def test_case_10_the_whole_matrix_is_updated_not_the_local_shard():
    layers = _layers()
    optimizer = rpt.ResidualPolarTransport(layers.parameters(), 1e-2)
    expected = []
    for step in range(5):
        for p, gradient in zip(layers.parameters(), _gradients(step), strict=True):
            p.grad = gradient
        optimizer.step()
        expected.append([p.detach().clone() for p in layers.parameters()])
    results = run(_case_10, 2)
    assert [rows for _, rows, _ in results] == [[4, 3, 1], [4, 2, 0]]
    for history, rows, held in results:
        assert held == rows
        for mine, reference in zip(history, expected, strict=True):
            for value, other in zip(mine, reference, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-7)


def test_case_14_the_zero_gradient_start_of_distributed_checkpointing():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    torch.manual_seed(0)
    net = nn.Linear(6, 5)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = rpt.ResidualPolarTransport(net.parameters(), 1e-2, weight_decay=0.1)
    state = get_optimizer_state_dict(net, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    tensors = [
        v for r in state["state"].values() for v in r.values() if isinstance(v, torch.Tensor)
    ]
    assert all(t.isfinite().all() for t in tensors)
    torch.manual_seed(1)
    for p in net.parameters():
        p.grad = torch.randn(p.shape)
    optimizer.step()
    fresh = nn.Linear(6, 5)
    for p, start, q in zip(fresh.parameters(), before, net.parameters(), strict=True):
        p.data.copy_(start)
        p.grad = q.grad.clone()
    reference = rpt.ResidualPolarTransport(fresh.parameters(), 1e-2, weight_decay=0.1)
    reference.step()
    for start, value, other in zip(before, net.parameters(), fresh.parameters(), strict=True):
        moved, expected = (value - start).flatten(), (other - start).flatten()
        assert torch.cosine_similarity(moved, expected, dim=0) > 0.99
