"""Every public function and layer of the Lorentz geometry on inputs that are empty, at the origin,
or of mixed dtypes: the kinds that cases 52 and 57 of the second round stand for.
"""

import inspect

import pytest
import rpt.geometry.lorentz as L
import torch

N = 4


def tangent(x):
    return 0.1 * torch.ones_like(x[0]), 0.1 * torch.ones_like(x[1])


def normals(x):
    return torch.eye(3, N, dtype=x[1].dtype), torch.zeros(3, dtype=x[1].dtype)


# Of one set of points (batch, tokens), (batch, tokens, 4).
FUNCTIONS = {
    "squared_distance": lambda x: L.squared_distance(x, x),
    "distance": lambda x: L.distance(x, x),
    "pairwise_distance": lambda x: L.pairwise_distance(x, x),
    "pairwise_squared_distance": lambda x: L.pairwise_squared_distance(x, x),
    "distance_to_origin": L.distance_to_origin,
    "centroid": L.centroid,
    "centroids": lambda x: L.centroids(x, torch.ones_like(x[0]).unsqueeze(-2)),
    "to_ambient": L.to_ambient,
    "to_poincare": L.to_poincare,
    "from_poincare": lambda x: L.from_poincare(L.to_poincare(x)),
    "from_ambient": lambda x: L.from_ambient(L.to_ambient(x)),
    "to_space": L.to_space,
    "from_space": lambda x: L.from_space(L.to_space(x)),
    "exp_map": lambda x: L.exp_map(x, tangent(x)),
    "log_map": lambda x: L.log_map(x, x),
    "exp_map_origin": lambda x: L.exp_map_origin(x[1]),
    "log_map_origin": L.log_map_origin,
    "parallel_transport": lambda x: L.parallel_transport(x, x, tangent(x)),
    "gyro_add": lambda x: L.gyro_add(x, x),
    "gyro_negate": L.gyro_negate,
    "gyro_scale": lambda x: L.gyro_scale(0.5, x),
    "boost": lambda x: L.boost(x, x),
    "boost_step": lambda x: L.boost_step(x, x, 0.1, torch.ones_like(x[0])),
    "axis_boost": lambda x: L.axis_boost(x, 0.3),
    "horospherical_shift": lambda x: L.horospherical_shift(x, 0.5),
    "horospherical_distance": lambda x: L.horospherical_distance(x, 0.5),
    "to_half_space": L.to_half_space,
    "from_half_space": lambda x: L.from_half_space(L.to_half_space(x)),
    "half_space_squared_distance": lambda x: L.half_space_squared_distance(
        L.to_half_space(x), L.to_half_space(x)
    ),
    "pairwise_half_space_squared_distance": lambda x: L.pairwise_half_space_squared_distance(
        L.to_half_space(x), L.to_half_space(x)
    ),
    "split_heads": lambda x: L.split_heads(x, 2),
    "join_heads": lambda x: L.join_heads(L.split_heads(x, 2)),
    "concatenate": lambda x: L.concatenate(x, x),
    "homogeneous_activation": lambda x: L.homogeneous_activation(x, torch.relu),
    "mlr_logits": lambda x: L.mlr_logits(x, *normals(x)),
    "inner": lambda x: L.inner(x, tangent(x), tangent(x)),
    "tangent_norm": lambda x: L.tangent_norm(x, tangent(x)),
    "tangent_to_ambient": lambda x: L.tangent_to_ambient(x, tangent(x)),
    "tangent_from_ambient": lambda x: L.tangent_from_ambient(x, L.to_ambient(x)),
    "gradient_from_polar": lambda x: L.gradient_from_polar(x, *tangent(x)),
    "gradient_from_ambient": lambda x: L.gradient_from_ambient(x, L.to_ambient(x)),
    "polar_score_coordinates": L.polar_score_coordinates,
    "dense_attention": lambda x: L.dense_attention(
        L.polar_score_coordinates(x), L.polar_score_coordinates(x), x, torch.ones(1, 1)
    ),
    "blocked_attention": lambda x: L.blocked_attention(
        L.polar_score_coordinates(x), L.polar_score_coordinates(x), x, torch.ones(1, 1)
    ),
    "origin_like": lambda x: L.origin_like(x[1]),
}
LAYERS = {
    "PolarLinear": lambda: L.PolarLinear(N, 3),
    "PolarMLP": lambda: L.PolarMLP(N, 5),
    "PolarMultiheadAttention": lambda: L.PolarMultiheadAttention(N, 2),
    "dense PolarMultiheadAttention": lambda: L.PolarMultiheadAttention(N, 2, backend="dense"),
    "causal PolarMultiheadAttention": lambda: L.PolarMultiheadAttention(
        N, 2, is_causal=True, position=L.HorosphericalEncoding(2, 7)
    ),
    "GyroLayerNorm": lambda: L.GyroLayerNorm(N),
    "SpaceLayerNorm": lambda: L.SpaceLayerNorm(N),
    "PolarBatchNorm2d": lambda: L.PolarBatchNorm2d(N),
    "PolarReLU": L.PolarReLU,
    "PolarDropout": L.PolarDropout,
    "SpaceActivation": lambda: L.SpaceActivation(torch.tanh),
    "LorentzMLR": lambda: L.LorentzMLR(N, 3),
}
RESIDUALS = {
    "BoostResidual": L.BoostResidual,
    "GyroResidual": L.GyroResidual,
    "SpaceResidual": L.SpaceResidual,
}
IMAGES = {
    "PolarConv2d": lambda: L.PolarConv2d(N, 3, 3, padding=1),
    "max_pool2d": lambda: lambda x: L.max_pool2d(x, 2),
    "centroid_pool2d": lambda: lambda x: L.centroid_pool2d(x, 2),
    "upsample2x": lambda: L.upsample2x,
    "PolarMaxPool2d": L.PolarMaxPool2d,
    "CentroidPool2d": L.CentroidPool2d,
}
MAKERS = {
    **{name: (lambda f=f: f) for name, f in FUNCTIONS.items()},
    **LAYERS,
    **{
        name: (lambda r=r: (lambda layer: lambda x: layer(x, x))(r()))
        for name, r in RESIDUALS.items()
    },
}
NOT_OF_POINTS = {
    "fused_attention",  # a deprecated name
    "calibrate_",
    "dice_score",
    "pack",
    "parameter_groups",
    "radius_limit",
    "segmentation_loss",
    "sine_cosine_table",
    "unpack",
}


