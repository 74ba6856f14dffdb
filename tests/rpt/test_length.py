"""The step's length (specification 8a): each law against float64 NumPy, and the options end to end."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rpt import ResidualPolarTransport
from rpt.rule.length import next_energy, noise_ratio, relative_limit, rescale, signal, step_rms
from rpt.rule.scalars import numbers_of

TENSORS = numbers_of(torch.float64, False)
OFF = {"signal_length": False, "thin_as_vector": False, "max_relative_step": None}


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


@given(st.sampled_from([0.0, 0.5, 0.9, 0.95]), st.lists(st.floats(0, 1e3), min_size=1, max_size=20))
def test_energy_is_the_corrected_mean_of_squared_lengths(beta1, lengths):
    energy = column(0.0)
    for t, n in enumerate(lengths, 1):
        energy = next_energy(energy, column(n), beta1, column(1 - beta1**t), TENSORS)
    weights = np.array([beta1 ** (len(lengths) - 1 - k) for k in range(len(lengths))])
    expected = (1 - beta1) * (weights * np.square(lengths)).sum()
    assert energy.item() == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_an_unknown_energy_starts_at_the_present_request():
    energy = next_energy(column(-1.0), column(3.0), 0.9, column(0.25), TENSORS)
    assert energy.item() / 0.25 == pytest.approx(9.0)


@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("steps", [1, 2, 7, 400])
def test_noise_ratio_is_what_independent_requests_give(beta1, steps):
    """E‖m̂‖²/E ê of independent unit noise, from the weights of the running mean themselves."""
    weights = (1 - beta1) * beta1 ** np.arange(steps)
    correction = 1 - beta1**steps
    expected = math.sqrt(np.square(weights / correction).sum())
    assert noise_ratio(beta1, column(correction)).item() == pytest.approx(expected, rel=1e-9)


@given(st.floats(1e-12, 1e12), st.integers(1, 300), st.floats(0, 1))
def test_signal_is_clipped_and_free_of_scale(scale, t, share):
    correction = column(1 - 0.9**t)
    n = column(scale)
    momentum, energy = n * share * correction, n * n * correction
    s = signal(momentum, energy, 0.9, correction, TENSORS).item()
    expected = share / noise_ratio(0.9, correction).item()
    assert s == pytest.approx(min(max(expected, 0.02), 4.0), rel=1e-6)
    assert signal(momentum * 0, energy * 0, 0.9, correction, TENSORS).item() == pytest.approx(
        min(1 / noise_ratio(0.9, correction).item(), 4.0)
    )


@given(st.floats(1e-30, 1e30), st.integers(1, 40), st.floats(0.01, 5))
def test_rescaling_gives_the_asked_length(scale, n, rms):
    generator = torch.Generator().manual_seed(n)
    u = torch.nn.functional.pad(torch.randn(1, n, generator=generator) * scale, (0, 5))
    length = u.norm(dim=1, keepdim=True)
    out = rescale(u.clone(), length, torch.tensor([[rms]]), torch.tensor([[float(n)]]), TENSORS)
    found = out[0, :n].double().square().mean().sqrt().item()
    # Requests have a length near one; the extremes are here to see what never becomes NaN.
    assert np.isfinite(found)
    if 1e-15 < scale < 1e15:
        assert found == pytest.approx(rms, rel=1e-5)
    assert not rescale(
        u * 0, length * 0, torch.tensor([[rms]]), torch.tensor([[1.0]]), TENSORS
    ).any()


def test_the_limit_is_a_share_of_the_matrix_and_has_a_floor():
    large, zero = torch.full((3, 4), 2.0), torch.zeros(6, 25)
    norms = torch.stack([large.norm(), zero.norm()])[:, None]
    sizes, fan_in = torch.tensor([[12.0], [150.0]]), torch.tensor([[4.0], [25.0]])
    found = relative_limit(norms, sizes, fan_in, 0.07, 0.1, TENSORS)
    expected = torch.tensor([[0.07 * 2.0 / 0.1], [0.07 * 0.5 / 5 / 0.1]])
    torch.testing.assert_close(found, expected)
    assert relative_limit(norms, sizes, fan_in, 0.07, 0.0, TENSORS).isinf().all()
    assert step_rms(1.2, column(1.0), column(9.0), column(0.7), TENSORS).item() == 0.7
    assert step_rms(None, column(1.0), column(9.0), None, TENSORS).item() == 9.0


def moved(parameters, gradients, **options):
    """Displacement of each parameter in each step, in units of the rate."""
    parameters = [nn.Parameter(p.clone()) for p in parameters]
    optimizer = ResidualPolarTransport(parameters, lr=1e-3, weight_decay=0.0, **options)
    out = []
    for step in gradients:
        before = [p.detach().clone() for p in parameters]
        for p, g in zip(parameters, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
        out.append([(b - p.detach()) / 1e-3 for p, b in zip(parameters, before, strict=True)])
    return out, optimizer


SHAPES = [(8, 5), (12,), (), (1, 7), (4, 3, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_gives_update_rms_and_agreement_more(dtype):
    torch.manual_seed(0)
    start = [torch.randn(s, dtype=dtype) for s in SHAPES]
    noise = [[torch.randn(s, dtype=dtype) for s in SHAPES] for _ in range(300)]
    steps, optimizer = moved(start, noise, max_relative_step=None)
    for k in range(len(SHAPES)):
        rms = torch.stack([step[k].square().mean().sqrt() for step in steps[100:]]).mean()
        # Not 1.2 exactly: transport keeps less of a momentum that disagrees than a plain mean does.
        assert 0.6 < rms < 1.8
    same = [noise[0]] * 60
    steps, optimizer = moved(start, same, max_relative_step=None)
    for k in range(len(SHAPES)):
        assert steps[-1][k].square().mean().sqrt().item() == pytest.approx(4.8, rel=1e-2)
    total = optimizer.telemetry()["total"]
    assert total["step_signal"] == pytest.approx(4.0)
    assert total["step_capped"] == 0


def test_opposing_requests_shorten_the_step():
    g = torch.randn(8, 5)
    start = [torch.randn(8, 5)]
    steps, _ = moved(start, [[g * (-1) ** t] for t in range(40)], max_relative_step=None)
    assert steps[-1][0].square().mean().sqrt() < 0.5


def test_no_step_changes_a_matrix_by_more_than_its_share():
    torch.manual_seed(1)
    w, zero, vector = torch.randn(6, 4), torch.zeros(6, 4), torch.randn(9)
    parameters = [nn.Parameter(x.clone()) for x in (w, zero, vector)]
    optimizer = ResidualPolarTransport(parameters, lr=1.0, weight_decay=0.0)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    change = [
        (p.detach() - b).square().mean().sqrt()
        for p, b in zip(parameters, (w, zero, vector), strict=True)
    ]
    assert change[0].item() == pytest.approx(0.07 * w.square().mean().sqrt().item(), rel=1e-5)
    assert change[1].item() == pytest.approx(0.07 * 0.5 / 2, rel=1e-5)
    assert change[2].item() == pytest.approx(1.2, rel=1e-5)
    capped = [e["step_capped"] for e in optimizer.telemetry()["parameters"].values()]
    assert capped == [True, True, False]


def test_where_requests_oppose_each_other_the_share_shrinks_too():
    torch.manual_seed(5)
    w, g = torch.randn(8, 5), torch.randn(8, 5)
    steps, optimizer = moved([w], [[g * (-1) ** t] for t in range(40)], max_relative_step=1e-6)
    share = (steps[-1][0] * 1e-3).square().mean().sqrt() / w.square().mean().sqrt()
    entry = next(iter(optimizer.telemetry()["parameters"].values()))
    assert entry["step_capped"]
    assert share.item() == pytest.approx(1e-6 * entry["step_signal"], rel=2e-2)
    assert entry["step_signal"] < 0.5


def test_a_thin_matrix_steps_as_a_vector():
    g = [torch.randn(6) for _ in range(8)]
    start = torch.randn(6)
    flat, _ = moved([start], [[x] for x in g])
    for shape in ((1, 6), (6, 1), (1, 2, 3)):
        thin, optimizer = moved([start.view(shape)], [[x.view(shape)] for x in g])
        for a, b in zip(flat, thin, strict=True):
            torch.testing.assert_close(a[0], b[0].view(6))
        assert "second_moment" in next(iter(optimizer.state.values()))
    thick, _ = moved([start.view(1, 6)], [[x.view(1, 6)] for x in g], thin_as_vector=False)
    assert not torch.allclose(thick[-1][0].view(6), flat[-1][0], rtol=1e-3)


def test_with_the_switches_off_every_update_has_one_length():
    gradients = [[torch.randn(8, 5), torch.randn(3)] for _ in range(5)]
    steps, _ = moved([torch.randn(8, 5), torch.randn(3)], gradients, update_rms=0.92, **OFF)
    for step in steps:
        for change in step:
            assert change.square().mean().sqrt().item() == pytest.approx(0.92, rel=1e-3)


def test_options_are_the_groups_own():
    gradients = [[torch.ones(8, 5)] for _ in range(30)]
    on, off = (nn.Parameter(torch.zeros(8, 5)) for _ in range(2))
    optimizer = ResidualPolarTransport(
        [{"params": [on]}, {"params": [off], **OFF}], lr=1e-6, weight_decay=0.0
    )
    for (g,) in gradients:
        on.grad = off.grad = g
        optimizer.step()
    assert on.detach().norm() > 2 * off.detach().norm()


def test_padding_and_company_change_no_length():
    """A matrix in a padded stack, beside vectors, moves as it does alone."""
    torch.manual_seed(2)
    shapes = [(8, 5), (5, 8), (7, 3), (6,)]
    start = [torch.randn(s) for s in shapes]
    gradients = [[torch.randn(s) for s in shapes] for _ in range(6)]
    together, _ = moved(start, gradients, max_root_staleness=1)
    for k in range(len(shapes)):
        alone, _ = moved([start[k]], [[step[k]] for step in gradients], max_root_staleness=1)
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a[0], b[k], rtol=2e-3, atol=2e-3)


def test_a_state_saved_without_energy_starts_it_at_the_next_request():
    torch.manual_seed(3)
    gradients = [torch.randn(8, 5) for _ in range(30)]
    p = nn.Parameter(torch.randn(8, 5))
    optimizer = ResidualPolarTransport([p], lr=1e-3)
    for g in gradients:
        p.grad = g
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["request_energy"]
    q = nn.Parameter(p.detach().clone())
    resumed = ResidualPolarTransport([q], lr=1e-3)
    resumed.load_state_dict(saved)
    q.grad = gradients[0]
    resumed.step()
    record = resumed.state[q]
    assert record["request_energy"] > 0
    assert 0.5 < record["step_signal"] < 2.0


def test_a_thin_matrix_saved_as_a_matrix_goes_on_as_a_vector():
    p = nn.Parameter(torch.randn(1, 6))
    old = ResidualPolarTransport([p], lr=1e-3, thin_as_vector=False)
    for _ in range(3):
        p.grad = torch.randn(1, 6)
        old.step()
    saved = copy.deepcopy(old.state_dict())
    saved["param_groups"][0]["thin_as_vector"] = True
    new = ResidualPolarTransport([p], lr=1e-3)
    new.load_state_dict(saved)
    before = p.detach().clone()
    p.grad = torch.randn(1, 6)
    new.step()
    assert not any(key.startswith("metric.") for key in new.state[p])
    assert 0 < (p.detach() - before).square().mean().sqrt() < 5e-3


@pytest.mark.parametrize("capturable", [False, True])
def test_bfloat16_and_tensor_rates(capturable):
    torch.manual_seed(4)
    p = nn.Parameter(torch.randn(16, 16, dtype=torch.bfloat16))
    before = p.detach().float().clone()
    optimizer = ResidualPolarTransport(
        [p], lr=torch.tensor(1.0), weight_decay=0.0, capturable=capturable
    )
    p.grad = torch.randn_like(p)
    optimizer.step()
    change = (p.detach().float() - before).square().mean().sqrt().item()
    assert change == pytest.approx(0.07 * before.square().mean().sqrt().item(), rel=2e-2)
