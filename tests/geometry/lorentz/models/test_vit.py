"""Polar-ViT and its two baselines: the twin in ambient arithmetic is the oracle, in float64."""

import dataclasses

import pytest
import rpt.geometry.lorentz as lorentz
import torch
from baselines import AmbientViT, EuclideanViT, TextbookViT
from rpt.geometry.lorentz.layers.radius import make_radius_rule
from rpt.observers.protocol import declared_sites
from torch import nn

import rpt

SMALL = {"patch_size": 4, "width": 24, "depth": 2, "num_heads": 2, "mlp_width": 32}
MODELS = [lorentz.PolarViT, AmbientViT, EuclideanViT]


def small(model=lorentz.PolarViT, **options):
    return model(lorentz.ViTConfig(5, 8, **{**SMALL, **options}))


def shaken(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def test_parameter_counts_are_the_papers():
    """2.9 M and 21.7 M, which are counts without the classifier (App. D.4)."""
    with torch.device("meta"):
        for model in MODELS:
            tiny = model.tiny(1000, 224, patch_size=16)
            assert round(tiny.num_parameters(head=False) / 1e6, 1) == 2.9
            ours = model.small(1000, 224).num_parameters(head=False)
            assert abs(ours / 21.7e6 - 1) < 0.01
        polar = lorentz.PolarViT.base(100, 32)
        flat = EuclideanViT.base(100, 32)
        assert abs(polar.num_parameters() / flat.num_parameters() - 1) < 0.01
        assert polar.config.depth == 12
        assert polar.config.mlp_width == 3072


COMBINATIONS = [
    {},
    {"k": 2.7, "residual": "gyro", "encoding_scheme": "paper"},
    {"k": 0.3, "residual": "space", "norm": "space", "encoding": None, "head": "linear"},
    {"k": 1.3, "readout": "class_token", "encoding": "boost", "position_table": "sine_cosine"},
    {"residual": "space", "readout": "class_token", "position_table": None},
    *({"residual": "gyro", "radius": rule} for rule in lorentz.RADIUS_RULES if rule != "anchored"),
    {"radius_std": 0.2, "learnable_curvature": True, "k": 1.5},
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: ",".join(map(str, o.values())))
def test_polar_and_ambient_arithmetic_agree_in_double_precision(options):
    """The paper's own check (App. E.5), for every component, with gradients."""
    polar = shaken(small(**options).double())
    twin = small(AmbientViT, **options).double()
    twin.load_state_dict(polar.state_dict())
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    ours, theirs = polar(images), twin(images)
    assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)
    weights = torch.randn_like(ours)
    gradients = torch.autograd.grad((ours * weights).sum(), list(polar.parameters()))
    expected = torch.autograd.grad((theirs * weights).sum(), list(twin.parameters()))
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-9)


def test_without_clamps_the_twin_is_the_same_near_and_not_finite_far():
    images = torch.randn(64, 3, 8, 8)
    polar = small()
    near, far = small(AmbientViT), small(TextbookViT)
    for target, finite in ((1.0, True), (18.0, False)):
        lorentz.calibrate_(polar, images, target_radius=target)
        for twin in (near, far):
            twin.load_state_dict(polar.state_dict())
        assert near(images).isfinite().all()
        assert bool(far(images).isfinite().all()) is finite
        if finite:
            assert torch.allclose(far(images), near(images), atol=1e-4)


def test_every_ablation_row_is_a_model_of_its_own():
    outputs = []
    images = torch.randn(2, 3, 8, 8)
    for arithmetic, options in lorentz.ABLATION.values():
        torch.manual_seed(0)
        model = small(lorentz.PolarViT if arithmetic == "polar" else AmbientViT, **options)
        outputs.append(shaken(model)(images))
    for options in lorentz.RADIUS_ABLATION.values():
        torch.manual_seed(0)
        outputs.append(shaken(small(**options))(images))
    assert all(torch.isfinite(out).all() for out in outputs)
    # The full model appears in both tables; every other row is another function.
    assert len({round(float(out.detach().abs().sum()), 5) for out in outputs}) == len(outputs) - 1


@pytest.mark.parametrize("name", ["sigmoid", "bounded"])
def test_bounded_radius_rules_are_bounded(name):
    rule = make_radius_rule(name, 3)
    far = torch.tensor([60.0])
    u = torch.tensor([[1.0, 0.0, 0.0]])
    radius = torch.asinh(rule(far, far, u, u).exp())
    assert radius < 4.001 if name == "bounded" else radius < 3.1  # arcosh(1 + 10)
    with pytest.raises(ValueError, match="one of"):
        make_radius_rule("cap", 3)


