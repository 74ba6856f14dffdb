"""The layers: what they equal at the start, what they refuse, what they declare."""

import copy
import math

import pytest
import rpt.geometry.lorentz as lorentz
import torch
from rpt.geometry.lorentz import ambient
from rpt.geometry.lorentz.attention_block import unit_rows
from rpt.geometry.lorentz.score import polar_score_coordinates
from rpt.observers.protocol import ObservableModel, declared_sites
from torch import nn


def points(*shape, scale=1.0, dtype=torch.float32):
    return lorentz.exp_map_origin(scale * torch.randn(*shape, dtype=dtype))


# --- PolarLinear --------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0.3, 1.0, 2.7])
@pytest.mark.parametrize("activation", [None, torch.relu, torch.tanh])
def test_polar_linear_starts_as_the_lorentz_layer(k, activation):
    layer = lorentz.PolarLinear(5, 7, k=k, activation=activation).double()
    x = points(4, 5, dtype=torch.float64)
    ambient_x = lorentz.to_ambient(x, k=k)
    h = ambient_x @ layer.direction.weight.mT
    h = h if activation is None else activation(h)
    ours = lorentz.to_space(layer(x), k=k)
    assert torch.allclose(ours, h, rtol=1e-12, atol=1e-12)
    plain = lorentz.PolarLinear(5, 7, k=k, activation=activation, radius="lorentz").double()
    plain.direction = layer.direction
    assert torch.equal(lorentz.to_space(plain(x), k=k), ours)


def test_polar_linear_radius_rule():
    layer = lorentz.PolarLinear(3, 4).double()
    with torch.no_grad():
        layer.norm_power_change.fill_(0.2)
        layer.radius_gain.fill_(-0.3)
        layer.radius_bias.fill_(0.1)
        layer.radius_direction.copy_(torch.tensor([0.5, -1.0, 0.2]))
    x = points(6, 3, dtype=torch.float64)
    h = lorentz.to_ambient(x) @ layer.direction.weight.mT
    chi = torch.tanh(x.a)[:, None] * x.u
    log_radius = 1.2 * h.norm(dim=-1).log() - 0.3 * x.a + chi @ layer.radius_direction + 0.1
    out = layer(x)
    assert torch.allclose(out.a, torch.asinh(log_radius.exp()))
    assert torch.allclose(out.u, h / h.norm(dim=-1, keepdim=True))


def test_polar_linear_zero_output_is_the_origin_without_gradient():
    layer = lorentz.PolarLinear(3, 4, activation=torch.relu)
    with torch.no_grad():
        layer.direction.weight[:, 0] = -50.0
    v = torch.randn(2, 3, requires_grad=True)
    out = layer(lorentz.exp_map_origin(v))
    assert (out.a == 0).all()
    assert (out.u == 0).all()
    (out.a.sum() + out.u.sum()).backward()
    assert (v.grad == 0).all()
    assert all((p.grad == 0).all() for p in layer.parameters())


def test_polar_linear_reaches_any_radius():
    layer = lorentz.PolarLinear(3, 4)
    x = (torch.tensor([300.0]), torch.tensor([[1.0, 0.0, 0.0]]))
    assert float(layer(x).a) == pytest.approx(300.0, abs=3.0)
    with pytest.raises(ValueError, match="dimension 3"):
        layer(points(2, 4))
    for bad in ({"radius": "cap"}, {"init": "zero"}):
        with pytest.raises(ValueError, match="must be"):
            lorentz.PolarLinear(3, 4, **bad)


