"""LELU and SoftEikonalLinear against a per-sample float64 oracle written from the specification."""

import copy
import math

import numpy as np
import pytest
import self_context_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rpt.geometry.self_context import LELU, SoftEikonalLinear


def _layer(**options):
    torch.manual_seed(1)
    layer = SoftEikonalLinear(7, 5, **{"directions": 6, "rank": 3, **options}).double()
    with torch.no_grad():
        layer.scale.fill_(0.3)  # a correction large enough to be seen
    return layer


def test_lelu_is_the_logistic_gate_of_unit_variance():
    x = torch.linspace(-9, 9, 181, dtype=torch.float64)
    np.testing.assert_allclose(LELU()(x).numpy(), oracle.lelu(x.numpy()), rtol=1e-13, atol=1e-15)
    # The gate is a cumulative distribution; its variance is ∫ t² gate'(t) dt = 1.
    t = torch.linspace(-40, 40, 200_001, dtype=torch.float64)
    density = torch.gradient(torch.sigmoid(math.pi / math.sqrt(3) * t), spacing=(t,))[0]
    assert torch.trapezoid(t * t * density, t).item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lelu_stays_finite_at_the_end_of_the_range(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([-largest, 0.0, largest], dtype=dtype, requires_grad=True)
    y = LELU()(x)
    assert y.dtype == dtype
    assert y.tolist() == [0.0, 0.0, largest]
    y.float().sum().backward()
    assert x.grad.isfinite().all()


@settings(max_examples=25)
@given(
    strength=st.sampled_from([0.0, 0.25, 2.0]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    steps=st.integers(1, 3),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_forward_matches_the_oracle(strength, temperature, steps, magnitude, seed):
    layer = _layer(self_context_strength=strength, temperature=temperature, context_steps=steps)
    x = magnitude * torch.randn(3, 7, generator=torch.Generator().manual_seed(seed)).double()
    expected = np.stack([oracle.soft_eikonal(layer, row.numpy()) for row in x])
    np.testing.assert_allclose(oracle.array(layer(x)), expected, rtol=1e-9, atol=1e-10 * magnitude)


@pytest.mark.parametrize("leading", [(), (4,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_any_leading_dimensions(leading):
    layer = _layer(self_context_strength=0.25)
    x = torch.randn(*leading, 7, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (*leading, 5)
    rows = layer(x.reshape(-1, 7)).reshape(*leading, 5)
    torch.testing.assert_close(y, rows, rtol=1e-12, atol=1e-12)


def test_samples_do_not_see_each_other():
    layer = _layer(self_context_strength=0.5)
    x = torch.randn(6, 7, dtype=torch.float64)
    changed = x.clone()
    changed[3] += 1
    same = torch.arange(6) != 3
    torch.testing.assert_close(layer(x)[same], layer(changed)[same], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layer(x)[3], layer(changed)[3])


def test_gradcheck_without_proposal():
    layer = _layer(self_context_strength=0.0)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *values))


@pytest.mark.parametrize("steps", [1, 2])
def test_gradient_is_exact_but_for_the_detached_rms(steps):
    layer = _layer(self_context_strength=0.7, context_steps=steps)
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(5, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(layer(x), x, cotangent)
    base = x.detach().numpy()
    frozen = np.sqrt(np.mean(base**2))

    def slope(i, size):
        h = 1e-6
        ends = []
        for sign in (1, -1):
            moved = base.copy()
            moved[i] += sign * h
            ends.append(cotangent.numpy() @ oracle.soft_eikonal(layer, moved, size))
        return (ends[0] - ends[1]) / (2 * h)

    held = np.array([slope(i, frozen) for i in range(7)])
    moving = np.array([slope(i, None) for i in range(7)])
    np.testing.assert_allclose(gradient.numpy(), held, rtol=1e-6, atol=1e-8)
    assert np.abs(held - moving).max() > 1e-4, "the test cannot tell a detached RMS from a live one"


def test_parameter_gradients_with_proposal_pass_gradcheck():
    # The detached RMS depends on the input alone, so for the parameters the gradient is exact.
    layer = _layer(self_context_strength=0.7, context_steps=2)
    x = torch.randn(2, 7, dtype=torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(*parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, values)


def test_repeated_steps_stay_within_the_strength():
    layer = _layer(self_context_strength=0.25, context_steps=5)
    seen = []
    layer.metric.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    x = torch.randn(8, 7, dtype=torch.float64)
    layer(x)
    assert len(seen) == 6
    for chart in seen[1:]:
        moved = (chart - x).square().mean(-1).sqrt() / x.square().mean(-1).sqrt()
        torch.testing.assert_close(moved, torch.full_like(moved, 0.25), rtol=1e-9, atol=0)


def test_zero_input_has_finite_gradients():
    layer = _layer(self_context_strength=0.25).float()
    x = torch.zeros(2, 7, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_initialisation():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    layer = SoftEikonalLinear(64, 400)
    assert not torch.equal(before, torch.get_rng_state())
    assert layer.scale.tolist() == [-1.5]
    assert layer.shared.std().item() == pytest.approx(0.5, rel=0.05)
    assert {name for name, _ in layer.named_parameters()} == {
        "shared", "scale", "base.weight", "base.bias", "metric.weight", "metric.bias",
        "response.0.weight", "response.0.bias", "response.2.weight", "response.2.bias",
    }  # fmt: skip
    assert layer.metric.weight.shape == (16, 64)
    assert layer.primitive.shape == (12, 4, 64)
    torch.testing.assert_close(layer.primitive.norm(dim=-1), torch.ones(12, 4))
    assert layer.primitive.mean().abs() < 0.01
    assert not layer.primitive.requires_grad
    assert "primitive" in layer.state_dict()


def test_frames_depend_on_the_widths_alone():
    torch.manual_seed(5)
    first = SoftEikonalLinear(9, 4)
    torch.manual_seed(6)
    second = SoftEikonalLinear(9, 4, self_context_strength=0.5)
    assert torch.equal(first.primitive, second.primitive)
    assert not torch.equal(first.primitive, SoftEikonalLinear(9, 5).primitive)
    assert torch.equal(
        first.primitive, SoftEikonalLinear(9, 4, dtype=torch.float64).primitive.float()
    )


def test_meta_device_then_reset():
    reference = SoftEikonalLinear(9, 4)
    with torch.device("meta"):
        layer = SoftEikonalLinear(9, 4, self_context_strength=0.25)
    assert layer.primitive.is_meta
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer.primitive, reference.primitive)
    assert layer(torch.randn(3, 9)).isfinite().all()


def test_deepcopy_and_state_dict_round_trip():
    layer = _layer(self_context_strength=0.25)
    fresh = SoftEikonalLinear(7, 5, directions=6, rank=3, self_context_strength=0.25).double()
    fresh.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, dtype=torch.float64)
    assert torch.equal(fresh(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision_module_and_autocast(dtype):
    torch.manual_seed(2)
    layer = SoftEikonalLinear(32, 16, self_context_strength=0.25)
    x = torch.randn(64, 32)
    exact = layer(x)
    reduced = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    assert reduced.dtype == dtype
    with torch.autocast("cpu", dtype):
        mixed = layer(x)
    assert mixed.dtype == dtype
    for close in (reduced, mixed):
        assert (close.float() - exact).norm() / exact.norm() < 2e-2
    # Activations whose squares leave float16's range.
    large = (300 * x).to(dtype).requires_grad_()
    y = copy.deepcopy(layer).to(dtype)(large)
    y.float().mean().backward()
    assert y.isfinite().all()
    assert large.grad.isfinite().all()


def test_compiles_without_graph_breaks():
    layer = SoftEikonalLinear(16, 8, self_context_strength=0.25)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 16, requires_grad=True)
    torch.testing.assert_close(compiled(x), layer(x))
    (a,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (b,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_in": 0}, "n_in must be an integer"),
        ({"rank": 0}, "rank must be an integer"),
        ({"context_steps": 0}, "context_steps must be an integer"),
        ({"temperature": 0.0}, "temperature must be a number, finite, above 0"),
        ({"temperature": math.nan}, "temperature must be a number, finite, above 0"),
        ({"self_context_strength": -1.0}, "must be a number, finite, at least 0"),
        ({"self_context_strength": math.inf}, "must be a number, finite, at least 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        SoftEikonalLinear(**{"n_in": 3, "n_out": 2, **options})


def test_wrong_width_is_named():
    with pytest.raises(ValueError, match=r"must be 7, got an input of shape \(2, 6\)"):
        _layer()(torch.zeros(2, 6, dtype=torch.float64))
