"""Dense, sliced and closed-form paths mean the same; gradients, masks, memory."""

import importlib
from pathlib import Path

import pytest
import torch
from rpt.geometry.rt_filter import PolarAttention, RobustFilterAttention
from rpt.geometry.rt_filter.logits import PolarSettings
from rpt.geometry.rt_filter.parameters import FilterScalars
from rpt.geometry.rt_filter.paths import slab_math, slabs, sliced
from rpt.geometry.rt_filter.paths.dense import PolarInputs, polar_estimate
from rpt.geometry.rt_filter.paths.slabs import slab_estimate
from rpt.geometry.rt_filter.visibility import Visibility
from torch.nn import functional as F

SETTINGS = {
    "default": PolarSettings(),
    "exponential": PolarSettings(weights="exponential"),
    "shared": PolarSettings(radial="shared"),
    "directional only": PolarSettings(radial="off"),
    "no decay": PolarSettings(decay=False),
    "no magnitudes": PolarSettings(magnitude_precision=False, radial_exponent="influence"),
}


@pytest.fixture
def small_slabs(monkeypatch):
    """Force many slices and head groups on small inputs."""
    monkeypatch.setattr(slab_math, "SLAB_ELEMENTS", 600)
    monkeypatch.setattr(slab_math, "MAX_SLICE", 8)
    monkeypatch.setattr(sliced, "SLAB_ELEMENTS", 600)


def make(batch, heads, queries, keys, features, dtype):
    def unit(tokens):
        x = torch.randn(batch, heads, tokens, features, dtype=dtype)
        return F.normalize(x, dim=-1).requires_grad_()

    query, key, value = unit(queries), unit(keys), unit(keys)
    own = (torch.rand(batch, heads, queries, dtype=dtype) + 0.5).requires_grad_()
    magnitude = (torch.rand(batch, heads, keys, dtype=dtype) + 0.5).requires_grad_()
    scalars = FilterScalars(
        *((torch.rand(heads, dtype=dtype) + 0.5).requires_grad_() for _ in FilterScalars._fields)
    )
    return PolarInputs(query, key, value, own, magnitude), scalars


def loss_and_gradients(estimate, leaves):
    def weigh(t):
        return (t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view_as(t).sin()).sum()

    loss = weigh(estimate.direction) + weigh(estimate.magnitude)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("causal", "queries", "keys"), [(True, 21, 21), (False, 21, 21), (True, 9, 21), (False, 9, 14)]
)
def test_closed_form_path_equals_the_dense_one(small_slabs, name, causal, queries, keys):
    inputs, scalars = make(2, 3, queries, keys, 6, torch.float64)
    settings, ahead = SETTINGS[name], keys - queries
    times = torch.arange(keys, dtype=torch.float64)[None]
    view = Visibility(times[:, ahead:], times, causal)
    dense = polar_estimate(inputs, view, scalars, settings)
    fast = slab_estimate(inputs, view, scalars, settings, ahead)
    torch.testing.assert_close(fast.direction, dense.direction, rtol=0, atol=1e-13)
    torch.testing.assert_close(fast.magnitude, dense.magnitude, rtol=0, atol=1e-13)
    leaves = [*inputs, *scalars]
    for mine, reference in zip(
        loss_and_gradients(fast, leaves), loss_and_gradients(dense, leaves), strict=True
    ):
        if mine is None or reference is None:
            for unused in (mine, reference):
                assert unused is None or float(unused.abs().max()) == 0.0
        else:
            torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)


def test_dense_path_has_right_first_and_second_derivatives():
    for exact in (False, True):
        inputs, scalars = make(1, 1, 3, 3, 4, torch.float64)
        times = torch.arange(3, dtype=torch.float64)[None]
        view = Visibility(times, times, True)
        settings = PolarSettings(exact=exact)

        def run(*leaves, view=view, settings=settings):
            found = polar_estimate(
                PolarInputs(*leaves[:5]), view, FilterScalars(*leaves[5:]), settings, precision=True
            )
            return found.direction, found.magnitude, found.log_precision

        leaves = (*inputs, *scalars)
        assert torch.autograd.gradcheck(run, leaves)
        assert torch.autograd.gradgradcheck(run, leaves, atol=1e-4)


