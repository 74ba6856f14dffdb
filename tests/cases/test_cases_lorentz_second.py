"""Acceptance cases of the second round in the rooms of the Lorentz geometry."""

import copy
import math

import pytest
import rpt.geometry.lorentz as L
import torch
from torch import nn


def points(*shape, scale=1.0, dtype=torch.float32):
    return L.exp_map_origin(scale * torch.randn(*shape, dtype=dtype))


def same(x, y):
    return torch.equal(x.a, y.a) and torch.equal(x.u, y.u)


def at(x, *index):
    return L.Point(x.a[index], x.u[index])


# --- 49: masks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_case_49_integer_masks_are_refused(dtype, backend):
    layer, x = L.PolarMultiheadAttention(8, 2, backend=backend), points(2, 5, 8)
    with pytest.raises(TypeError, match="key_padding_mask must be boolean"):
        layer(x, key_padding_mask=torch.zeros(2, 5, dtype=dtype))
    with pytest.raises(TypeError, match="attn_mask must be boolean"):
        layer(x, attn_mask=torch.ones(5, 5, dtype=dtype))
    for made in (L.GyroLayerNorm(8), L.SpaceLayerNorm(8)):
        with pytest.raises(TypeError, match="boolean padding mask"):
            made(x, torch.zeros(2, 5, dtype=dtype))
    for residual in (L.BoostResidual(), L.GyroResidual(), L.SpaceResidual()):
        with pytest.raises(TypeError, match="boolean padding mask"):
            residual(x, x, torch.zeros(2, 5, dtype=dtype))


def test_case_49_a_float64_mask_on_a_float32_layer_is_named():
    layer, x = L.PolarMultiheadAttention(8, 2), points(2, 5, 8)
    with pytest.raises(TypeError, match=r"attn_mask is torch.float64 but .* torch.float32"):
        layer(x, attn_mask=torch.zeros(5, 5, dtype=torch.float64))
    layer(x, attn_mask=torch.zeros(5, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_case_49_true_means_may_attend_as_in_scaled_dot_product_attention(backend):
    layer, x = L.PolarMultiheadAttention(8, 2, backend=backend), points(2, 5, 8)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    causal = layer(x, is_causal=True)
    for mask in (
        allowed,
        allowed.expand(2, 2, 5, 5),
        torch.zeros(5, 5).masked_fill(~allowed, -torch.inf),
    ):
        assert torch.allclose(L.to_space(layer(x, attn_mask=mask)), L.to_space(causal), atol=1e-6)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    alone = layer(at(x, slice(1, 2), slice(0, 3)))
    padded = layer(x, key_padding_mask=padding)
    assert torch.allclose(padded.u[1:, :3], alone.u, atol=1e-6)


def test_case_49_need_weights_and_dropout():
    layer, x = L.PolarMultiheadAttention(8, 2, dropout=0.5), points(2, 5, 8)
    layer.eval()
    out, weights = layer(x, need_weights=True, is_causal=True)
    assert weights.shape == (2, 2, 5, 5)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 2, 5))
    assert (weights.triu(1) == 0).all()
    assert torch.allclose(out.u, layer(x, is_causal=True).u, atol=1e-5)
    layer.train()
    assert not torch.equal(layer(x).u, layer(x).u)


def test_old_names_warn_and_work():
    with pytest.warns(DeprecationWarning, match="backend='dense'"):
        layer = L.PolarMultiheadAttention(8, 2, fused=False)
    assert layer.backend == "dense"
    x = points(1, 4, 8)
    c = L.polar_score_coordinates(x)
    with pytest.warns(DeprecationWarning, match="blocked_attention"):
        old = L.fused_attention(c, c, x, torch.tensor(0.5))
    assert same(old, L.blocked_attention(c, c, x, torch.tensor(0.5)))


# --- 50: caches ----------------------------------------------------------------------------------


