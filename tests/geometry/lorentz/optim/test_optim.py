"""Manifold parameters: the rule, RiemannianAdamW, RPT on a Lorentz model, copies and checkpoints."""

import copy
import io
import math
import pickle

import pytest
import rpt.geometry.lorentz as lorentz
import torch
from baselines.ambient import ambient_decay
from lorentz_oracle import AmbientOracle
from rpt.geometry.lorentz.optim.riemannian import Manifold, manifold_of, riemannian_adamw_update
from torch import nn

import rpt


def table(count=6, n=3, k=1.0, scale=1.0, dtype=torch.float64, decay="centroid"):
    manifold = lorentz.LorentzManifold(k, decay=decay)
    v = scale * torch.randn(count, n, dtype=dtype)
    return lorentz.LorentzParameter(lorentz.pack(lorentz.exp_map_origin(v, k=k)), manifold)


# --- the manifold object ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0.3, 1.0, 2.7])
def test_riemannian_gradient_of_half_squared_distance_is_minus_the_log(k):
    p = table(k=k)
    with torch.no_grad():
        p[2] = 0.0
    y = lorentz.exp_map_origin(torch.randn(6, 3, dtype=torch.float64), k=k)
    loss = 0.5 * lorentz.squared_distance(lorentz.unpack(p), y, k=k).sum()
    (gradient,) = torch.autograd.grad(loss, p)
    tangent = lorentz.unpack(p.manifold.riemannian_gradient(p.detach(), gradient))
    expected = lorentz.log_map(lorentz.unpack(p.detach()), y, k=k)
    assert torch.allclose(tangent.a, -expected.radial, atol=1e-12)
    assert torch.allclose(tangent.u, -expected.perpendicular, atol=1e-12)


def test_lorentz_manifold_is_a_manifold():
    p = table()
    manifold = manifold_of(p)
    assert isinstance(manifold, Manifold)
    tangent = manifold.riemannian_gradient(p.detach(), torch.randn_like(p))
    moved = manifold.retract(p.detach(), tangent)
    assert moved.shape == p.shape
    assert torch.allclose(moved[:, 1:].norm(dim=-1), torch.ones(6, dtype=torch.float64))
    length = lorentz.distance(lorentz.unpack(p.detach()), lorentz.unpack(moved)).square()
    assert torch.allclose(length, manifold.squared_norm(p.detach(), tangent))
    carried = manifold.transport(p.detach(), tangent, moved)
    assert torch.allclose(
        manifold.squared_norm(moved, carried), manifold.squared_norm(p.detach(), tangent)
    )
    assert manifold.squared_norm(p.detach(), tangent).shape == p.shape[:-1]
    for bad in ({"k": 0.0}, {"decay": "none"}):
        with pytest.raises(ValueError, match="must be"):
            lorentz.LorentzManifold(**bad)


def test_decay_is_the_centroid_with_the_origin():
    """Radius 8, w = 1e-5: 7.985. The ambient float32 step moves outward."""
    oracle, w = AmbientOracle(1.0), 1e-5
    for a in (0.0, 1e-3, 1.0, 8.0, 12.0, 17.0, 40.0):
        for dtype in (torch.float64, torch.float32):
            point = torch.tensor([[a, 1.0 if a else 0.0, 0.0]], dtype=dtype)
            new = lorentz.LorentzManifold().decay(point, w)
            ends = [oracle.point(a, point[0, 1:]), oracle.point(0.0, [0.0, 0.0])]
            exact = float(oracle.radius(oracle.centroid(ends, [1 - oracle.number(w), w])))
            tolerance = 8 * torch.finfo(dtype).eps * (1 + a)
            assert float(new[0, 0]) == pytest.approx(exact, abs=tolerance)
            assert float(new[0, 0]) <= a
    eight = torch.tensor([[8.0, 1.0, 0.0]])
    assert float(lorentz.LorentzManifold().decay(eight, w)[0, 0]) == pytest.approx(7.985, abs=1e-3)
    ambient = ambient_decay(lorentz.to_ambient(lorentz.unpack(eight)), w)
    assert abs(float(lorentz.from_ambient(ambient).a) - 7.985) > 0.1
    geodesic = lorentz.LorentzManifold(decay="geodesic").decay(eight, 0.25)
    assert float(geodesic[0, 0]) == 6.0
    whole = lorentz.LorentzManifold().decay(eight, torch.tensor(0.0))
    assert torch.equal(whole, eight)


def test_update_moves_by_the_learning_rate_along_the_gradient():
    p = table(scale=2.0)
    gradient = torch.randn_like(p)
    zeros = torch.zeros_like(p.detach())
    moved = riemannian_adamw_update(
        p.manifold, p.detach(), gradient, zeros, zeros[:, 0], 1, lr=0.01, eps=0.0
    )
    steps = lorentz.distance(lorentz.unpack(p.detach()), lorentz.unpack(moved.point))
    assert torch.allclose(steps, torch.full_like(steps, 0.01))
    direction = lorentz.log_map(lorentz.unpack(p.detach()), lorentz.unpack(moved.point))
    tangent = lorentz.unpack(p.manifold.riemannian_gradient(p.detach(), gradient))
    product = lorentz.inner(lorentz.unpack(p.detach()), direction, tangent)
    norms = p.manifold.squared_norm(p.detach(), lorentz.pack(tangent)).sqrt()
    assert torch.allclose(product, -0.01 * norms)


