"""Case 1, the observers' part: loss scaling changes no rank, and a skipped step leaves no trace."""

import copy

import pytest
import torch
from torch import nn

from rpt import ResidualPolarTransport

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def make(strategy):
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    optimizer.attach_model(model, strategy=strategy, observe_every=1)
    return model, optimizer


def snapshot(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def scaled_step(model, optimizer, scaler, poison=False, zero=None):
    (zero or optimizer.zero_grad)()
    scaler.scale(model(X).square().mean()).backward()
    if poison:
        model.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
def test_case_01_a_and_b_scaling_changes_no_rank(strategy):
    plain, optimizer = make(strategy)
    scaled, scaled_optimizer = make(strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for _ in range(5):
        optimizer.zero_grad()
        plain(X).square().mean().backward()
        optimizer.step()
        scaled_step(scaled, scaled_optimizer, scaler)
        a = float(optimizer.state[plain.weight]["residual_entropy_rank"])
        b = float(scaled_optimizer.state[scaled.weight]["residual_entropy_rank"])
        assert 0 < a < 1
        assert b == pytest.approx(a, abs=1e-6)
    torch.testing.assert_close(scaled.weight, plain.weight, rtol=1e-5, atol=0)


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_case_01_c_an_overflow_leaves_no_trace(strategy, zero):
    runs = []
    for poisoned in (True, False):
        model, optimizer = make(strategy)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        clear = optimizer.zero_grad if zero == "optimizer" else model.zero_grad
        for _ in range(5):
            scaled_step(model, optimizer, scaler, zero=clear)
        if poisoned:
            before = snapshot(model, optimizer)
            scaled_step(model, optimizer, scaler, poison=True, zero=clear)
            assert equal(snapshot(model, optimizer), before)
            assert scaler.get_scale() == 32768.0
        scaled_step(model, optimizer, scaler, zero=clear)
        runs.append(snapshot(model, optimizer))
    assert equal(runs[0], runs[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_case_01_half_activations_times_scaled_cotangents_stay_finite(dtype):
    torch.manual_seed(0)
    model = nn.Linear(40, 40, bias=False).to(dtype)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-3)
    optimizer.attach_model(model, observe_every=1)
    x = (1e3 * torch.randn(64, 40)).to(dtype)
    y = model(x)
    cotangents = torch.randn(64, 40).clamp(-3, 3) * 2e4
    y.backward(cotangents.to(dtype))
    model.weight.grad = torch.randn(40, 40).to(dtype)
    optimizer.step()
    rank = float(optimizer.state[model.weight]["residual_entropy_rank"])
    assert 0 < rank < 1