def test_case_50_a_refused_call_leaves_the_cache_alone():
    layer, cache = L.PolarMultiheadAttention(8, 2, is_causal=True), L.PolarCache()
    x = points(2, 5, 8)
    full = layer(x)
    with torch.no_grad():
        layer(at(x, slice(None), slice(0, 4)), cache=cache)
        last = at(x, slice(None), slice(4, 5))
        refused = (
            ({"attn_mask": torch.ones(1, 3, dtype=torch.bool)}, ValueError),
            ({"attn_mask": torch.ones(1, 5).long()}, TypeError),
            ({"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}, ValueError),
        )
        for options, error in refused:
            with pytest.raises(error):
                layer(last, cache=cache, **options)
        with pytest.raises(ValueError, match="batch"):
            layer(points(3, 1, 8), cache=cache)
        assert cache.length == 4
        step = layer(last, cache=cache)
    assert cache.length == 5
    assert torch.allclose(step.u, full.u[:, 4:], atol=1e-5)


def test_case_50_masks_of_both_kinds_in_one_cache():
    layer = L.PolarMultiheadAttention(8, 2, is_causal=True)
    x = points(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 0] = True
    full = layer(x, key_padding_mask=padding)
    first, last = at(x, slice(None), slice(0, 4)), at(x, slice(None), slice(4, 5))
    later = {
        "float": torch.zeros(2, 1),
        "bool": torch.zeros(2, 1, dtype=torch.bool),
        "none": None,
        "of all tokens": padding,
    }
    for name, mask in later.items():
        cache = L.PolarCache()
        layer(first, key_padding_mask=padding[:, :4], cache=cache)
        step = layer(last, key_padding_mask=mask, cache=cache)
        assert torch.allclose(step.u, full.u[:, 4:], atol=1e-5), name


def test_case_50_reorder_selects_sequences():
    layer = L.PolarMultiheadAttention(8, 2, is_causal=True)
    x, index = points(3, 5, 8), torch.tensor([2, 0, 0])
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[2, 0] = True
    cache, expected = L.PolarCache(), L.PolarCache()
    cache.reorder(index)
    layer(at(x, slice(None), slice(0, 4)), key_padding_mask=padding, cache=cache)
    cache.reorder(index)
    picked = at(x, index)
    layer(at(picked, slice(None), slice(0, 4)), key_padding_mask=padding[index], cache=expected)
    last = at(x, slice(None), slice(4, 5))
    assert torch.allclose(layer(last, cache=cache).u, layer(last, cache=expected).u, atol=1e-6)


# --- 56: float32 gradients of blocked attention --------------------------------------------------


def clusters(radius, groups=4, count=64, n=32):
    """(groups, count) points of spread 1 about centres at a radius, as float32 stores them."""
    centre = nn.functional.normalize(torch.randn(groups, 1, n, dtype=torch.float64), dim=-1)
    v = torch.randn(groups, count, n, dtype=torch.float64) / math.sqrt(n)
    a = torch.full((groups, count), radius, dtype=torch.float64)
    x = L.gyro_add((a, centre.expand(-1, count, -1)), L.exp_map_origin(v))
    return L.Point(x.a.float(), x.u.float())


def weight_gradients(layer, x, target, dtype, backend):
    layer = copy.deepcopy(layer).to(dtype)
    layer.backend = backend
    out = layer(tuple(t.to(dtype) for t in x))
    loss = L.squared_distance(out, tuple(t.to(dtype) for t in target)).mean()
    parts = (layer.query, layer.key, layer.value, layer.output)
    return torch.autograd.grad(loss, [part.direction.weight for part in parts])


@pytest.mark.parametrize("flat", [False, True], ids=["one cluster a sample", "four in a sequence"])
@pytest.mark.parametrize("radius", [8.0, 10.0, 12.0])
def test_case_56_float32_gradients_are_as_good_as_the_dense_paths(radius, flat):
    x = clusters(radius)
    if flat:
        x = L.Point(x.a.reshape(1, -1), x.u.reshape(1, -1, 32))
    layer = L.PolarMultiheadAttention(32, 4)
    target = L.Point(x.a.roll(1, -1), x.u.roll(1, -2))
    true = weight_gradients(layer, x, target, torch.float64, "dense")
    dense = weight_gradients(layer, x, target, torch.float32, "dense")
    blocked = weight_gradients(layer, x, target, torch.float32, "auto")
    for ours, theirs, exact in zip(blocked, dense, true, strict=True):
        error, allowed = ((g.double() - exact).norm() / exact.norm() for g in (ours, theirs))
        assert error < 10.0 * allowed
        assert error < 2e-2


# --- 60: padding that holds NaN ------------------------------------------------------------------


def spoilt(x, padding):
    return L.Point(
        x.a.masked_fill(padding, torch.nan), x.u.masked_fill(padding[..., None], torch.nan)
    )


PADDED = {
    "attention": lambda: L.PolarMultiheadAttention(8, 2),
    "dense attention": lambda: L.PolarMultiheadAttention(8, 2, backend="dense"),
    "positions": lambda: L.PolarMultiheadAttention(8, 2, position=L.HorosphericalEncoding(2, 8)),
    "GyroLayerNorm": lambda: L.GyroLayerNorm(8),
    "SpaceLayerNorm": lambda: L.SpaceLayerNorm(8),
    "BoostResidual": L.BoostResidual,
    "GyroResidual": L.GyroResidual,
    "SpaceResidual": L.SpaceResidual,
}


@pytest.mark.parametrize("name", PADDED)
def test_case_60_what_padding_holds_reaches_nothing(name):
    layer = PADDED[name]()
    x, y = points(2, 5, 8), points(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    padding[1, :1] = True

    def run(x, y):
        layer.zero_grad()
        arguments = (x, y) if "Residual" in name else (x,)
        out = layer(*arguments, key_padding_mask=padding)
        real = ~padding
        loss = out.a[real].sum() + out.u[real].sum()
        if loss.requires_grad:
            loss.backward()
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        return [out.a[real], out.u[real], *grads]

    clean = run(x, y)
    for ours, true in zip(run(spoilt(x, padding), spoilt(y, padding)), clean, strict=True):
        assert true.isfinite().all()
        assert torch.equal(ours, true)


@pytest.mark.parametrize("backend", ["auto", "dense"])
@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
def test_case_60_a_damaged_token_reaches_only_queries_that_see_it(backend, kind):
    layer = L.PolarMultiheadAttention(8, 2, backend=backend)
    x = points(1, 5, 8)
    damaged = torch.tensor([[False, False, False, False, True]])
    allowed = ~damaged.expand(5, 5)
    if kind == "causal":
        options = {"is_causal": True}
    else:
        mask = allowed if kind == "bool" else torch.zeros(5, 5).masked_fill(~allowed, -torch.inf)
        options = {"attn_mask": mask}

    def run(x):
        layer.zero_grad()
        out = layer(x, **options)
        out.a[:, :4].sum().backward()
        return out, [p.grad for p in layer.parameters() if p.grad is not None]

    (true, grads), (ours, mine) = run(x), run(spoilt(x, damaged))
    assert torch.allclose(ours.u[:, :4], true.u[:, :4], atol=1e-6)
    assert ours.a[:, 4].isnan().all()
    assert all(torch.allclose(g, h, atol=1e-5) for g, h in zip(grads, mine, strict=True))
    seen = layer(spoilt(x, damaged))
    assert seen.a.isnan().all()


def test_case_60_a_damaged_cached_token_stays_visible():
    layer, cache = L.PolarMultiheadAttention(8, 2, is_causal=True), L.PolarCache()
    x = spoilt(points(1, 3, 8), torch.tensor([[False, True, False]]))
    assert layer(x, cache=cache).a.isnan().tolist() == [[False, True, True]]
    assert layer(points(1, 1, 8), cache=cache).a.isnan().all()


# --- 61: second derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [5, 140])
def test_case_61_the_error_names_the_switch_and_the_switch_works(tokens):
    layer = L.PolarMultiheadAttention(8, 2).double()
    leaf = torch.randn(1, tokens, 8, dtype=torch.float64, requires_grad=True)

    def penalty():
        out = layer(L.exp_map_origin(leaf))
        (g,) = torch.autograd.grad(out.a.sum(), leaf, create_graph=True)
        return g.square().sum()

    blocked = penalty()
    with pytest.raises(RuntimeError, match="backend='dense'"):
        blocked.backward()
    layer.backend = "dense"
    dense = penalty()
    assert torch.allclose(dense, blocked.detach())
    dense.backward()
    assert leaf.grad.isfinite().all()


# --- 62: causal attention skips masked keys ------------------------------------------------------


def test_case_62_causal_attention_computes_no_block_after_its_queries(monkeypatch):
    from rpt.geometry.lorentz.attention import sweeps

    pairs = []
    plain = sweeps.block_scores

    def counted(query, key):
        pairs.append(query.level.shape[-1] * key.level.shape[-1])
        return plain(query, key)

    monkeypatch.setattr(sweeps, "block_scores", counted)
    x = points(1, 1, 512, 4)
    leaf = x.u.clone().requires_grad_()
    c = L.polar_score_coordinates((x.a, leaf))
    totals = []
    for causal in (False, True):
        pairs.clear()
        out = L.blocked_attention(c, c, x, torch.tensor(0.5), is_causal=causal)
        out.a.sum().backward(retain_graph=True)
        totals.append(sum(pairs))
    assert totals[1] <= 0.63 * totals[0]
