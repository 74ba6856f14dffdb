"""The `Lorentz` object on ambient tensors: identities, geoopt where it is installed, the example."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import rpt.geometry.lorentz as L
import torch

CURVATURES = [0.3, 1.0, 2.7]
DOUBLE = torch.float64


def sample(manifold, *shape):
    return manifold.random_normal(*shape, dtype=DOUBLE)


def minkowski(x, y):
    return (x[..., 1:] * y[..., 1:]).sum(-1) - x[..., 0] * y[..., 0]


@pytest.mark.parametrize("k", CURVATURES)
def test_points_and_maps_belong_together(k):
    m = L.Lorentz(k)
    x, y = sample(m, 7, 5), sample(m, 7, 5)
    assert torch.allclose(minkowski(x, x), torch.full((7,), -k, dtype=DOUBLE))
    expected = math.sqrt(k) * torch.acosh(-minkowski(x, y) / k)
    assert torch.allclose(m.dist(x, y), expected)
    assert torch.allclose(m.pairwise_dist(x, y).diagonal(), expected)
    assert torch.allclose(m.dist0(x), m.dist(m.origin(7, 5, dtype=DOUBLE), x))
    u = m.logmap(x, y)
    assert torch.allclose(minkowski(x, u), torch.zeros(7, dtype=DOUBLE), atol=1e-9)
    assert torch.allclose(m.norm(x, u), expected)
    assert torch.allclose(m.expmap(x, u), y)
    assert torch.allclose(m.expmap0(m.logmap0(x)), x)
    assert torch.allclose(m.from_polar(m.to_polar(x)), x)
    assert torch.allclose(m.projx(torch.cat([x[..., :1] + 1.0, x[..., 1:]], -1)), x)
    v = m.proju(x, torch.randn(7, 5, dtype=DOUBLE))
    assert torch.allclose(minkowski(x, v), torch.zeros(7, dtype=DOUBLE), atol=1e-9)
    assert torch.allclose(m.proju(x, v), v)
    assert torch.allclose(m.inner(x, u, v), minkowski(u, v))
    moved = m.ptransp(x, y, v)
    assert torch.allclose(m.norm(y, moved), m.norm(x, v))
    assert torch.allclose(m.transp(y, x, moved), v)
    back = m.transp0(y, m.transp0back(y, moved))
    assert torch.allclose(back, moved)
    assert m.dist(x, y, keepdim=True).shape == (7, 1)


@pytest.mark.parametrize("k", CURVATURES)
def test_poincare_coordinates(k):
    m = L.Lorentz(k)
    x = sample(m, 7, 5)
    p = m.to_poincare(x)
    assert torch.allclose(p, math.sqrt(k) * x[:, 1:] / (x[:, :1] + math.sqrt(k)))
    assert torch.allclose(m.from_poincare(p), x)
    # Far out the ball's numbers end; they stay inside it, and finite.
    far = L.to_poincare((torch.tensor([40.0]), torch.tensor([[0.6, 0.8]])), k=k)
    assert far.norm() < math.sqrt(k)
    assert L.from_poincare(torch.tensor([2.0, 0.0])).a.isfinite()
    # At the origin the Jacobian of the space coordinates is twice the identity.
    zero = torch.zeros(3, dtype=DOUBLE, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda q: m.from_poincare(q)[1:], zero)
    assert torch.allclose(jacobian, 2.0 * torch.eye(3, dtype=DOUBLE))
    round_trip = torch.autograd.functional.jacobian(
        lambda q: m.to_poincare(m.from_poincare(q)), zero
    )
    assert torch.allclose(round_trip, torch.eye(3, dtype=DOUBLE))
    with pytest.raises(TypeError, match="floating"):
        L.from_poincare(torch.ones(3, dtype=torch.long))


def test_k_is_learned_shared_and_saved_with_an_embedding():
    m = L.Lorentz(2.0, learnable=True)
    table = m.embedding(5, 3, std=1.0)
    assert table.curvature is m.curvature
    x = m.from_polar(table(torch.arange(5)))
    m.dist0(x).sum().backward()
    assert m.curvature.log_k.grad is not None
    fixed = L.Lorentz(2.0).embedding(5, 3)
    with pytest.raises(RuntimeError, match="k = 2"):
        L.Lorentz(1.0).embedding(5, 3).load_state_dict(fixed.state_dict())
    for k in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="positive"):
            L.Lorentz(k)


def test_a_parameter_steps_on_the_manifold():
    m = L.Lorentz(1.5)
    points = m.parameter(sample(m, 6, 4))
    target = sample(m, 6, 4)
    optimizer = L.RiemannianAdamW([points], lr=0.1, weight_decay=0.0)

    def loss():
        return L.distance(L.unpack(points), m.to_polar(target), k=m.k).sum()

    before = loss().item()
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.2 * before
    x = m.from_polar(L.unpack(points.detach()))
    assert torch.allclose(minkowski(x, x), torch.full((6,), -1.5, dtype=DOUBLE))


@pytest.mark.parametrize("k", CURVATURES)
def test_methods_agree_with_geoopt(k):
    geoopt = pytest.importorskip("geoopt")
    theirs, m = geoopt.Lorentz(torch.tensor(k, dtype=DOUBLE)), L.Lorentz(k)
    x, y = sample(m, 7, 5), sample(m, 7, 5)
    v = m.proju(x, torch.randn(7, 5, dtype=DOUBLE))
    raw = torch.randn(7, 5, dtype=DOUBLE)
    ours = {
        "dist": (m.dist(x, y), theirs.dist(x, y)),
        "dist0": (m.dist0(x), theirs.dist0(x)),
        "inner": (m.inner(x, v), theirs.inner(x, v).squeeze(-1)),
        "logmap": (m.logmap(x, y), theirs.logmap(x, y)),
        "expmap": (m.expmap(x, v), theirs.expmap(x, v, norm_tan=False)),
        "expmap0": (m.expmap0(m.logmap0(x)), theirs.expmap0(theirs.logmap0(x))),
        "logmap0": (m.logmap0(x), theirs.logmap0(x)),
        "proju": (m.proju(x, raw), theirs.proju(x, raw)),
        "projx": (m.projx(raw), theirs.projx(raw)),
        "transp": (m.transp(x, y, v), theirs.transp(x, y, v)),
        "egrad2rgrad": (m.egrad2rgrad(x, raw), theirs.egrad2rgrad(x, raw)),
        "origin": (m.origin(2, 5, dtype=DOUBLE), theirs.origin(2, 5, dtype=DOUBLE)),
    }
    for name, (own, other) in ours.items():
        assert torch.allclose(own.reshape(other.shape), other, atol=1e-6), name


def test_tree_example_measures_what_it_says(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "examples"))
    example = importlib.import_module("tree_embedding")
    parents, tree = example.balanced_tree(2, 2)
    assert parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert tree[3].tolist() == [2, 1, 3, 0, 2, 4, 4]
    assert torch.equal(tree, tree.T)
    assert example.mean_average_precision(tree, tree) == 1.0
    assert example.distortion(2.0 * tree, tree) == pytest.approx(1.0)
    # Neighbours farthest of all: the precision is theirs among everything nearer.
    assert example.mean_average_precision(5.0 - tree, tree) < 0.6
    path = tmp_path / "picture.png"
    command = ["tree", "--branching", "2", "--quick", "--steps", "60", "--edge", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(path)])
    example.main()
    assert "MAP" in capsys.readouterr().out
    assert path.exists()
