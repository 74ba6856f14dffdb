"""On a device an ordinary step makes the host wait once: to read which gradients are finite.

Run by test_pretended_device.py, or by name: `python -m pytest tests/rpt/host_waits.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.bench import pretend_device
from rpt import ResidualPolarTransport

SHAPES = ((96, 80), (96, 80), (80, 96), (12, 5), (7, 3, 3, 3), (300, 20), (40,), (5,), ())
PEAKS = {"tolist": 1}


def parameters(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]
    return [nn.Parameter(p.to(device)) for p in made]


def feed(params, step, without=()):
    generator = torch.Generator().manual_seed(step)
    for k, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if k in without else gradient.to(p.device)


def waits(steps, dtype=torch.float32, without=lambda step: (), before=lambda *_: None, **options):
    """Of each step of an optimizer on a device."""
    found = []
    with pretend_device.PretendDevice() as device:
        params = parameters(device.device, dtype)
        optimizer = ResidualPolarTransport(params, 1e-2, **options)
        for step in range(steps):
            feed(params, step, without(step))
            before(step, optimizer, device.device)
            device.clear()
            optimizer.step()
            found.append(dict(device.waits))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eps": 1e-8, "polar_prior": 0.6, "maximize": True},
        {"roots": "blocked(block_size=32)", "weight_decay": 0.0},
        {"roots": "none", "update_rms": None, "max_relative_step": None},
        {"roots": "full", "polar_dtype": "bfloat16"},
        {"gain_rate": 0.1, "signal_length": False},
        {"dtype": torch.bfloat16, "rounding": "stochastic"},
    ],
    ids=str,
)
def test_an_ordinary_step_waits_once_also_where_roots_are_made(options):
    """Young roots are made in nearly every one of these."""
    assert waits(8, **options)[1:] == [PEAKS] * 7


def test_parameters_without_a_gradient_cost_a_wait_when_they_change_and_no_other():
    found = waits(8, without=lambda step: (0, 4, 6) if step % 2 else ())
    assert found[2:] == [PEAKS] * 6


def test_a_rate_and_observations_on_the_device_are_not_read():
    def before(step, optimizer, device):
        if step == 1:
            optimizer.param_groups[0]["lr"] = torch.tensor(1e-2).to(device)
        optimizer.set_residual_entropy_rank(torch.tensor(0.3).to(device), optimizer._all()[:3])

    assert waits(6, before=before)[2:] == [PEAKS] * 4


def test_a_drift_threshold_adds_one_read_for_all_stacks():
    found = waits(6, root_drift_threshold=1e9, max_root_staleness=1000)
    assert found[1:] == [PEAKS | {"copy from the device": 1}] * 5


def test_stacks_of_matrices_add_one_read_each_of_their_largest_entries():
    assert waits(6, stacked=True)[1:] == [PEAKS | {"copy from the device": 1}] * 5


def test_the_guard_sees_decompositions():
    found = waits(2, roots="low_rank")[1]
    assert found["_linalg_eigh"] > 0
    found = waits(2, dtype=torch.float64)[1]
    assert found["_linalg_eigh"] > 0


def test_the_guard_sees_values_copies_and_masks():
    with pretend_device.PretendDevice() as device:
        x = torch.ones(3, 3, device=device.device)
        for wait in (
            lambda: float(x.sum()),
            lambda: bool(x.any()),
            lambda: x.cpu(),
            lambda: x.numpy(),
            lambda: x.to("cpu", non_blocking=True),
            lambda: torch.ones(2).to(device.device),
            lambda: x.copy_(torch.ones(3, 3)),
            lambda: x[x > 0],
            lambda: x.nonzero(),
            lambda: x.new_tensor([1.0]),
        ):
            device.clear()
            wait()
            assert device.waits.total() == 1
        device.clear()
        torch.ones(2).to(device.device, non_blocking=True)
        x[torch.tensor([0, 1]).to(device.device, non_blocking=True)] = x[:2] * 2.0
        assert not device.waits
        with pytest.raises(RuntimeError, match="operands on the device and on the CPU"):
            x + torch.ones(3, 3)


@pytest.mark.parametrize("options", [{}, {"preset": "paper"}, {"gain_rate": 0.1}], ids=str)
def test_a_device_follows_the_cpu(options):
    """The same rule with numbers as tensors; roots by products where age decides, so not the same bits."""
    start, here = parameters(), parameters()
    optimizer = ResidualPolarTransport(here, 1e-2, polar_dtype="float32", **options)
    for step in range(12):
        feed(here, step)
        optimizer.step()
    with pretend_device.PretendDevice() as device:
        there = parameters(device.device)
        optimizer = ResidualPolarTransport(there, 1e-2, polar_dtype="float32", **options)
        for step in range(12):
            feed(there, step)
            optimizer.step()
        found = [p.detach().cpu() for p in there]
    tolerance = 1e-4 if options.get("preset") == "paper" else 0.02
    for begun, one, other in zip(start, here, found, strict=True):
        assert (one - other).norm() <= tolerance * (one - begun).norm()
