"""Attention: paths, precision far out, memory, masks, compilation."""

import pytest
import rpt.geometry.lorentz as lorentz
import torch
from baselines import ambient
from rpt.geometry.lorentz.attention.block import unit_rows


def points(*shape, scale=1.0, dtype=torch.float32):
    return lorentz.exp_map_origin(scale * torch.randn(*shape, dtype=dtype))


# --- attention ----------------------------------------------------------------------------------


def attention_inputs(dtype, n=37, dim=5):
    generator = torch.Generator().manual_seed(3)
    sets = []
    for _ in range(3):
        v = 1.5 * torch.randn(2, 3, n, dim, generator=generator, dtype=torch.float64)
        v[..., 4, :] = 0.0
        sets.append([t.to(dtype).detach().requires_grad_() for t in lorentz.exp_map_origin(v)])
    gain = (torch.rand(3, 1, 1, generator=generator, dtype=torch.float64) + 0.2).to(dtype)
    bias = torch.zeros(2, 1, n, n, dtype=torch.float64)
    bias[1, :, 5] = -torch.inf
    bias[:, :, :, 9] = -torch.inf
    return sets, gain.requires_grad_(), bias


def attention_gradients(function, dtype, causal, **options):
    (q, k, v), gain, bias = attention_inputs(dtype)
    if causal and not options:
        bias = bias + torch.full((37, 37), -torch.inf, dtype=torch.float64).triu(1)
    out = function(
        lorentz.polar_score_coordinates(q),
        lorentz.polar_score_coordinates(k),
        v,
        gain,
        bias.to(dtype),
        **options,
    )
    generator = torch.Generator().manual_seed(4)
    by_a = torch.randn(out.a.shape, generator=generator, dtype=torch.float64).to(dtype)
    by_u = torch.randn(out.u.shape, generator=generator, dtype=torch.float64).to(dtype)
    inputs = [*q, *k, *v, gain]
    gradients = list(torch.autograd.grad((out.a * by_a).sum() + (out.u * by_u).sum(), inputs))
    for index in (0, 2, 4):
        a, u = inputs[index : index + 2]
        # The radius of an origin has no derivative of its own, the direction none along itself.
        gradients[index] = torch.where(a == 0, 0.0, gradients[index])
        along = (gradients[index + 1] * u).sum(-1, keepdim=True)
        gradients[index + 1] = gradients[index + 1] - along * u
    return [*out, *gradients]


