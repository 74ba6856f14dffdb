"""Stochastic rounding of bfloat16 weights: right on average, exact where nothing is cut off."""

import copy

import pytest
import torch

import rpt
from rpt.apply import round_into


def rounded(value, update=None, rounding="stochastic"):
    parameter = torch.zeros(value.shape, dtype=torch.bfloat16)
    round_into(parameter, value, torch.randn_like(value) if update is None else update, rounding)
    return parameter.float()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_it_rounds_up_with_the_probability_of_what_is_cut_off(share, sign):
    torch.manual_seed(0)
    spacing = 2.0**-7  # of bfloat16 between 1 and 2
    value = torch.full((40_000,), sign * (1.5 + share * spacing))
    found = rounded(value)
    assert set((found.abs() - 1.5).unique().tolist()) == {0.0, spacing}
    up = (found.abs() > 1.5).double().mean().item()
    assert abs(up - share) < 4 * (share * (1 - share) / 40_000) ** 0.5


def test_numbers_of_bfloat16_stay_and_extremes_survive():
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(exact), exact)
    extremes = torch.tensor([3.38e38, -3.38e38, torch.inf, -torch.inf, 0.0, -0.0])
    assert torch.equal(rounded(extremes), extremes.bfloat16().float())
    assert rounded(torch.tensor([torch.nan])).isnan().all()


def test_it_is_a_function_of_its_arguments():
    value, update = torch.randn(2, 100)
    assert torch.equal(rounded(value, update), rounded(value, update))


def test_a_small_rate_is_not_lost():
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64, bias=False).bfloat16()
    gradients = torch.randn(64, 64) + torch.randn(30, 64, 64) * 0.3
    wanted = copy.deepcopy(model).float()
    moved = {}
    for rounding in ("nearest", "stochastic", "float32"):
        net = copy.deepcopy(model if rounding != "float32" else wanted)
        options = {} if rounding == "float32" else {"rounding": rounding}
        optimizer = rpt.ResidualPolarTransport(
            net.parameters(), lr=1e-5, weight_decay=0.0, **options
        )
        for gradient in gradients:
            net.weight.grad = gradient.to(net.weight.dtype)
            optimizer.step()
        moved[rounding] = (net.weight.float() - model.weight.float()).flatten()
    along = moved["float32"] / moved["float32"].square().sum()
    # Most steps of 1e-5 are smaller than half the spacing of weights near 0.1.
    assert (moved["nearest"] @ along).item() < 0.5
    assert (moved["stochastic"] @ along).item() == pytest.approx(1.0, abs=0.1)