def test_momentum_is_transported_after_decay_and_step():
    """With two moves, decay then retraction, the momentum's length stays what it was."""
    p = table(scale=3.0)
    exp_avg = p.manifold.riemannian_gradient(p.detach(), torch.randn_like(p))
    sq = torch.full((6,), 0.5, dtype=torch.float64)
    moved = riemannian_adamw_update(
        p.manifold,
        p.detach(),
        torch.zeros_like(p),
        exp_avg,
        sq,
        5,
        lr=0.3,
        weight_decay=0.5,
    )
    before = p.manifold.squared_norm(p.detach(), exp_avg)
    after = p.manifold.squared_norm(moved.point, moved.exp_avg)
    assert torch.allclose(after, 0.81 * before)
    across = (moved.exp_avg[:, 1:] * moved.point[:, 1:]).sum(-1)
    assert torch.allclose(across, torch.zeros_like(across), atol=1e-12)


# --- RiemannianAdamW ----------------------------------------------------------------------------


def test_euclidean_parameters_take_exactly_adamw():
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    embedding = lorentz.LorentzEmbedding(3, 4)
    options = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
    first = lorentz.RiemannianAdamW([*ours.parameters(), *embedding.parameters()], **options)
    second = torch.optim.AdamW(theirs.parameters(), **options)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in (first, second)]
    calls = []
    first.register_step_pre_hook(lambda *_: calls.append(1))
    for _ in range(8):
        x = torch.randn(6, 4)
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if model is ours:
                lorentz.distance_to_origin(embedding(torch.arange(3))).sum().backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in second.state[q].items():
            assert torch.equal(first.state[p][name], value)
    assert len(calls) == 8
    assert embedding.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_reach_far_targets_in_either_precision(dtype):
    """Embedding points at radius 12 by distances alone, unclipped, in float32."""
    torch.manual_seed(0)
    v = torch.randn(5, 3, dtype=dtype)
    target = lorentz.exp_map_origin(12.0 * v / v.norm(dim=-1, keepdim=True))
    points = table(5, 3, scale=0.1, dtype=dtype)
    optimizer = lorentz.RiemannianAdamW([points], lr=0.3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        optimizer.zero_grad()
        lorentz.squared_distance(lorentz.unpack(points), target).sum().backward()
        optimizer.step()
        schedule.step()
    assert lorentz.distance(lorentz.unpack(points.detach()), target).max() < 0.2


def test_points_leave_the_origin():
    points = lorentz.LorentzParameter(torch.zeros(2, 4), lorentz.LorentzManifold())
    optimizer = lorentz.RiemannianAdamW([points], lr=0.1)
    target = lorentz.exp_map_origin(torch.tensor([[0.5, 0, 0], [0, -1.0, 0]]))
    for _ in range(60):
        optimizer.zero_grad()
        lorentz.squared_distance(lorentz.unpack(points), target).sum().backward()
        optimizer.step()
    assert lorentz.distance(lorentz.unpack(points.detach()), target).max() < 0.1


def test_closure_maximize_and_refusals():
    points = table(2, 3)
    optimizer = lorentz.RiemannianAdamW([points], lr=0.1, maximize=True, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = lorentz.distance_to_origin(lorentz.unpack(points)).sum()
        loss.backward()
        return loss

    before = optimizer.step(closure)
    assert lorentz.distance_to_origin(lorentz.unpack(points)).sum() > before
    with pytest.raises(ValueError, match="amsgrad"):
        lorentz.RiemannianAdamW([points], amsgrad=True)
    points.grad = torch.eye(2, 4, dtype=torch.float64).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match="learning rate"):
        lorentz.RiemannianAdamW([points], lr=-1.0)


def test_parameter_groups_spare_scales_and_rates():
    model = nn.ModuleList(
        [
            lorentz.PolarMultiheadAttention(
                8, 2, position=lorentz.HorosphericalEncoding(2, 5), k=lorentz.Curvature(1.0)
            ),
            lorentz.GyroLayerNorm(8),
            lorentz.BoostResidual(),
            lorentz.LorentzEmbedding(3, 8),
        ]
    )
    decayed, spared = lorentz.parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    names = {id(p): n for n, p in model.named_parameters()}
    left = {names[id(p)].split(".")[-1] for p in spared["params"]}
    assert left == {"rate", "log_temperature", "log_gain", "alpha", "log_k", "bias"}
    kept = {names[id(p)] for p in decayed["params"]}
    assert {"3.weight", "0.query.radius_direction", "0.query.direction.weight"} <= kept
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


# --- copies, checkpoints, averages --------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        curvature = lorentz.Curvature(1.3)
        self.embed = lorentz.LorentzEmbedding(11, 8, k=curvature, padding_idx=0, std=0.5)
        self.attention = lorentz.PolarMultiheadAttention(
            8, 2, k=curvature, position=lorentz.HorosphericalEncoding(2, 6)
        )
        self.norm = lorentz.GyroLayerNorm(8, k=curvature)
        self.residual = lorentz.BoostResidual()
        self.head = lorentz.LorentzMLR(8, 3, k=curvature)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.embed(tokens)
        update = self.attention(self.norm(x, padding), key_padding_mask=padding)
        x = self.residual(x, update, padding)
        return self.head(lorentz.centroid(x, (~padding).float()))


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (32, 6), generator=generator)
    return tokens, (tokens.max(-1).values > 8).long() + (tokens[:, 0] > 5).long()


