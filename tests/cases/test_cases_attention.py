"""Acceptance cases of attention layers: masks, rotary precision, caches, timestamps, shapes.

The numbers name the cases of the acceptance list that these tests stand for.
"""

import math

import pytest
import torch
from rpt.geometry.rt_filter import (
    PolarAttention,
    PolarTransformer,
    PolarTransformerBlock,
    RobustFilterAttention,
    rotary_frequencies,
    rotate,
    rotation_angles,
)
from rpt.geometry.rt_filter.transport import check_times, relative_times

LAYERS = {
    "polar": lambda **o: PolarAttention(8, 2, head_dim=2, is_causal=False, **o),
    "polar, exact": lambda **o: PolarAttention(8, 2, directional="exact", is_causal=False, **o),
    "polar, Bayesian gain": lambda **o: PolarAttention(8, 2, gain="bayes", is_causal=False, **o),
    "standard": lambda **o: PolarAttention.standard(8, 2, is_causal=False, **o),
    "robust filter": lambda **o: RobustFilterAttention(8, 2, is_causal=False, **o),
}
BACKENDS = ["auto", "dense", "chunked"]


# 25: a query row with every key masked


def masks():
    boolean = torch.ones(3, 3, dtype=torch.bool)
    boolean[1] = False
    additive = torch.zeros(3, 3).masked_fill(~boolean, float("-inf"))
    return {"boolean": boolean, "additive": additive, "dtype minimum": additive.clamp_min(-3.4e38)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("layer", LAYERS)
def test_case_25_fully_masked_row(layer, kind, backend):
    attention = LAYERS[layer](backend=backend)
    x = torch.randn(1, 3, 8)

    def gradients(mask, rows):
        leaf = x.clone().requires_grad_()
        y = attention(leaf, attn_mask=mask)
        attention.zero_grad()
        y[:, rows].square().sum().backward()
        parameters = [p.grad for p in attention.parameters() if p.grad is not None]
        return y, leaf.grad, parameters

    mask = masks()[kind]
    y, grad, parameters = gradients(mask, [0])
    assert float(y[:, 1].detach().abs().max()) == 0.0
    assert torch.isfinite(y).all()
    open_row = mask.clone()
    open_row[1] = True if kind == "boolean" else 0.0
    z, wanted, wanted_parameters = gradients(open_row, [0])
    torch.testing.assert_close(y[:, [0, 2]], z[:, [0, 2]], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-7)
    for mine, reference in zip(parameters, wanted_parameters, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)
    # With the masked row in the loss, too, everything stays finite.
    _, grad, parameters = gradients(mask, [0, 1, 2])
    assert all(torch.isfinite(g).all() for g in (grad, *parameters))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_case_25_a_sample_of_nothing_but_padding(layer, backend):
    attention = LAYERS[layer](backend=backend)
    x = torch.randn(2, 3, 8)
    padding = torch.tensor([[False] * 3, [True] * 3])
    leaf = x.clone().requires_grad_()
    y = attention(leaf, key_padding_mask=padding)
    assert float(y[1].detach().abs().max()) == 0.0
    torch.testing.assert_close(y[:1], attention(x[:1]), rtol=1e-6, atol=1e-6)
    y.square().sum().backward()
    assert torch.isfinite(leaf.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in attention.parameters() if p.grad is not None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_case_25_what_is_masked_never_leaks(layer, backend, bad):
    attention = LAYERS[layer](backend=backend)
    x = torch.randn(2, 6, 8)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 4:] = True
    clean = attention(x, key_padding_mask=padding)
    spoiled = x.clone()
    spoiled[:, 4:] = bad
    leaf = spoiled.requires_grad_()
    y = attention(leaf, key_padding_mask=padding)
    torch.testing.assert_close(y[:, :4], clean[:, :4], rtol=1e-6, atol=1e-6)
    y[:, :4].square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in attention.parameters() if p.grad is not None)
    # Under a causal mask: rows before the damage are unharmed, rows after it say so.
    late = x.clone()
    late[:, 3] = bad
    for call in ({"causal": True}, {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()}):
        y = attention(late, **call)
        torch.testing.assert_close(
            y[:, :3], attention(x, is_causal=True)[:, :3], rtol=1e-6, atol=1e-6
        )
        assert torch.isnan(y[:, 3:]).all()


# 27: rotary angles under autocast, in half modules, at long positions