def test_twins_calibrate_to_the_same_radii():
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    polar = small().double()
    twin = small(AmbientViT).double()
    twin.load_state_dict(polar.state_dict())
    lorentz.calibrate_(polar, images, 1.5)
    lorentz.calibrate_(twin, images, 1.5)
    for name, ours in polar.state_dict().items():
        assert torch.allclose(ours.double(), twin.state_dict()[name].double(), atol=1e-12), name
    first = polar.patch_embedding(images)
    log_radius = torch.sinh(first.a).log().mean()
    assert float(log_radius) == pytest.approx(float(torch.tensor(1.5).sinh().log()), abs=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_files_new_heads_and_checkpointing(model, tmp_path):
    torch.manual_seed(0)
    original = shaken(small(model))
    images = torch.randn(2, 3, 8, 8)
    original.save(tmp_path / "model.pt")
    again = model.load(tmp_path / "model.pt")
    assert again.config == original.config
    assert torch.equal(again(images), original(images))

    def gradients():
        original.zero_grad()
        original(images).square().sum().backward()
        return [p.grad.clone() for p in original.parameters()]

    plain = gradients()
    original.gradient_checkpointing = True
    for ours, theirs in zip(gradients(), plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    features = again.features(images)
    again.reset_head(7)
    assert again(images).shape == (2, 7)
    assert again.config.num_classes == 7
    same = again.features(images)
    pairs = [(same, features)] if isinstance(same, torch.Tensor) else zip(same, features)  # noqa: B905
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("model", MODELS)
def test_fine_tuning_a_frozen_body_moves_the_head_alone(model):
    net = small(model).reset_head(3)
    for p in net.parameters():
        p.requires_grad_(False)
    for p in net.head.parameters():
        p.requires_grad_(True)
    nn.functional.cross_entropy(net(torch.randn(3, 3, 8, 8)), torch.tensor([0, 1, 2])).backward()
    assert all((p.grad is not None) == p.requires_grad for p in net.parameters())


def test_sites_of_whole_models():
    polar, flat = small(), small(EuclideanViT)
    assert len(declared_sites(polar)) == 1 + 6 * SMALL["depth"]
    assert len(declared_sites(flat)) == 2 * SMALL["depth"]
    assert declared_sites(small(AmbientViT))[0].__class__ is type(declared_sites(polar)[0])
    undecayed = {id(p) for p in lorentz.parameter_groups(polar, 0.1)[1]["params"]}
    names = {n.rsplit(".", 1)[-1] for n, p in polar.named_parameters() if id(p) in undecayed}
    assert names == {"table", "log_gain", "bias", "log_temperature", "rate", "alpha"}


@pytest.mark.parametrize(("optimizer_name", "bf16"), [("RiemannianAdamW", True), ("RPT", False)])
def test_polar_vit_learns(optimizer_name, bf16):
    torch.manual_seed(0)
    model = small()
    images = torch.randn(16, 3, 8, 8)
    labels = torch.arange(16) % 5
    lorentz.calibrate_(model, images)
    groups = lorentz.parameter_groups(model, 0.05)
    if optimizer_name == "RPT":
        optimizer = rpt.ResidualPolarTransport(groups, lr=1e-2)
        optimizer.attach_model(model)
    else:
        optimizer = lorentz.RiemannianAdamW(groups, lr=1e-2)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]


def test_float32_far_out_follows_float64():
    """At radius 9 ambient arithmetic is noise; polar arithmetic is as good as its inputs."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    polar = small(residual="gyro").double()
    lorentz.calibrate_(polar, images, 9.0)
    exact = polar(images)
    single = small(residual="gyro")
    twin = small(AmbientViT, residual="gyro")
    for model in (single, twin):
        model.load_state_dict(polar.state_dict())
    scale = exact.abs().max()
    ours = (single(images.float()) - exact).abs().max() / scale
    theirs = (twin(images.float()) - exact).abs().max() / scale
    assert ours < 0.02
    assert not theirs < 10 * ours


def test_configurations_and_images_that_do_not_fit():
    for bad in ({"norm": "batch"}, {"residual": "sum"}, {"readout": "max"}, {"radius": "cap"}):
        with pytest.raises(ValueError, match="must be one of"):
            small(**bad)
    with pytest.raises(ValueError, match="tile"):
        small(patch_size=3)
    with pytest.raises(ValueError, match="divide"):
        small(num_heads=5)
    with pytest.raises(ValueError, match="at least 1"):
        small(depth=0)
    with pytest.raises(ValueError, match="size must be"):
        lorentz.PolarViT.sized("huge", 10, 32)
    for model in MODELS:
        with pytest.raises(ValueError, match=r"batch, 3, 8, 8"):
            small(model)(torch.randn(2, 3, 8, 12))
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().config.width = 3


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_blocks_compile_in_one_graph(model):
    torch.manual_seed(0)
    net = small(model)
    images = torch.randn(2, 3, 8, 8)
    expected = net(images)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    for block in net.blocks:
        block.compile(fullgraph=True)
    ours = net(images)
    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)
    ours.square().sum().backward()
    for p, gradient in zip(net.parameters(), gradients, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-3, atol=1e-4)
