"""Small matrices that share a padded stack take the steps they would take alone."""

import pytest
import torch

import rpt
from rpt import stack

SHAPES = [(2, 24), (24, 48), (48, 24), (4, 12), (1, 12), (16, 3, 2), (5, 5), (40, 64)]


def trajectory(monkeypatch, small_side, dtype=torch.float32, **options):
    monkeypatch.setattr(stack, "SMALL_SIDE", small_side)
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]
    optimizer = rpt.ResidualPolarTransport(parameters, lr=1e-2, **options)
    for _ in range(6):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    return optimizer, parameters


@pytest.mark.parametrize("preset", ["drop_in", "paper"])
@pytest.mark.parametrize("roots", ["full", "auto", "blocked"])
def test_padding_changes_no_step(monkeypatch, preset, roots):
    # By age, refreshes are spread over a stack's members: only a refresh at every step is the same.
    options = {"preset": preset, "roots": roots, "polar_prior": 0.6, "max_root_staleness": 1}
    options |= {"root_drift_threshold": None}
    padded_optimizer, padded = trajectory(monkeypatch, 64, **options)
    alone_optimizer, alone = trajectory(monkeypatch, 0, **options)
    homes = {id(padded_optimizer._registry.home(p)[0]) for p in padded}
    assert len(homes) == 2, "all eight shapes fit into two padded stacks"
    for a, b in zip(padded, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for key in ("momentum", "frame"):
            left, right = padded_optimizer.state[a][key], alone_optimizer.state[b][key]
            assert left.shape == a.shape
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)
        condition = padded_optimizer.state[a]["root_condition"]
        torch.testing.assert_close(
            condition, alone_optimizer.state[b]["root_condition"], rtol=0.02, atol=0
        )


def test_a_backend_that_does_not_pad_is_left_alone(monkeypatch):
    optimizer, parameters = trajectory(monkeypatch, 64, roots="low_rank(rank=2)")
    for parameter in parameters:
        home, _ = optimizer._registry.home(parameter)
        assert not home.padded


def test_double_precision_is_left_alone(monkeypatch):
    optimizer, parameters = trajectory(monkeypatch, 64, dtype=torch.float64)
    assert not any(optimizer._registry.home(p)[0].padded for p in parameters)


def test_the_published_rule_is_left_alone(monkeypatch):
    optimizer, parameters = trajectory(monkeypatch, 64, preset="paper")
    assert not any(optimizer._registry.home(p)[0].padded for p in parameters)