def test_case_27_sixteen_positions_stay_sixteen():
    omega = rotary_frequencies(32)
    positions = torch.arange(65536, 65552)
    exact = torch.cos(positions.double()[:, None] * 10000.0 ** (-torch.arange(32).double() / 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for times in (positions, positions.float(), positions.double()):
            angles = rotation_angles(check_times(times, 1, 16)[0], omega)
            assert float((torch.cos(angles) - exact).abs().max()) <= 5e-3
            assert len(torch.cos(angles)[:, 0].unique()) == 16
            x = torch.ones(1, 16, 64, dtype=torch.bfloat16)
            turned = rotate(x, angles)
            assert turned.dtype == torch.bfloat16
            assert len({tuple(row.tolist()) for row in turned[0].float()}) == 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [PolarAttention, RobustFilterAttention, PolarTransformerBlock])
def test_case_27_half_modules_keep_their_frequencies(kind, dtype):
    torch.manual_seed(0)
    module = kind(64, 1, head_dim=32)
    attention = module.attention if kind is PolarTransformerBlock else module
    before = attention.frequencies().clone()
    x = torch.randn(1, 6, 64)
    exact = module(x)
    module.to(dtype)
    assert attention.frequencies().dtype == torch.float32
    assert torch.equal(attention.frequencies(), before)
    for start in (65536, 2048, 70000):
        times = torch.arange(start, start + 6)
        y = module(x.to(dtype), times=times)
        assert y.dtype == dtype
        assert torch.isfinite(y).all()
        shift = module(x.to(dtype), times=torch.cat((torch.tensor([0]), times[1:])))
        assert not torch.equal(y[:, 1:], shift[:, 1:])
        scale = float(exact.detach().std())
        assert float((y.float() - exact).detach().abs().max()) < 0.2 * scale


def test_case_27_the_documented_error_at_a_million():
    omega = rotary_frequencies(32)
    exact = 1e6 * 10000.0 ** (-torch.arange(32).double() / 32)
    angles = rotation_angles(torch.tensor([[1e6]], dtype=torch.float64), omega)[0, 0]
    assert float((angles.cos() - exact.cos()).abs().max()) < 0.05


# 28: cached decoding


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", [PolarAttention, RobustFilterAttention])
@pytest.mark.parametrize("timed", [False, True])
def test_case_28_stepwise_equals_full(kind, dtype, tolerance, timed):
    layer = kind(16, 2).to(dtype)
    x = torch.randn(2, 8, 16, dtype=dtype)
    times = torch.tensor([0.0, 0.5, 1.25, 7.0, 7.5, 8.0, 20.0, 21.0], dtype=torch.float64) + 1.7e9

    def call(start, stop, cache=None):
        when = {"times": times[start:stop]} if timed else {}
        return layer(x[:, start:stop], cache=cache, **when)

    full = call(0, 8)
    for cuts in ([0, 5, 6, 7, 8], [0, 3, 5, 8], range(9)):
        cache, parts = layer.new_cache(), []
        for start, stop in zip(cuts, list(cuts)[1:], strict=False):
            parts.append(call(start, stop, cache))
            assert cache.length == stop
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", [PolarAttention, RobustFilterAttention])
def test_case_28_left_padded_rows(kind):
    layer = kind(16, 2).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [True, True, False, False, False]])
    full, short = layer(x[:1]), layer(x[1:, 2:])
    padded = layer(x, key_padding_mask=padding)
    torch.testing.assert_close(padded[:1], full, rtol=0, atol=1e-10)
    torch.testing.assert_close(padded[1:, 2:], short, rtol=0, atol=1e-10)
    cache = layer.new_cache()
    parts = [layer(x[:, :3], key_padding_mask=padding[:, :3], cache=cache)]
    parts += [layer(x[:, i : i + 1], cache=cache) for i in (3, 4)]
    stepwise = torch.cat(parts, 1)
    torch.testing.assert_close(stepwise[:1], full, rtol=0, atol=1e-10)
    torch.testing.assert_close(stepwise[1:, 2:], short, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [PolarAttention, RobustFilterAttention])
def test_case_28_shifting_all_positions_changes_nothing(kind):
    layer = kind(16, 2).double()
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    near = layer(x, times=torch.arange(8))
    far = layer(x, times=torch.arange(8) + 1000)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-9)
    torch.testing.assert_close(near, layer(x), rtol=0, atol=1e-9)


# 30: real-valued, large, irregular timestamps


EVENTS = torch.tensor([0.0, 0.5, 1.25, 7.0], dtype=torch.float64)