def test_layers_run_in_half_precision_modules_and_under_autocast():
    x = points(2, 5, 8)
    block = nn.ModuleList(
        [
            lorentz.PolarMultiheadAttention(
                8, 2, position=lorentz.HorosphericalEncoding(2, 5), k=lorentz.Curvature(1.5)
            ),
            lorentz.GyroLayerNorm(8),
            lorentz.PolarMLP(8, 12),
            lorentz.LorentzMLR(8, 3),
        ]
    )

    def run(modules, x):
        for module in modules:
            x = module(x)
        return x

    exact = run(block, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(block, x), exact)
    half = copy.deepcopy(block).bfloat16()
    low = run(half, (x.a.bfloat16(), x.u.bfloat16()))
    assert low.dtype == torch.float32
    assert torch.allclose(low, exact, atol=0.1)
    low.sum().backward()
    assert all(p.grad.isfinite().all() for p in half.parameters())
    assert half[0].curvature.log_k.dtype == torch.bfloat16


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
        polar_score_coordinates(q),
        polar_score_coordinates(k),
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
def test_fused_attention_equals_the_dense_reference(blocks, causal, dtype, tolerance):
    """One block, row blocks, and row and key blocks; origins among the points; masked rows."""
    expected = attention_gradients(lorentz.dense_attention, torch.float64, causal)
    ours = attention_gradients(
        lorentz.fused_attention,
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
        scores = polar_score_coordinates(q), polar_score_coordinates(k)
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
def test_fused_attention_far_out_in_float32(radius, bound):
    """Outputs and gradients keep the resolution of float32 points; ambient arithmetic has none."""
    x = cluster(radius)
    results = []
    for dtype in (torch.float32, torch.float64):
        a, u = (t.to(torch.float32).to(dtype)[None].requires_grad_() for t in x)
        coordinates = polar_score_coordinates((a, u))
        gain = torch.tensor(0.5, dtype=dtype)
        out = lorentz.fused_attention(coordinates, coordinates, (a, u), gain)
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
        coordinates = polar_score_coordinates(x)
        out = lorentz.fused_attention(coordinates, coordinates, x, torch.tensor(0.3))
    out.a.sum().backward()
    assert max(saved) <= 16 * n
    assert x[1].grad.isfinite().all()


def test_attention_is_ambient_attention_in_float64():
    torch.manual_seed(0)
    q, k, v = (points(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    gain = torch.tensor(0.6, dtype=torch.float64)
    ours = lorentz.fused_attention(polar_score_coordinates(q), polar_score_coordinates(k), v, gain)
    expected = ambient.ambient_attention(*(lorentz.to_ambient(p) for p in (q, k, v)), 0.6)
    assert torch.allclose(lorentz.to_ambient(ours), expected, atol=1e-6)


def test_attention_layer_paths_agree_and_refuse():
    torch.manual_seed(0)
    layer = lorentz.PolarMultiheadAttention(
        12, 3, position=lorentz.HorosphericalEncoding(3, (2, 3))
    ).double()
    x, context = points(2, 6, 12, dtype=torch.float64), points(2, 6, 12, dtype=torch.float64)
    for options in ({}, {"context": context}, {"is_causal": True}):
        layer.fused = True
        fused = layer(x, **options)
        layer.fused = False
        dense = layer(x, **options)
        assert torch.allclose(lorentz.to_space(fused), lorentz.to_space(dense), atol=1e-10)
    bias = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    layer.fused = True
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


# --- positions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [16, (4, 4)])
def test_shared_scheme_is_exactly_relative(positions):
    """Moving every token by the same steps leaves all scores as they are, both axes at once."""
    encoding = lorentz.HorosphericalEncoding(2, positions, initial_rate=2.0).double()
    x = points(1, 2, 5, 6, dtype=torch.float64)
    where = torch.randint(0, 4, (5, 2)) if isinstance(positions, tuple) else torch.arange(5)
    moved = where + (torch.tensor([3, 7]) if isinstance(positions, tuple) else 11)
    from rpt.geometry.lorentz.score import pairwise_c

    here, there = encoding(x, where), encoding(x, moved)
    assert torch.allclose(pairwise_c(here, here), pairwise_c(there, there), rtol=1e-9)
    one_axis = encoding(x, where + 1)
    assert not torch.allclose(pairwise_c(here, one_axis), pairwise_c(here, here), rtol=1e-2)


def test_paper_scheme_is_relative_along_each_axis_and_only_nearly_across():
    encoding = lorentz.HorosphericalEncoding(2, (4, 4), scheme="paper", initial_rate=0.5).double()
    x = points(1, 2, 5, 6, dtype=torch.float64)
    from rpt.geometry.lorentz.score import pairwise_c

    rows = torch.stack([torch.arange(5), torch.zeros(5, dtype=torch.long)], -1)
    here = pairwise_c(encoding(x, rows), encoding(x, rows))
    there = pairwise_c(*2 * [encoding(x, rows + torch.tensor([3, 0]))])
    assert torch.allclose(here, there, rtol=1e-9)
    columns = rows.flip(-1)
    here = pairwise_c(encoding(x, columns), encoding(x, columns))
    there = pairwise_c(*2 * [encoding(x, columns + torch.tensor([0, 2]))])
    assert torch.allclose(here, there, rtol=1e-9)
    both = torch.tensor([[0, 0], [1, 2], [3, 1], [2, 2], [0, 3]])
    here = pairwise_c(*2 * [encoding(x, both)])
    there = pairwise_c(*2 * [encoding(x, both + torch.tensor([2, 2]))])
    assert not torch.allclose(here, there, rtol=1e-6)


def test_encoding_is_the_shift():
    encoding = lorentz.HorosphericalEncoding(1, 10, initial_rate=3.0).double()
    x = points(1, 1, 4, 5, dtype=torch.float64)
    level, _, vector = encoding(x)
    shifted = lorentz.horospherical_shift(x, 0.3 * torch.arange(4, dtype=torch.float64))
    expected = lorentz.to_half_space(shifted)
    assert torch.allclose(level, expected.log_nu)
    assert torch.allclose(vector, expected.w)


def test_boost_encoding_moves_points_along_its_axis():
    encoding = lorentz.BoostEncoding(2, 4)
    x = points(2, 2, 4, 5)
    level, _, vector = encoding(x)
    assert torch.allclose(level[:, :, 0], x.a[:, :, 0], atol=1e-5)
    expected = lorentz.axis_boost(x, torch.arange(4.0) / 4)
    assert torch.allclose(level, expected.a)
    assert torch.allclose(vector, expected.u)


# --- normalization and residuals ----------------------------------------------------------------


@pytest.mark.parametrize("k", [0.3, 1.0, 2.7])
def test_gyro_layer_norm_centres_and_scales(k):
    norm = lorentz.GyroLayerNorm(6, k=k, eps=0.0).double()
    x = points(3, 20, 6, scale=2.0, dtype=torch.float64)
    out = norm(x)
    # The centred tokens' mean squared radius is γ² by construction.
    spread = lorentz.distance_to_origin(out, k=k).square().mean(-1)
    gain = math.sqrt(k) * math.asinh(math.sqrt(6 / k))
    assert torch.allclose(spread, torch.full_like(spread, gain**2))
    # Before the scaling the centroid lies at the origin.
    mean = lorentz.centroid(x)
    mean = lorentz.Point(mean.a[:, None], mean.u[:, None])
    centred = lorentz.gyro_add(lorentz.gyro_negate(mean), x)
    assert (lorentz.centroid(centred).a <= 1e-12).all()
    assert torch.allclose(
        lorentz.pairwise_distance(centred, centred), lorentz.pairwise_distance(x, x), atol=1e-7
    )


def test_gyro_layer_norm_single_token_and_padding():
    norm = lorentz.GyroLayerNorm(4)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
    bias = lorentz.exp_map_origin(norm.bias)
    for scale in (1.0, 12.0):
        out = norm(points(3, 1, 4, scale=scale))
        assert torch.allclose(out.a, bias.a.expand(3, 1))
        assert torch.allclose(out.u, bias.u.expand(3, 1, 4))
    x = points(2, 5, 4)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    alone = norm(lorentz.Point(x.a[1:, :3], x.u[1:, :3]))
    assert torch.allclose(norm(x, padding).u[1, :3], alone.u[0], atol=1e-6)


@pytest.mark.parametrize("layer", [lorentz.GyroLayerNorm(4), lorentz.BoostResidual()])
def test_token_means_refuse_causal_masks(layer):
    x = points(2, 5, 4)
    arguments = (x,) if isinstance(layer, lorentz.GyroLayerNorm) else (x, x)
    with pytest.raises(ValueError, match="not causal"):
        layer(*arguments, is_causal=True)
    with pytest.raises(ValueError, match="attention masks"):
        layer(*arguments, torch.ones(5, 5, dtype=torch.bool).triu(1))
    lorentz.BoostResidual(center=False)(x, x, is_causal=True)


def test_boost_residual_follows_its_formula():
    residual = lorentz.BoostResidual(0.3).double()
    x, y = points(2, 5, 4, dtype=torch.float64), points(2, 5, 4, dtype=torch.float64)
    out = residual(x, y)
    along = y.a * (y.u * x.u).sum(-1)
    across = y.a[..., None] * y.u - along[..., None] * x.u
    length = across.norm(dim=-1, keepdim=True)
    new_a = x.a + 0.3 * (along - along.mean(-1, keepdim=True))
    direction = torch.tanh(x.a)[..., None] * x.u + torch.sinh(0.3 * length) * across / length
    direction = direction / direction.norm(dim=-1, keepdim=True)
    sign = torch.where(new_a < 0, -1.0, 1.0)
    assert torch.allclose(out.a, new_a.abs())
    assert torch.allclose(out.u, sign[..., None] * direction)
    assert torch.allclose((sign * out.a).sum(-1), x.a.sum(-1))


def test_boost_residual_at_the_origin_and_past_it():
    residual = lorentz.BoostResidual(1.0, center=False)
    v = torch.tensor([0.6, 0.8])
    origin = lorentz.origin_like(v)
    out = residual(origin, (torch.tensor(2.0), v))
    assert float(out.a) == 2.0
    assert torch.allclose(out.u, v)
    out = residual((torch.tensor(0.5), v), (torch.tensor(2.0), -v))
    assert float(out.a) == pytest.approx(1.5)
    assert torch.allclose(out.u, -v)
    nothing = residual(origin, origin)
    assert float(nothing.a) == 0
    assert (nothing.u == 0).all()
    same = residual((torch.tensor(0.5), v), origin)
    assert torch.allclose(same.u, v)
    u = torch.zeros(3, 2, requires_grad=True)
    step = residual((torch.zeros(3), u), (torch.ones(3), v.expand(3, 2)))
    step.u.sum().backward()
    assert u.grad.isfinite().all()


@pytest.mark.parametrize("layer", [lorentz.GyroResidual(), lorentz.SpaceResidual()])
def test_other_residuals_are_plain_formulas(layer):
    x, y = points(3, 4), points(3, 4)
    out = lorentz.to_space(layer(x, y))
    if isinstance(layer, lorentz.SpaceResidual):
        expected = lorentz.to_space(x) + lorentz.to_space(y)
    else:
        expected = lorentz.to_space(lorentz.gyro_add(x, lorentz.gyro_scale(0.1, y)))
    assert torch.allclose(out, expected, atol=1e-5)


# --- head, embeddings, activations --------------------------------------------------------------


@pytest.mark.parametrize("k", [0.3, 1.0, 2.7])
def test_mlr_is_the_signed_distance_to_the_hyperplane(k):
    head = lorentz.LorentzMLR(4, 3, k=k).double()
    with torch.no_grad():
        head.shift.copy_(torch.tensor([0.0, 0.7, -0.4]))
    x = points(5, 4, dtype=torch.float64)
    s, z = head.shift, head.weight
    length = z.norm(dim=-1)
    ambient_x = lorentz.to_ambient(x, k=k) / math.sqrt(k)
    rise = torch.cosh(s) * (ambient_x[:, 1:] @ (z / length[:, None]).mT)
    inner = rise - torch.sinh(s) * ambient_x[:, :1]
    expected = length * math.sqrt(k) * torch.asinh(inner)
    assert torch.allclose(head(x), expected)
    assert head((x.a[0], x.u[0])).shape == (3,)
    # On the hyperplane's own normal at rapidity s the distance is 0.
    on_plane = (s.detach().abs()[1], (z[1] / length[1]).detach())
    assert float(head(on_plane)[1]) == pytest.approx(0.0, abs=1e-12)


def test_mlr_far_out_in_float32():
    head = lorentz.LorentzMLR(4, 3)
    x = points(7, 4, scale=1.0)
    x = (torch.full((7,), 17.0), x.u)
    exact = copy.deepcopy(head).double()((x[0].double(), x[1].double()))
    assert torch.allclose(head(x).double(), exact, rtol=1e-4, atol=1e-4)


def test_patch_and_position_embeddings():
    embed = lorentz.PatchEmbedding(3, 4, 12)
    images = torch.rand(2, 3, 8, 16)
    out = embed(images)
    assert out.u.shape == (2, 8, 12)
    corner = images[:, :, 0:4, 4:8].reshape(2, -1) / math.sqrt(48)
    expected = embed.projection(lorentz.exp_map_origin(corner))
    assert torch.allclose(out.u[:, 1], expected.u, atol=1e-6)
    for learned in (True, False):
        table = lorentz.PositionTable((2, 4), 12, learned=learned)
        moved = lorentz.to_space(table(out))
        assert torch.allclose(moved, lorentz.to_space(out) + table.table, atol=1e-5)
    for bad in (torch.rand(2, 3, 9, 16), torch.rand(2, 1, 8, 16), torch.rand(3, 8, 8)):
        with pytest.raises(ValueError, match=r"tile|expected images"):
            embed(bad)
    with pytest.raises(ValueError, match="tokens"):
        lorentz.PositionTable(5, 12)(out)


def test_activations():
    x = points(6, 5)
    relu = lorentz.to_space(lorentz.PolarReLU()(x))
    assert torch.allclose(relu, lorentz.to_space(x).relu(), atol=1e-6)
    gelu = lorentz.SpaceActivation(nn.functional.gelu, k=2.0)(x)
    expected = nn.functional.gelu(lorentz.to_space(x, k=2.0))
    assert torch.allclose(lorentz.to_space(gelu, k=2.0), expected, atol=1e-5)
    far = lorentz.PolarReLU()((torch.full((6,), 400.0), x.u))
    assert torch.allclose(far.a, torch.tensor(400.0), atol=8.0)
    v = torch.zeros(2, 5, requires_grad=True)
    lorentz.to_space(lorentz.PolarReLU()(lorentz.exp_map_origin(v))).sum().backward()
    assert v.grad.isfinite().all()
    dropout = lorentz.PolarDropout(0.5)
    assert torch.equal(dropout.eval()(x).u, x.u)
    dropped = lorentz.to_space(dropout.train()(x))
    kept = dropped != 0
    assert torch.allclose(dropped[kept], 2 * lorentz.to_space(x)[kept], atol=1e-5)


# --- calibration, curvature, observation --------------------------------------------------------


class Small(nn.Module):
    def __init__(self, k=1.0):
        super().__init__()
        curvature = lorentz.Curvature(k)
        self.embed = lorentz.PatchEmbedding(1, 4, 8, k=curvature)
        self.norm = lorentz.GyroLayerNorm(8, k=curvature)
        self.attention = lorentz.PolarMultiheadAttention(8, 2, k=curvature)
        self.residual = lorentz.BoostResidual()
        self.mlp = lorentz.PolarMLP(8, 16, k=curvature)
        self.head = lorentz.LorentzMLR(8, 3, k=curvature)

    def forward(self, images):
        x = self.embed(images)
        x = self.residual(x, self.attention(self.norm(x)))
        x = self.residual(x, self.mlp(x))
        return self.head(lorentz.centroid(x))


@pytest.mark.parametrize("k", [1.0, 2.7])
def test_calibration_sets_the_radii_once(k):
    torch.manual_seed(0)
    model, images = Small(k), torch.rand(4, 1, 8, 8)
    assert not model.mlp.first.calibrated
    lorentz.calibrate_(model, images, 1.5)
    radii = {}
    for name in ("embed.projection", "attention.query", "attention.output", "mlp.second"):
        module = model.get_submodule(name)
        module.register_forward_hook(
            lambda m, i, out, name=name: radii.__setitem__(name, out.a.sinh().log().mean())
        )
    model(images)
    for value in radii.values():
        assert math.asinh(math.exp(value)) * math.sqrt(k) == pytest.approx(1.5, rel=1e-3)
    saved = copy.deepcopy(model.state_dict())
    assert bool(saved["mlp.first.calibrated"])
    fresh = Small(k)
    fresh.load_state_dict(saved)
    assert torch.equal(fresh(images), model(images))
    assert model.training
    # What decays is the deviation from the calibrated value: it is still 0.
    assert model.mlp.first.radius_bias == 0
    with pytest.raises(ValueError, match="positive"):
        lorentz.calibrate_(model, images, 0.0)
    with pytest.raises(ValueError, match="no PolarLinear"):
        lorentz.calibrate_(nn.Linear(2, 2), torch.rand(1, 2))


def test_a_fixed_curvature_is_exact_in_every_dtype():
    layer = lorentz.PolarLinear(3, 4, k=0.3).bfloat16().double()
    assert float(layer.curvature()) == 0.3
    assert not any("curvature" in name for name in layer.state_dict())


def test_curvature_is_learned_and_shared():
    model = Small(1.3)
    names = {id(p): n for n, p in model.named_parameters()}
    assert sum("log_k" in n for n in names.values()) == 1
    model(torch.rand(2, 1, 8, 8)).sum().backward()
    log_k = model.embed.curvature.log_k
    assert log_k.grad.isfinite()
    assert log_k.grad != 0
    with pytest.raises(ValueError, match="positive"):
        lorentz.Curvature(-1.0)


def test_every_layer_declares_its_sites():
    model = Small()
    sites = declared_sites(model)
    expected = {
        model.embed.projection.direction,
        *(getattr(model.attention, n).direction for n in ("query", "key", "value", "output")),
        model.mlp.first.direction,
        model.mlp.second.direction,
    }
    assert set(sites) == expected
    assert all(isinstance(site, nn.Linear) for site in sites)
    for name in lorentz.__all__:
        thing = getattr(lorentz, name)
        if isinstance(thing, type) and issubclass(thing, nn.Module):
            helpers = (lorentz.Curvature, lorentz.HeadGain, lorentz.PolarReLU)
            helpers += (lorentz.SpaceActivation, lorentz.PolarDropout)
            helpers += (lorentz.HorosphericalEncoding, lorentz.BoostEncoding)
            helpers += (lorentz.PolarMaxPool2d, lorentz.CentroidPool2d)
            assert issubclass(thing, helpers) or issubclass(thing, ObservableModel)


def test_unit_rows_do_not_overflow():
    rows = torch.tensor([[3e30, 4e30], [0.0, 0.0], [3e-30, 4e-30]])
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.6, 0.8]])
    assert torch.allclose(unit_rows(rows), expected)