def test_the_table_knows_every_public_function():
    functions = {name for name in L.__all__ if inspect.isfunction(getattr(L, name))}
    assert functions - NOT_OF_POINTS <= {*FUNCTIONS, *IMAGES}


def parts(result):
    return list(result) if isinstance(result, tuple) else [result]


# Of points alone these say nothing that has a gradient.
CONSTANT = ("inner", "tangent_norm", "origin_like")


def check_backward(made, result, leaf, name=""):
    total = sum(part.sum() for part in parts(result))
    assert torch.isfinite(total)
    assert total.requires_grad == (name not in CONSTANT)
    if total.requires_grad:
        total.backward()
    held = made.parameters() if isinstance(made, torch.nn.Module) else []
    for tensor in (leaf, *held):
        assert tensor.grad is None or tensor.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)], ids=["no sample", "no token"])
@pytest.mark.parametrize("name", MAKERS)
def test_case_52_empty_input(name, shape):
    made = MAKERS[name]()
    leaf = torch.zeros(*shape, N, requires_grad=True)
    result = made(L.exp_map_origin(leaf))
    if name not in ("centroid", "centroids"):
        assert all(part.shape[: len(shape)] == shape for part in parts(result) if 0 in part.shape)
    check_backward(made, result, leaf, name)


@pytest.mark.parametrize("name", IMAGES)
def test_case_52_empty_images(name):
    made = IMAGES[name]()
    leaf = torch.zeros(0, 4, 4, N, requires_grad=True)
    result = made(L.exp_map_origin(leaf))
    assert result.a.shape[0] == 0
    check_backward(made, result, leaf)


def test_case_52_empty_batch_of_mlr_gives_gradient_zero():
    head = L.LorentzMLR(N, 3)
    head(L.exp_map_origin(torch.zeros(0, N))).sum().backward()
    assert (head.weight.grad == 0).all()
    assert (head.shift.grad == 0).all()


def test_case_52_empty_batch_leaves_batch_norm_statistics_alone():
    norm = L.PolarBatchNorm2d(N)
    norm(L.exp_map_origin(torch.randn(2, 3, 3, N)))
    before = {name: value.clone() for name, value in norm.named_buffers()}
    norm(L.exp_map_origin(torch.zeros(0, 3, 3, N)))
    for name, value in norm.named_buffers():
        assert torch.equal(value, before[name])
    norm.eval()
    assert norm(L.exp_map_origin(torch.randn(2, 3, 3, N))).a.isfinite().all()


def test_case_52_empty_context_gives_the_origin():
    for backend in ("auto", "dense"):
        layer = L.PolarMultiheadAttention(N, 2, backend=backend)
        x = L.exp_map_origin(torch.randn(2, 3, N))
        out = layer(x, L.exp_map_origin(torch.zeros(2, 0, N)))
        assert (out.a == 0).all()
        assert (out.u == 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: (L.PatchEmbedding(3, 2, N), torch.zeros(0, 3, 4, 4)),
        lambda: (L.PolarUNet(channels=(2, 4)), torch.zeros(0, 3, 8, 8)),
        lambda: (
            L.PolarViT.tiny(5, 8, width=12, depth=1, num_heads=2, mlp_width=8),
            torch.zeros(0, 3, 8, 8),
        ),
    ],
    ids=["patches", "unet", "vit"],
)
def test_case_52_models_take_no_image(make):
    model, images = make()
    check_backward(model, model(images), images)