OPTIONS = {
    "default": {},
    "exact": {"directional": "exact"},
    "bayes": {"gain": "bayes"},
    "shared": {"radial": "shared"},
    "process noise": {"process_noise": 0.3},
    "context": {"context_rotation": True},
    "learned frequencies": {"learn_frequencies": True},
    "exponential": {"weights": "exponential"},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("situation", ["grid", "times", "padding", "mask"])
def test_layers_agree_on_every_path(small_slabs, name, situation):
    layer = PolarAttention(12, 3, **OPTIONS[name]).double()
    if layer.context_projection is not None:
        torch.nn.init.normal_(layer.context_projection.weight, std=0.1)
    x = torch.randn(2, 23, 12, dtype=torch.float64, requires_grad=True)
    call = {
        "grid": {},
        "times": {"times": torch.rand(2, 23, dtype=torch.float64).sort(-1).values * 30},
        "padding": {"key_padding_mask": torch.arange(23) < torch.tensor([[0], [4]])},
        "mask": {"attn_mask": torch.rand(23, 23) > 0.3},
    }[situation]
    results = []
    for backend in ("dense", "chunked"):
        layer.backend = backend
        y = layer(x, **call)
        leaves = [x, *layer.parameters()]
        grads = torch.autograd.grad(
            (y * y.detach().sin()).sum() + y.sum(),
            leaves,
            allow_unused=True,  # the first layer of a stack has no precision to carry over
            materialize_grads=True,
        )
        results.append((y, *grads))
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("situation", ["grid", "times"])
def test_robust_filter_attention_agrees_on_both_paths(small_slabs, situation):
    layer = RobustFilterAttention(12, 3).double()
    x = torch.randn(2, 23, 12, dtype=torch.float64, requires_grad=True)
    call = {} if situation == "grid" else {"times": torch.rand(23, dtype=torch.float64) * 30}
    results = []
    for backend in ("dense", "chunked"):
        layer.backend = backend
        y = layer(x, **call)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-11)


def test_single_precision_deviation_is_of_rounding_size():
    inputs, scalars = make(2, 2, 300, 300, 16, torch.float32)
    times = torch.arange(300, dtype=torch.float64)[None]
    view = Visibility(times, times, True)
    exact_inputs = PolarInputs(*(t.detach().double().requires_grad_() for t in inputs))
    exact_scalars = FilterScalars(*(t.detach().double().requires_grad_() for t in scalars))
    reference = polar_estimate(exact_inputs, view, exact_scalars, PolarSettings())
    wanted = loss_and_gradients(reference, [*exact_inputs, *exact_scalars])
    for path in (
        lambda: polar_estimate(inputs, view, scalars, PolarSettings()),
        lambda: slab_estimate(inputs, view, scalars, PolarSettings(), 0),
    ):
        found = path()
        torch.testing.assert_close(found.direction.double(), reference.direction, rtol=0, atol=3e-6)
        for mine, grad in zip(loss_and_gradients(found, [*inputs, *scalars]), wanted, strict=True):
            if grad is not None and mine is not None and float(grad.abs().max()) > 0:
                assert float((mine.double() - grad).abs().max()) < 2e-4 * float(grad.abs().max())


def test_dropout_gradient_is_that_of_the_mask_drawn(small_slabs):
    inputs, scalars = make(1, 2, 17, 17, 6, torch.float64)
    times = torch.arange(17, dtype=torch.float64)[None]
    view = Visibility(times, times, True)

    def run(key, value):
        torch.manual_seed(5)
        moved = inputs._replace(key=key, value=value)
        return slab_estimate(moved, view, scalars, PolarSettings(), 0, dropout=0.4).direction

    assert torch.autograd.gradcheck(run, (inputs.key, inputs.value), fast_mode=True)


@pytest.mark.parametrize("kind", [PolarAttention, RobustFilterAttention])
def test_compiles_without_graph_breaks(kind):
    layer = kind(16, 2, backend="chunked")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 30, 16, requires_grad=True)
    padding = torch.arange(30) < torch.tensor([[0], [4]])
    for call in ({}, {"times": torch.arange(30) * 0.5, "key_padding_mask": padding}):
        results = []
        for f in (layer, compiled):
            y = f(x, **call)
            results.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
        for mine, reference in zip(*results, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def test_the_fast_path_is_an_ordinary_operator():
    inputs, scalars = make(1, 2, 6, 6, 4, torch.float64)
    seen = []

    def capture(*args):
        seen.append(args)
        return original(*args)

    original = slabs._polar_forward
    try:
        slabs._polar_forward = capture
        times = torch.arange(6, dtype=torch.float64)[None]
        view = Visibility(times, times, True)
        slab_estimate(inputs, view, scalars, PolarSettings(), 0)
    finally:
        slabs._polar_forward = original
    arguments = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
                 for a in seen[0]]  # fmt: skip
    torch.library.opcheck(
        original,
        tuple(arguments),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("times", [False, True], ids=["grid", "times"])
def test_memory_grows_linearly(times, monkeypatch):
    """One float32 weight matrix for two heads takes 32 MiB at 2048 tokens, and many are needed."""
    for module in (slab_math, sliced):
        monkeypatch.setattr(module, "SLAB_ELEMENTS", 2**15)
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[4] / "examples" / "bench"))
    peak_memory = importlib.import_module("rt_attention").peak_memory
    short, long = peak_memory(512, times), peak_memory(2048, times)
    assert long < short + 10
    assert long < 25