@pytest.mark.parametrize("origin", [0.0, 1.7e9])
def test_case_30_scores_of_real_times(origin):
    q = torch.tensor([1.0, 0.0]).expand(1, 4, 2)
    relative = relative_times(check_times(EVENTS + origin, 1, 4))
    turned = rotate(q, rotation_angles(relative, torch.ones(1)), inverse=True)[0]
    scores = turned @ turned.T
    assert float(scores[0, 1]) == pytest.approx(math.cos(0.5), abs=1e-5)
    expected = torch.cos(EVENTS[:, None] - EVENTS[None]).float()
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [PolarAttention, RobustFilterAttention])
def test_case_30_origins_orders_and_repetitions(kind, backend):
    layer = kind(8, 2, backend=backend).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    plain = layer(x, times=EVENTS)
    for origin in (1.7e9, torch.tensor([[1.7e9], [-3.0e8]], dtype=torch.float64)):
        shifted = layer(x, times=EVENTS + origin)
        torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-6)
    order = torch.tensor([2, 0, 3, 1])
    mixed = layer(x[:, order], times=EVENTS[order] + 1.7e9)
    torch.testing.assert_close(mixed, plain[:, order], rtol=0, atol=1e-6)
    # Two events at one time see each other at distance zero: equal inputs, equal outputs.
    twice = torch.cat((x[:, :2], x[:, 1:2], x[:, 2:]), 1)
    y = layer(twice, times=torch.tensor([0.0, 0.5, 0.5, 1.25, 7.0]))
    torch.testing.assert_close(y[:, 1], y[:, 2], rtol=0, atol=1e-12)
    integers = layer(x, times=torch.tensor([0, 1, 3, 7]))
    floats = layer(x, times=torch.tensor([0.0, 1.0, 3.0, 7.0]))
    torch.testing.assert_close(integers, floats, rtol=0, atol=0)


def test_case_30_times_lost_in_float32_are_refused():
    layer = PolarAttention(8, 2)
    x = torch.randn(1, 4, 8)
    with pytest.raises(ValueError, match="merge events"):
        layer(x, times=(EVENTS + 1.7e9).float())
    with pytest.warns(UserWarning, match="resolve only"):
        layer(x, times=(EVENTS + 1.0e5).float())


# 31: rotation along the right axis, shapes of position ids


def test_case_31_values_axes_and_ids():
    omega = rotary_frequencies(2)
    q = torch.ones(2, 3, 3, 4)  # batch, heads, tokens, features: sizes agree on purpose
    with_ids = {}
    for name, ids in (
        ("flat", torch.arange(3)),
        ("row", torch.arange(3)[None]),
        ("batch", torch.tensor([[0, 1, 2], [5, 6, 7]])),
    ):
        angles = rotation_angles(check_times(ids, 2, 3), omega).unsqueeze(1)
        with_ids[name] = rotate(q, angles)
    for turned in with_ids.values():
        assert turned.shape == q.shape
        assert torch.equal(turned[0, :, 0], q[0, :, 0])
        assert torch.equal(turned[:, 0], turned[:, 1])
        torch.testing.assert_close(
            turned[0, 0, 1, :2], torch.tensor([-0.301169, 1.381773]), rtol=0, atol=1e-6
        )
    assert torch.equal(with_ids["flat"], with_ids["row"])
    expected = rotate(q[:1], rotation_angles(torch.tensor([[5.0, 6.0, 7.0]]), omega).unsqueeze(1))
    torch.testing.assert_close(with_ids["batch"][1:], expected, rtol=0, atol=1e-6)
    single = rotate(q[:1, :, :1], rotation_angles(torch.tensor([[0.0]]), omega).unsqueeze(1))
    assert single.shape == (1, 3, 1, 4)
    with pytest.raises(ValueError, match="rotate"):
        rotate(q, rotation_angles(torch.arange(4.0)[None], omega).unsqueeze(1))


@pytest.mark.parametrize(
    "module",
    [
        lambda: PolarAttention(12, 3),
        lambda: RobustFilterAttention(12, 3),
        lambda: PolarAttention.standard(12, 3),
        lambda: PolarTransformerBlock(12, 3),
    ],
)
def test_case_31_layers_broadcast_ids_and_keep_dimensions(module):
    module = module()
    x = torch.randn(2, 3, 12)
    rows = torch.tensor([[0.0, 1.0, 2.0], [5.0, 6.5, 9.0]])
    y = module(x, times=rows)
    for row in range(2):
        alone = module(x[row : row + 1], times=rows[row])
        assert alone.shape == (1, 3, 12)
        torch.testing.assert_close(y[row : row + 1], alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        module(x, times=rows[0]), module(x, times=rows[:1]), rtol=0, atol=1e-6
    )
    assert module(x[:1, :1]).shape == (1, 1, 12)
    for wrong in (torch.arange(4), torch.zeros(3, 3), torch.zeros(2, 3, 1), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match="shape"):
            module(x, times=wrong)


def test_case_31_empty_and_single_token_models():
    model = PolarTransformer(7, 8, 2, 1)
    assert model(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, 7)
    assert PolarAttention(8, 2)(torch.zeros(3, 1, 8)).shape == (3, 1, 8)