@pytest.mark.parametrize("name", MAKERS)
def test_origins_are_finite_in_value_and_gradient(name):
    made = MAKERS[name]()
    leaf = torch.zeros(2, 3, N)
    leaf[0, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    leaf.requires_grad_()
    check_backward(made, made(L.exp_map_origin(leaf)), leaf, name)


@pytest.mark.parametrize("name", MAKERS)
def test_a_float64_radius_beside_a_float32_direction(name):
    """Both are brought to float64, in words never of torch's own."""
    if name.endswith("_attention"):
        return  # they take score coordinates, which have one dtype already
    x = L.exp_map_origin(torch.randn(2, 3, N))
    for part in parts(MAKERS[name]()((x.a.double(), x.u))):
        assert part.isfinite().all()


@pytest.mark.parametrize("name", MAKERS)
def test_integers_are_no_points(name):
    if name == "origin_like":
        return
    with pytest.raises(TypeError, match="float"):
        MAKERS[name]()((torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, N, dtype=torch.long)))


@pytest.mark.parametrize("radius", [29.0, 42.9, 44.0, 90.0, 1000.0])
@pytest.mark.parametrize("name", MAKERS)
def test_case_58_radii_beyond_the_limits_are_finite_in_value_and_gradient(name, radius):
    if name == "gradient_from_ambient":
        return  # its argument is itself a product that leaves the range
    a = torch.full((2, 3), radius, requires_grad=True)
    u = torch.nn.functional.normalize(torch.randn(2, 3, N), dim=-1).requires_grad_()
    made = MAKERS[name]()
    result = made((a, u))
    assert all(part.isfinite().all() for part in parts(result))
    check_backward(made, result, a, name)
    assert u.grad is None or u.grad.isfinite().all()


@pytest.mark.parametrize("b", [42.0, 44.0, 300.0])
def test_case_58_distances_and_logits_have_no_radius_limit(b):
    v = torch.tensor([1.0, 0.0, 0.0])
    origin = torch.zeros(3, requires_grad=True)
    far = torch.tensor(b), v
    L.squared_distance((torch.tensor(0.0), origin), far).backward()
    assert torch.allclose(origin.grad, -2.0 * b * v)
    assert L.distance(far, far) == 0
    a = torch.tensor([b], requires_grad=True)
    u = torch.nn.functional.normalize(torch.tensor([[3.0, 4.0, 1.0]]), dim=-1)
    z, s = torch.eye(3), torch.tensor([0.0, 1.0, -2.0])
    logits = L.mlr_logits((a, u), z, s)
    double = L.mlr_logits((a.detach().double(), u.double()), z.double(), s.double())
    assert torch.allclose(logits.double(), double, rtol=1e-6)
    logits.sum().backward()
    assert torch.allclose(a.grad, torch.tensor([3.0]))


def test_case_58_pairwise_distances_have_a_limit_that_passes_gradients():
    v = torch.tensor([[1.0, 0.0, 0.0]])
    a = torch.tensor([60.0], requires_grad=True)
    d = L.pairwise_distance((a, v), (torch.tensor([3.0]), v))
    assert d.item() == pytest.approx(L.radius_limit(torch.float32) - 3.0)
    d.sum().backward()
    assert a.grad.item() == pytest.approx(1.0)


# --- 57: stored directions have length 1 up to rounding only -------------------------------------


def test_case_57_logarithm_of_a_near_point_is_tangent():
    u = torch.nn.functional.normalize(torch.randn(200, N), dim=-1)
    w = torch.nn.functional.normalize(torch.randn(200, N), dim=-1)
    v = torch.nn.functional.normalize(u.double() + 1e-6 * w.double(), dim=-1).float()
    a = torch.full((200,), 3.0)
    tangent = L.log_map((a, u), (a, v)).perpendicular
    inward = (tangent.double() * u.double()).sum(-1).abs() / tangent.norm(dim=-1).clamp(min=1e-12)
    assert inward.max() < 1e-5


@pytest.mark.parametrize(("radius", "bound"), [(8.0, 2e-6), (12.0, 4e-5)])
def test_case_57_centring_far_out(radius, bound):
    """Stored directions are made exactly unit in float64 before the same formula: the oracle."""
    centre = torch.full((64,), radius), torch.nn.functional.normalize(torch.randn(1, 16), dim=-1)
    spread = L.exp_map_origin(0.25 * torch.randn(64, 16))
    x = L.gyro_add((centre[0], centre[1].expand(64, -1)), spread)
    mean = L.centroid(x)

    def exact(p):
        return p[0].double(), torch.nn.functional.normalize(p[1].double(), dim=-1)

    ours = L.gyro_add(L.gyro_negate(mean), x)
    true = L.gyro_add(L.gyro_negate(exact(mean)), exact(x))
    assert L.distance(exact(ours), true).median() < bound
