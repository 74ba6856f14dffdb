"""Acceptance cases of the Lorentz layers: failures that users of comparable layers met."""

import math

import pytest
import rpt.geometry.lorentz as lorentz
import torch

# --- 25: a query row with every key masked -----------------------------------------------------


def attention(backend, dtype=torch.float32):
    torch.manual_seed(0)
    return lorentz.PolarMultiheadAttention(4, 2, backend=backend).to(dtype)


def gradients(layer, x, loss):
    return torch.autograd.grad(loss, [x, *(p for p in layer.parameters())], allow_unused=True)


@pytest.mark.parametrize("backend", ["auto", "dense"])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_case_25_masked_query_row(backend, kind):
    layer = attention(backend)
    v = torch.randn(1, 3, 4).requires_grad_()
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    if kind == "additive":
        mask = torch.zeros(3, 3).masked_fill_(~mask, -torch.inf)
    out = layer(lorentz.exp_map_origin(v), attn_mask=mask)
    ambient = lorentz.to_ambient(out)[0, 1]
    assert ambient.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    masked = gradients(layer, v, (out.a[0, 0] + out.u[0, 0].sum()))
    plain = layer(lorentz.exp_map_origin(v))
    expected = gradients(layer, v, (plain.a[0, 0] + plain.u[0, 0].sum()))
    for ours, true in zip(masked, expected, strict=True):
        if true is None or ours is None:
            assert ours is true
        else:
            assert ours.isfinite().all()
            assert torch.allclose(ours, true, rtol=1e-6, atol=1e-7)
    # Also where the masked row itself is in the loss.
    everything = gradients(layer, v, layer(lorentz.exp_map_origin(v), attn_mask=mask).u.sum())
    assert all(g is None or g.isfinite().all() for g in everything)


@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_case_25_sample_of_padding_only(backend):
    layer = attention(backend)
    v = torch.randn(2, 3, 4).requires_grad_()
    padding = torch.tensor([[False, False, False], [True, True, True]])
    out = layer(lorentz.exp_map_origin(v), key_padding_mask=padding)
    assert (out.a[1] == 0).all()
    assert (out.u[1] == 0).all()
    both = gradients(layer, v, out.a.sum() + out.u.sum())
    alone = v[:1].detach().requires_grad_()
    single = layer(lorentz.exp_map_origin(alone))
    expected = gradients(layer, alone, single.a.sum() + single.u.sum())
    assert torch.allclose(both[0][:1], expected[0], rtol=1e-6, atol=1e-7)
    assert (both[0][1] == 0).all()
    for ours, true in zip(both[1:], expected[1:], strict=True):
        assert (ours is None and true is None) or torch.allclose(ours, true, rtol=1e-5, atol=1e-7)


def test_case_25_centroid_norm_and_residual_of_padding_only():
    v = torch.randn(2, 3, 4).requires_grad_()
    padding = torch.tensor([[False, False, True], [True, True, True]])
    x = lorentz.exp_map_origin(v)
    mean = lorentz.centroid(x, (~padding).float())
    assert mean.a[1] == 0
    assert (mean.u[1] == 0).all()
    norm, residual = lorentz.GyroLayerNorm(4), lorentz.BoostResidual()
    out = residual(x, norm(x, padding), padding)
    (mean.a.sum() + out.a.sum() + out.u.sum()).backward()
    assert out.a.isfinite().all()
    assert v.grad.isfinite().all()
    # Padding does not reach the tokens that are there.
    changed = v.detach().clone()
    changed[0, 2] = 7.0
    y = lorentz.exp_map_origin(changed)
    again = residual(y, norm(y, padding), padding)
    assert torch.equal(again.u[0, :2], out.u[0, :2])


# --- 28: cached decoding -----------------------------------------------------------------------


def causal_layer(dtype):
    torch.manual_seed(1)
    layer = lorentz.PolarMultiheadAttention(
        8, 2, position=lorentz.HorosphericalEncoding(2, 8, initial_rate=3.0), is_causal=True
    )
    return layer.to(dtype)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunks", [(5, 1, 1, 1), (3, 2, 3)])
