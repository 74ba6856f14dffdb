"""Transport in time: rotation, decay, process noise, timestamps, positive parameters."""

import itertools
import math

import pytest
import rt_attention_oracle as oracle
import torch
from hypothesis import given
from hypothesis import strategies as st
from rpt.geometry.rt_filter import (
    geodesic_angle,
    process_variance,
    rotary_frequencies,
    rotate,
    rotation_angles,
    slerp,
    sphere_exp,
    sphere_log,
    tangent_project,
)
from rpt.geometry.rt_filter.parameters import (
    PositiveParameter,
    UnitIntervalParameter,
    decay_rates,
    inverse_softplus,
)
from rpt.geometry.rt_filter.transport import check_times


def test_frequencies_are_those_of_rotary_embeddings():
    omega = rotary_frequencies(32)
    expected = [10000 ** (-2 * k / 64) for k in range(32)]
    torch.testing.assert_close(omega, torch.tensor(expected), rtol=1e-6, atol=0)
    pairs = rotary_frequencies(8, conjugate_pairs=True)
    torch.testing.assert_close(pairs[::2], -pairs[1::2])
    assert rotary_frequencies(5, conjugate_pairs=True)[-1] == 0
    assert rotary_frequencies(1, conjugate_pairs=True).shape == (1,)


@given(st.floats(-50, 50), st.floats(-50, 50))
def test_rotations_compose_and_invert(first, second):
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 6)
    omega = rotary_frequencies(3).double()

    def turn(time, y, **options):
        return rotate(
            y, rotation_angles(torch.full((2,), time, dtype=torch.float64), omega), **options
        )

    torch.testing.assert_close(turn(first, turn(second, x)), turn(first + second, x))
    torch.testing.assert_close(turn(first, turn(first, x), inverse=True), x)


@given(st.floats(0, 1e6), st.floats(0, 10))
def test_process_variance_against_mpmath(lag, mu):
    t, m = (torch.tensor(v, dtype=torch.float64) for v in (lag, mu))
    expected = oracle.process_variance(lag, mu)
    assert float(process_variance(-t, m)) == pytest.approx(expected, rel=1e-10)


def test_process_variance_has_finite_gradient_without_decay():
    mu = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(process_variance(torch.tensor(3.0).double(), mu), mu)
    assert float(grad) == pytest.approx(-9.0, rel=1e-9)  # d/dμ (1 − e^{−2μL})/2μ → −L²


@given(st.floats(1e-6, 3.1))
def test_sphere_maps_are_inverse_and_measure_angles(angle):
    base = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    point = torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=torch.float64)
    assert float(geodesic_angle(base, point)) == pytest.approx(angle, rel=1e-9)
    torch.testing.assert_close(sphere_exp(base, sphere_log(base, point)), point)
    half = slerp(base, point, 0.5)
    assert float(geodesic_angle(base, half)) == pytest.approx(angle / 2, rel=1e-9)


def test_sphere_maps_at_the_ends():
    u = torch.nn.functional.normalize(torch.randn(20, 6), dim=-1)
    assert float(geodesic_angle(u, u).max()) == 0.0
    assert float(tangent_project(u, u).abs().max()) == 0.0
    assert torch.isfinite(sphere_log(u, -u)).all()
    assert float(sphere_log(u, u).abs().max()) == 0.0


def test_positive_parameters_start_where_they_say():
    for value in (1e-3, 0.01, 1.0, 4.0, 30.0, 100.0):
        parameter = PositiveParameter(value, (3,))
        torch.testing.assert_close(parameter().detach(), torch.full((3,), value), rtol=2e-6, atol=0)
        assert math.log1p(math.exp(inverse_softplus(value))) == pytest.approx(value, rel=1e-12)
    assert float(UnitIntervalParameter(0.5)().detach()) == 0.5
    with pytest.raises(ValueError, match="positive"):
        PositiveParameter(0.0, (1,))
    with pytest.raises(ValueError, match="between 0 and 1"):
        UnitIntervalParameter(1.0)


def test_decay_rates_leave_a_quarter_of_the_heads_still():
    rates = decay_rates(8, 1e-3, 1e-1)
    assert rates[:2] == [0.0, 0.0]
    assert rates[2] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-1)
    ratios = [b / a for a, b in itertools.pairwise(rates[2:])]
    assert max(ratios) == pytest.approx(min(ratios))


def test_times_that_cannot_work_are_refused():
    for bad, error in (
        (torch.arange(3).half(), TypeError),
        (torch.arange(3).bfloat16(), TypeError),
        (torch.arange(4), ValueError),
        (torch.zeros(3, 3), ValueError),
        (torch.tensor([0.0, float("nan"), 1.0]), ValueError),
        (torch.tensor([1.7e9, 1.7e9 + 1, 1.7e9 + 2], dtype=torch.float32), ValueError),
    ):
        with pytest.raises(error):
            check_times(bad, 2, 3)
    with pytest.warns(UserWarning, match="resolve only"):
        check_times(torch.tensor([1e5, 1e5 + 0.5, 1e5 + 1]), 2, 3)
    exact = check_times(torch.tensor([1_700_000_000, 1_700_000_001, 1_700_000_007]), 2, 3)
    assert (exact - exact[:, :1]).tolist() == [[0.0, 1.0, 7.0]]
