"""Layers: PolarLinear, norms, residuals, heads, embeddings, activations, curvature."""

import copy
import math

import pytest
import rpt.geometry.lorentz as lorentz
import torch
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


def test_a_fixed_curvature_is_exact_in_every_dtype():
    layer = lorentz.PolarLinear(3, 4, k=0.3).bfloat16().double()
    assert float(layer.curvature()) == 0.3
    assert not any("curvature" in name for name in layer.state_dict())