def test_case_28_cached_decoding(dtype, atol, chunks):
    layer = causal_layer(dtype)
    x = lorentz.exp_map_origin(torch.randn(2, 8, 8, dtype=dtype))
    full = lorentz.to_space(layer(x))
    cache, start, parts = lorentz.PolarCache(), 0, []
    for count in chunks:
        chunk = (x.a[:, start : start + count], x.u[:, start : start + count])
        parts.append(lorentz.to_space(layer(chunk, cache=cache)))
        start += count
        assert cache.length == start
    assert torch.allclose(torch.cat(parts, 1), full, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_case_28_left_padded_batch(dtype, atol):
    """True lengths 5 and 3: the padded row decodes as it does alone."""
    layer = causal_layer(dtype)
    v = torch.randn(2, 5, 8, dtype=dtype)
    x = lorentz.exp_map_origin(v)
    padding = torch.tensor([[False] * 5, [True, True, False, False, False]])
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    alone = lorentz.to_space(layer(lorentz.exp_map_origin(v[1:, 2:])))
    whole = lorentz.to_space(layer(x, key_padding_mask=padding, positions=positions))
    assert torch.allclose(whole[1, 2:], alone[0], atol=atol)
    cache, parts = lorentz.PolarCache(), []
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        part = slice(start, stop)
        chunk = (x.a[:, part], x.u[:, part])
        out = layer(
            chunk, key_padding_mask=padding[:, part], positions=positions[:, part], cache=cache
        )
        parts.append(lorentz.to_space(out))
    stepwise = torch.cat(parts, 1)
    assert torch.allclose(stepwise[0], whole[0], atol=atol)
    assert torch.allclose(stepwise[1, 2:], alone[0], atol=atol)


def test_case_28_only_position_differences_matter():
    layer = causal_layer(torch.float64)
    x = lorentz.exp_map_origin(torch.randn(2, 8, 8, dtype=torch.float64))
    here = lorentz.to_space(layer(x, positions=torch.arange(8)))
    there = lorentz.to_space(layer(x, positions=torch.arange(8) + 1000))
    assert (here - there).abs().max() <= 1e-9


# --- 32: the distance of a point to itself, and of near points ----------------------------------


@pytest.mark.parametrize("radius", [0.5, 1.0, 3.0, 6.0, 9.0])
def test_case_32_self_distance(radius):
    u = torch.nn.functional.normalize(torch.randn(1000, 8), dim=-1)
    a = torch.full((1000,), radius)
    for function in (lorentz.distance, lorentz.squared_distance):
        x = tuple(t.clone().requires_grad_() for t in (a, u))
        y = tuple(t.clone().requires_grad_() for t in (a, u))
        d = function(x, y)
        assert (d == 0).all()
        d.sum().backward()
        assert all((t.grad == 0).all() for t in (*x, *y))
    itself = tuple(t.clone().requires_grad_() for t in (a, u))
    pairs = lorentz.pairwise_distance(itself, itself)
    assert (pairs.diagonal() == 0).all()
    pairs.sum().backward()
    assert all(t.grad.isfinite().all() for t in itself)


def test_case_32_origin_and_near_points():
    v = torch.tensor([[0.0, 0, 0], [1e-4, 0, 0]]).requires_grad_()
    origin = lorentz.exp_map_origin(torch.zeros(3))
    d = lorentz.distance(origin, lorentz.exp_map_origin(v))
    assert d[0] == 0
    assert float(d[1]) == pytest.approx(1e-4, rel=0.01)
    d.sum().backward()
    assert v.grad.isfinite().all()
    assert torch.allclose(v.grad[1], torch.tensor([1.0, 0, 0]), atol=1e-5)


# --- 33: the zero tangent vector ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [0.3, 1.0, 2.7])
def test_case_33_zero_tangent(dtype, k):
    v = torch.zeros(1, 3, dtype=dtype).requires_grad_()
    point = lorentz.exp_map_origin(v, k=k)
    ambient = lorentz.to_ambient(point, k=k)
    assert ambient[0].tolist() == pytest.approx([math.sqrt(k), 0, 0, 0], abs=1e-7)
    assert (ambient[0, 1:] == 0).all()
    for index in range(4):
        (row,) = torch.autograd.grad(ambient[0, index], v, retain_graph=True)
        expected = torch.zeros(3) if index == 0 else torch.eye(3)[index - 1]
        assert torch.allclose(row[0].float(), expected, atol=1e-6)
    back = lorentz.log_map_origin(point, k=k)
    assert (back == 0).all()
    for index in range(3):
        (row,) = torch.autograd.grad(back[0, index], v, retain_graph=True)
        assert torch.allclose(row[0].float(), torch.eye(3)[index], atol=1e-6)
    tangent = (torch.zeros(1), v)
    length = lorentz.tangent_norm(point, tangent)
    assert length == 0
    (gradient,) = torch.autograd.grad(length.sum(), v)
    assert (gradient == 0).all()


def test_case_33_mixed_batch_and_tiny_vectors():
    rows = torch.randn(4, 3)
    mixed = rows.clone()
    mixed[1] = 0.0
    alone, together = lorentz.exp_map_origin(rows), lorentz.exp_map_origin(mixed)
    keep = torch.tensor([0, 2, 3])
    assert torch.equal(alone.u[keep], together.u[keep])
    assert torch.equal(alone.a[keep], together.a[keep])
    for size in (1e-8, 1e-20):
        for dtype in (torch.float32, torch.bfloat16):
            v = torch.tensor([[size, 0, 0]], dtype=dtype).requires_grad_()
            back = lorentz.log_map_origin(lorentz.exp_map_origin(v))
            assert torch.allclose(back, v.float(), rtol=1e-6, atol=0)
            back.sum().backward()
            assert torch.allclose(v.grad.float(), torch.ones(1, 3), atol=1e-2)


def test_case_33_zero_initialised_projection_learns():
    layer = torch.nn.Linear(5, 3)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    target = lorentz.exp_map_origin(torch.tensor([0.5, -0.2, 0.1]))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    features = torch.randn(8, 5)
    for _ in range(50):
        optimizer.zero_grad()
        loss = lorentz.squared_distance(lorentz.exp_map_origin(layer(features)), target).mean()
        loss.backward()
        assert layer.weight.grad.isfinite().all()
        optimizer.step()
    assert loss < 0.05


# --- 34: points far from the origin -------------------------------------------------------------

FAR = [5.0, 8.0, 10.0, 15.0, 45.0, 46.0, 90.0, 1000.0]


@pytest.mark.parametrize("radius", FAR)
@pytest.mark.parametrize("k", [0.3, 1.0, 2.7])
def test_case_34_far_points(radius, k):
    direction = torch.nn.functional.normalize(torch.randn(8), dim=0)
    v = (radius * direction).requires_grad_()
    x, y = lorentz.exp_map_origin(v, k=k), lorentz.exp_map_origin((radius + 1) * direction, k=k)
    d = lorentz.distance(x, y, k=k)
    origin = lorentz.origin_like(direction)
    from_origin = lorentz.distance(origin, x, k=k)
    # The distance itself has no radius limit: with the direction stored once it is 1 everywhere.
    shared = lorentz.distance(x, (x.a + 1.0 / math.sqrt(k), x.u), k=k)
    assert float(shared) == pytest.approx(1.0, rel=0.01)
    assert float(from_origin) == pytest.approx(radius, rel=0.01)
    # Two roundings of one direction are two directions: a unit distance is right to 1 % up to
    # a = 13 in float32, to a few percent at 15, and lost beyond 17 (Proposition 2).
    a = radius / math.sqrt(k)
    if a <= 15.0:
        assert float(d) == pytest.approx(1.0, rel=0.01 if a <= 13.0 else 0.05)
    assert d.isfinite()
    (d + from_origin).backward()
    assert v.grad.isfinite().all()
    for far in (lorentz.to_ambient(x, k=k), lorentz.to_space(x, k=k)):
        assert far.isfinite().all()


@pytest.mark.parametrize("radius", FAR)
def test_case_34_layers_stay_finite(radius):
    """Every operation and layer on points that far: finite values and gradients."""
    torch.manual_seed(0)
    v = torch.randn(2, 5, 8)
    v = (radius * v / v.norm(dim=-1, keepdim=True)).requires_grad_()
    x = lorentz.exp_map_origin(v)
    y = lorentz.Point(x.a.flip(1), x.u.flip(1))
    attention = lorentz.PolarMultiheadAttention(8, 2, position=lorentz.HorosphericalEncoding(2, 5))
    results = [
        attention(x),
        lorentz.PolarLinear(8, 6, activation=torch.relu)(x),
        lorentz.PolarLinear(8, 6, activation=torch.tanh)(x),
        lorentz.GyroLayerNorm(8)(x),
        lorentz.BoostResidual()(x, y),
        lorentz.gyro_add(x, y),
        lorentz.exp_map(x, lorentz.log_map(x, y)),
        lorentz.parallel_transport(x, y, lorentz.log_map(x, y)),
        lorentz.centroid(x),
        lorentz.horospherical_shift(x, 0.5),
        lorentz.PolarReLU()(x),
        (lorentz.LorentzMLR(8, 3)(x), lorentz.pairwise_squared_distance(x, x)),
    ]
    parts = [part for result in results for part in result]
    assert all(part.isfinite().all() for part in parts)
    sum(part.sum() for part in parts).backward()
    assert v.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize("radius", [11.0, 11.7, 11.8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_case_34_half_precision(radius, dtype):
    direction = torch.zeros(8, dtype=dtype)
    direction[0] = 1.0
    v = (radius * direction).requires_grad_()
    x = lorentz.exp_map_origin(v)
    with torch.autocast("cpu", torch.bfloat16):
        d = lorentz.distance(lorentz.origin_like(direction), x)
        out = lorentz.PolarLinear(8, 8)((x.a[None], x.u[None]))
    assert d.dtype == torch.float32
    assert float(d) == pytest.approx(float(v.detach().float().norm()), rel=1e-3)
    assert out.a.isfinite().all()
    (d + out.a.sum()).backward()
    assert v.grad.isfinite().all()
