"""Numbers of the filter layers: a missing first measurement, long lags, options that make no sense."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rpt.geometry.rt_filter import (
    FilterCache,
    PolarAttention,
    PolarTransformer,
    PolarTransformerBlock,
    RobustFilterAttention,
    isotropic_filter,
    rt_filter,
    simulate_trajectories,
    slerp,
    sphere_exp,
    sphere_log,
    unit_direction,
)
from rpt.geometry.self_context import ContextMLP, ContextTransformerBlock, SoftEikonalLinear

# 53: the first measurement is missing


@pytest.mark.parametrize("update", ["geodesic", "ambient"])
@pytest.mark.parametrize("directional", ["chordal", "exact"])
@pytest.mark.parametrize("missing", ["masked", "masked, NaN", "zero"])
def test_case_53_first_measurement_missing(missing, directional, update):
    times, omega = torch.arange(6).double(), torch.tensor([0.3, 1.0], dtype=torch.float64)
    x = torch.randn(6, 4, dtype=torch.float64)
    valid = torch.ones(6, dtype=torch.bool)
    if missing == "zero":
        x[0] = 0.0
    else:
        valid[0] = False
        x[0] = math.nan if "NaN" in missing else 1.0
    x.requires_grad_()
    found = rt_filter(
        x, times, omega, start="consensus", valid=valid, directional=directional, update=update,
        iterations=2,
    )  # fmt: skip
    for part in found[:3]:
        assert torch.isfinite(part).all()
    assert float(found.state[0].detach().abs().max()) == 0.0
    found.state[3:].square().sum().backward()
    assert torch.isfinite(x.grad[1:]).all()
    assert float(x.grad[1:].abs().max()) > 0
    # The rows after it are what they are without it.
    rest = rt_filter(
        x[1:].detach(), times[1:], omega, start="consensus", directional=directional,
        update=update, iterations=2,
    )  # fmt: skip
    if missing != "zero":
        torch.testing.assert_close(found.state[1:].detach(), rest.state, rtol=0, atol=1e-12)


def test_zero_vectors_have_finite_values_and_gradients_on_the_sphere():
    zero, u = torch.zeros(1, 4, requires_grad=True), torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    for value in (
        *unit_direction(zero),
        sphere_exp(zero, zero),
        sphere_log(zero, zero),
        sphere_log(zero, u),
        slerp(zero, u, 0.5),
        sphere_exp(u, zero),
    ):
        assert torch.isfinite(value).all()
        if value.requires_grad:
            (grad,) = torch.autograd.grad(value.sum(), zero, retain_graph=True)
            assert torch.isfinite(grad).all()


# 54: decay · lag beyond what E² can hold


@pytest.mark.parametrize("options", [
    {}, {"magnitude_floor": 0.01}, {"inflation": 0.1}, {"weights": "exponential"},
    {"query_tangential_variance": 0.0, "query_radial_variance": 0.0}, {"radial": "off"},
])  # fmt: skip
@pytest.mark.parametrize(("decay", "tokens"), [(1.0, 64), (0.1, 500)])
def test_case_54_long_lags_in_single_precision(decay, tokens, options):
    x = torch.randn(tokens, 4, dtype=torch.float64)
    omega = torch.tensor([0.0, 0.5], dtype=torch.float64)
    times = torch.arange(tokens)
    exact = rt_filter(x, times, omega, decay=decay, **options)
    found = rt_filter(x.float(), times, omega.float(), decay=decay, **options)
    assert torch.isfinite(found.state).all()
    # Log precisions up to 2·decay·lag = 128 round at 1e-5.
    torch.testing.assert_close(found.state.double(), exact.state, rtol=0, atol=2e-3)
    states = isotropic_filter(x.float(), times, omega.float(), decay=decay)
    exact = isotropic_filter(x, times, omega, decay=decay)
    torch.testing.assert_close(states.double(), exact, rtol=0, atol=2e-3)


def test_case_54_double_precision_beyond_355():
    found = rt_filter(torch.randn(40, 4).double(), torch.arange(40) * 20, decay=1.0)
    assert torch.isfinite(found.state).all()


# 55: options that make no sense


NONSENSE = {
    rt_filter: [
        *({name: value} for name in ("tangential_variance", "radial_variance", "nu_tangential",
                                     "nu_radial", "prior_precision")
          for value in (0.0, -1.0, math.inf, math.nan)),
        *({name: value} for name in ("process_noise", "inflation", "magnitude_floor", "decay",
                                     "query_tangential_variance", "query_radial_variance")
          for value in (-1.0, math.nan, math.inf)),
        *({name: "nonsense"} for name in ("weights", "radial", "update", "directional", "start",
                                          "gain", "directional_step")),
        *({"iterations": value} for value in (0, -1, 1.5)),
        {"directional_step": math.nan}, {"radial_step": math.inf},
    ],
    isotropic_filter: [
        {"variance": 0.0}, {"nu": math.inf}, {"inflation": -1.0}, {"process_noise": -1.0},
        {"query_variance": -1.0}, {"weights": "none"}, {"start": "x"}, {"iterations": 0},
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", NONSENSE, ids=lambda f: f.__name__)
def test_case_55_options_of_the_filters(function):
    for option in NONSENSE[function]:
        with pytest.raises(ValueError, match=next(iter(option))):
            function(torch.randn(5, 4), torch.arange(5), **option)


SENSELESS = st.sampled_from([-1, -0.5, math.nan, math.inf, -math.inf, "nonsense", None, 1j])
OPTIONS = {
    PolarAttention: ("dropout", "base", "nu", "temperature", "step", "process_noise", "weights",
                     "radial", "radial_exponent", "directional", "gain", "m_units", "backend"),
    RobustFilterAttention: ("dropout", "base", "nu", "temperature", "process_noise", "weights",
                            "backend"),
    PolarTransformerBlock: ("eps", "dropout"),
    ContextTransformerBlock: ("dropout", "directions", "rank", "self_context_strength",
                              "expansion", "backend"),
    SoftEikonalLinear: ("directions", "rank", "self_context_strength", "temperature",
                        "context_steps"),
    ContextMLP: ("width", "directions", "rank", "temperature", "context_steps"),
}  # fmt: skip


@given(kind=st.sampled_from(list(OPTIONS)), value=SENSELESS, data=st.data())
def test_case_55_options_of_constructors(kind, value, data):
    name = data.draw(st.sampled_from(OPTIONS[kind]))
    with pytest.raises(ValueError, match=name):
        kind(8, 2, **{name: value})


@given(kind=st.sampled_from(list(OPTIONS)), value=SENSELESS.filter(lambda v: v is not None))
def test_case_55_sizes_of_constructors(kind, value):
    for sizes in ((value, 2), (8, value)):
        with pytest.raises(ValueError, match="integer"):
            kind(*sizes)
    if issubclass(kind, PolarAttention | RobustFilterAttention):
        with pytest.raises(ValueError, match="head_dim"):
            kind(8, 2, head_dim=value)


@pytest.mark.parametrize("call", [
    lambda: PolarAttention(8, 2, decay_range=(0.0, 1.0)),
    lambda: PolarAttention(8, 2, decay_range=(1.0, 0.1)),
    lambda: PolarTransformerBlock(8, 2, feed_forward=0),
    lambda: PolarTransformer(9, 8, 2, 1.5),
    lambda: PolarTransformer(0, 8, 2, 1),
    lambda: FilterCache(0),
    lambda: simulate_trajectories(-1, torch.arange(3.0), torch.ones(2)),
    lambda: simulate_trajectories(1, torch.arange(3.0), torch.ones(2), radial_std=-0.1),
    lambda: simulate_trajectories(1, torch.arange(3.0), torch.ones(2), outlier_rate=1.5),
])  # fmt: skip
def test_case_55_the_rest(call):
    with pytest.raises(ValueError):
        call()