@pytest.mark.parametrize("blocks", [(64, 4096), (10, 400), (10, 7)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_blocked_attention_equals_the_dense_reference(blocks, causal, dtype, tolerance):
    """One block, row blocks, and row and key blocks; origins among the points; masked rows."""
    expected = attention_gradients(lorentz.dense_attention, torch.float64, causal)
    ours = attention_gradients(
        lorentz.blocked_attention,
        dtype,
        causal,
        is_causal=causal,
        row_block=blocks[0],
        key_block=blocks[1],
    )
    for got, true in zip(ours, expected, strict=True):
        assert (got - true).abs().max() <= tolerance * true.abs().max()


def test_dense_attention_has_second_derivatives():
    small = [
        [t.detach().clone().requires_grad_() for t in lorentz.exp_map_origin(v)]
        for v in torch.randn(3, 1, 4, 3, dtype=torch.float64)
    ]
    flat = [t for pair in small for t in pair]

    def function(*tensors):
        q, k, v = tensors[0:2], tensors[2:4], tensors[4:6]
        scores = lorentz.polar_score_coordinates(q), lorentz.polar_score_coordinates(k)
        return lorentz.dense_attention(*scores, v, torch.tensor(0.7, dtype=torch.float64))

    assert torch.autograd.gradcheck(function, flat)
    assert torch.autograd.gradgradcheck(function, flat)


def cluster(radius, count=64, n=8, seed=0):
    """Points at geodesic spread 1 about one centre, in float64."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(n, generator=generator, dtype=torch.float64)
    v = torch.randn(count, n, generator=generator, dtype=torch.float64)
    v = v / v.norm(dim=-1, keepdim=True)
    x = lorentz.Point(
        torch.full((count,), radius, dtype=torch.float64), (centre / centre.norm()).expand(count, n)
    )
    return lorentz.gyro_add(x, lorentz.exp_map_origin(v))


@pytest.mark.parametrize(("radius", "bound"), [(4.0, 5e-6), (8.0, 2e-4), (12.0, 1e-2), (15.0, 0.3)])
def test_blocked_attention_far_out_in_float32(radius, bound):
    """Outputs and gradients keep the resolution of float32 points; ambient arithmetic has none."""
    x = cluster(radius)
    results = []
    for dtype in (torch.float32, torch.float64):
        a, u = (t.to(torch.float32).to(dtype)[None].requires_grad_() for t in x)
        coordinates = lorentz.polar_score_coordinates((a, u))
        gain = torch.tensor(0.5, dtype=dtype)
        out = lorentz.blocked_attention(coordinates, coordinates, (a, u), gain)
        results.append([*out, torch.autograd.grad(out.a.sum(), a)[0]])
    (a32, u32, g32), (a64, u64, g64) = results
    assert lorentz.distance((a32.double(), u32.double()), (a64, u64)).median() <= bound
    assert (g32 - g64).norm() <= 10 * bound * g64.norm()


def test_attention_needs_memory_linear_in_tokens():
    """At 2048 tokens one (N, N) float32 is 16 MB per head; nothing saved comes near it."""
    saved = []

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    n = 2048
    x = [t[None, None].requires_grad_() for t in points(n, 8)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        coordinates = lorentz.polar_score_coordinates(x)
        out = lorentz.blocked_attention(coordinates, coordinates, x, torch.tensor(0.3))
    out.a.sum().backward()
    assert max(saved) <= 16 * n
    assert x[1].grad.isfinite().all()


def test_attention_is_ambient_attention_in_float64():
    torch.manual_seed(0)
    q, k, v = (points(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    gain = torch.tensor(0.6, dtype=torch.float64)
    ours = lorentz.blocked_attention(
        lorentz.polar_score_coordinates(q), lorentz.polar_score_coordinates(k), v, gain
    )
    expected = ambient.ambient_attention(*(lorentz.to_ambient(p) for p in (q, k, v)), 0.6)
    assert torch.allclose(lorentz.to_ambient(ours), expected, atol=1e-6)


def test_attention_layer_paths_agree_and_refuse():
    torch.manual_seed(0)
    layer = lorentz.PolarMultiheadAttention(
        12, 3, position=lorentz.HorosphericalEncoding(3, (2, 3))
    ).double()
    x, context = points(2, 6, 12, dtype=torch.float64), points(2, 6, 12, dtype=torch.float64)
    for options in ({}, {"context": context}, {"is_causal": True}):
        layer.backend = "auto"
        blocked = layer(x, **options)
        layer.backend = "dense"
        dense = layer(x, **options)
        assert torch.allclose(lorentz.to_space(blocked), lorentz.to_space(dense), atol=1e-10)
    bias = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    layer.backend = "auto"
    layer(x, attn_mask=bias).a.sum().backward()
    assert (bias.grad != 0).any()
    for options, message in (
        ({"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}, "key_padding_mask"),
        ({"attn_mask": torch.zeros(5, 6)}, "attn_mask"),
        ({"context": context, "is_causal": True}, "no meaning"),
        ({"context": context, "cache": lorentz.PolarCache()}, "not both"),
        ({"positions": torch.arange(6)}, "grid positions"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, **options)
    with pytest.raises(ValueError, match="divide"):
        lorentz.PolarMultiheadAttention(10, 3)
    with pytest.raises(ValueError, match="head dimensions"):
        lorentz.PolarMultiheadAttention(4, 2, position=lorentz.HorosphericalEncoding(2, (2, 2)))
    with pytest.raises(ValueError, match="tokens"):
        layer(points(2, 5, 12))


@pytest.mark.parametrize("tokens", [7, pytest.param(150, marks=pytest.mark.slow)])
def test_attention_compiles_in_one_graph(tokens):
    torch.manual_seed(0)
    layer = lorentz.PolarMultiheadAttention(8, 2, position=lorentz.HorosphericalEncoding(2, 200))
    norm, residual = lorentz.GyroLayerNorm(8), lorentz.BoostResidual()

    def block(a, u):
        return residual((a, u), layer(norm((a, u))))

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    a, u = (t.detach().requires_grad_() for t in points(1, tokens, 8))
    for got, true in zip(compiled(a, u), block(a, u), strict=True):
        assert torch.allclose(got, true, atol=1e-5)
    ours = torch.autograd.grad(compiled(a, u)[0].sum(), [a, u, *layer.parameters()])
    true = torch.autograd.grad(block(a, u)[0].sum(), [a, u, *layer.parameters()])
    for got, expected in zip(ours, true, strict=True):
        assert torch.allclose(got, expected, atol=1e-4)
    torch._dynamo.reset()


def test_unit_rows_do_not_overflow():
    rows = torch.tensor([[3e30, 4e30], [0.0, 0.0], [3e-30, 4e-30]])
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.6, 0.8]])
    assert torch.allclose(unit_rows(rows), expected)