OPTIMIZERS = {
    "RiemannianAdamW": lambda model: lorentz.RiemannianAdamW(
        lorentz.parameter_groups(model, 1e-2), lr=2e-2
    ),
    "RPT drop_in": lambda model: rpt.ResidualPolarTransport(
        lorentz.parameter_groups(model, 1e-2), lr=1e-2
    ),
    "RPT paper": lambda model: rpt.ResidualPolarTransport(
        lorentz.parameter_groups(model, 1e-2), lr=2e-2, preset="paper"
    ),
}


def train(model, optimizer, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        tokens, labels = batch(step % 4)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_a_model_with_manifold_parameters(name):
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[name](model)
    if name.startswith("RPT"):
        optimizer.attach_model(model)
    losses = train(model, optimizer, 60)
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    weight = model.embed.weight
    assert torch.allclose(weight[1:, 1:].norm(dim=-1), torch.ones(10), atol=1e-5)
    assert (weight[0] == 0).all()
    state = optimizer.state[weight]
    assert state["exp_avg"].shape == weight.shape
    assert state["exp_avg_sq"].shape == weight.shape[:-1]
    if name.startswith("RPT"):
        matrix = optimizer.state[model.attention.query.direction.weight]
        assert 0 < float(matrix["residual_entropy_rank"]) <= 1
        assert float(matrix["polar_weight"]) > 0


def test_rpt_takes_the_riemannian_rule_for_points():
    """The same gradients give the points the same step in RPT and in RiemannianAdamW."""
    first = table(4, 3, dtype=torch.float32)
    second = copy.deepcopy(first)
    options = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours = rpt.ResidualPolarTransport([first], **options)
    theirs = lorentz.RiemannianAdamW([second], **options)
    for _ in range(5):
        gradient = torch.randn(4, 4)
        first.grad, second.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    assert torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints_resume_exactly(name):
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 4)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed = Model()
    resumed.load_state_dict(saved["model"])
    resumed_optimizer = OPTIMIZERS[name](resumed)
    resumed_optimizer.load_state_dict(saved["optimizer"])
    assert train(model, optimizer, 3, 4) == train(resumed, resumed_optimizer, 3, 4)
    assert torch.equal(model.embed.weight, resumed.embed.weight)


def test_copies_keep_the_manifold_and_share_the_curvature():
    model = Model()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        weight = twin.embed.weight
        assert isinstance(weight, lorentz.LorentzParameter)
        assert torch.equal(weight, model.embed.weight)
        assert weight.manifold is not model.embed.weight.manifold
        assert weight.manifold.k is twin.embed.curvature
        assert twin.embed.curvature is twin.attention.curvature
        train(twin, lorentz.RiemannianAdamW(twin.parameters(), lr=1e-2), 2)
        assert not torch.equal(weight, model.embed.weight)
    moved = copy.deepcopy(model).double()
    assert manifold_of(moved.embed.weight) is not None
    assigned = Model()
    assigned.load_state_dict(model.state_dict(), assign=True)
    assert manifold_of(assigned.embed.weight) is not None


def test_averaged_models_keep_the_manifold():
    torch.manual_seed(0)
    model = Model()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = lorentz.RiemannianAdamW(model.parameters(), lr=0.1)
    for step in range(6):
        train(model, optimizer, 1, step)
        average.update_parameters(model)
    weight = average.module.embed.weight
    assert isinstance(weight, lorentz.LorentzParameter)
    assert not torch.allclose(weight[1:, 1:].norm(dim=-1), torch.ones(10), atol=1e-5)
    points = average.module.embed(torch.arange(1, 11))
    assert torch.allclose(points.u.norm(dim=-1), torch.ones(10), atol=1e-5)
    assert average(batch()[0]).isfinite().all()
    train(average.module, lorentz.RiemannianAdamW(average.module.parameters(), lr=0.1), 2)
    assert torch.allclose(weight[1:, 1:].norm(dim=-1), torch.ones(10), atol=1e-5)


def test_embedding_refuses_and_pads():
    with pytest.raises(ValueError, match="padding_idx"):
        lorentz.LorentzEmbedding(4, 3, padding_idx=9)
    embed = lorentz.LorentzEmbedding(4, 3, padding_idx=-1)
    assert (embed(torch.tensor([3])).a == 0).all()
    lorentz.distance_to_origin(embed(torch.arange(4))).sum().backward()
    assert (embed.weight.grad[3] == 0).all()
