"""Ways to compute on the hyperboloid or the ball that `lorentz.py` compares, on points in float64."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import rpt.geometry.lorentz as lorentz
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from baselines import ambient

SINGLE, DOUBLE = torch.float32, torch.float64


def cluster(radius: float, seed: int, count: int = 64, n: int = 16) -> lorentz.Point:
    """Points in float64 at root-mean-square distance 1 from a centre at the given radius."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(n, generator=generator, dtype=DOUBLE)
    v = torch.randn(count, n, generator=generator, dtype=DOUBLE)
    v = v / v.square().sum(-1).mean().sqrt()
    at = lorentz.Point(
        torch.full((count,), radius, dtype=DOUBLE), (centre / centre.norm()).expand(count, n)
    )
    return lorentz.gyro_add(at, lorentz.exp_map_origin(v))


def to_double(x: lorentz.PointLike) -> lorentz.Point:
    """The same point in float64."""
    return lorentz.Point(x[0].double(), x[1].double())


class Library:
    """One way to compute the three operations from float64 points, in float32."""

    def squared_distance(self, x: lorentz.Point, y: lorentz.Point) -> Tensor | None:
        """Squared distances (…)."""
        return None

    def centroid(self, x: lorentz.Point) -> lorentz.Point | None:
        """Equal-weight centroid, as a float64 point."""
        return None

    def centring(self, mean: lorentz.Point, x: lorentz.Point) -> lorentz.Point | None:
        """(⊖mean) ⊕ x, as float64 points."""
        return None


class Polar(Library):
    """This package."""

    def _single(self, x: lorentz.Point) -> lorentz.Point:
        return lorentz.Point(x.a.to(SINGLE), x.u.to(SINGLE))

    def squared_distance(self, x: lorentz.Point, y: lorentz.Point) -> Tensor:
        return lorentz.squared_distance(self._single(x), self._single(y))

    def centroid(self, x: lorentz.Point) -> lorentz.Point:
        return to_double(lorentz.centroid(self._single(x)))

    def centring(self, mean: lorentz.Point, x: lorentz.Point) -> lorentz.Point:
        back = lorentz.gyro_negate(self._single(mean))
        return to_double(lorentz.gyro_add(back, self._single(x)))


class Ambient(Library):
    """Ambient Lorentz coordinates, formulas as published."""

    def _single(self, x: lorentz.Point) -> Tensor:
        return lorentz.to_ambient(x).to(SINGLE)

    def squared_distance(self, x: lorentz.Point, y: lorentz.Point) -> Tensor:
        inner = -ambient.lorentz_inner(self._single(x), self._single(y))
        return torch.acosh(inner).square()

    def centroid(self, x: lorentz.Point) -> lorentz.Point:
        points = self._single(x)
        weights = torch.full(points.shape[:-1], 1.0 / points.shape[-2])
        return lorentz.from_ambient(ambient.ambient_centroid(points, weights).double())

    def centring(self, mean: lorentz.Point, x: lorentz.Point) -> lorentz.Point:
        back = self._single(lorentz.gyro_negate(mean))
        return lorentz.from_ambient(ambient.ambient_gyro_add(back, self._single(x)).double())


def ball(x: lorentz.Point) -> Tensor:
    """Poincaré ball coordinates tanh(a/2) u."""
    return torch.tanh(0.5 * x.a).unsqueeze(-1) * x.u


def from_ball(p: Tensor) -> lorentz.Point:
    """Polar form of ball coordinates; a norm of 1 or more is a point at infinity."""
    norm = p.norm(dim=-1)
    return lorentz.Point(2.0 * torch.atanh(norm), p / norm.unsqueeze(-1))


class GeooptLorentz(Library):
    """geoopt's Lorentz manifold: it has the distance."""

    def __init__(self) -> None:
        import geoopt

        self.manifold = geoopt.manifolds.Lorentz(k=1.0)

    def squared_distance(self, x: lorentz.Point, y: lorentz.Point) -> Tensor:
        first, second = lorentz.to_ambient(x).to(SINGLE), lorentz.to_ambient(y).to(SINGLE)
        return self.manifold.dist(first, second).square()


class GeooptBall(Library):
    """geoopt's Poincaré ball, unprojected inputs."""

    def __init__(self) -> None:
        import geoopt

        self.manifold = geoopt.PoincareBall(c=1.0)

    def squared_distance(self, x: lorentz.Point, y: lorentz.Point) -> Tensor:
        return self.manifold.dist(ball(x).to(SINGLE), ball(y).to(SINGLE)).square()

    def centroid(self, x: lorentz.Point) -> lorentz.Point:
        return from_ball(self.manifold.weighted_midpoint(ball(x).to(SINGLE)).double())

    def centring(self, mean: lorentz.Point, x: lorentz.Point) -> lorentz.Point:
        first, second = ball(mean).to(SINGLE), ball(x).to(SINGLE)
        return from_ball(self.manifold.mobius_add(-first, second).double())


class HypllBall(Library):
    """hypll's Poincaré ball."""

    def __init__(self) -> None:
        from hypll.manifolds.poincare_ball import Curvature, PoincareBall
        from hypll.tensors import ManifoldTensor

        # hypll takes softplus of the value: this one gives curvature 1.
        self.manifold = PoincareBall(Curvature(math.log(math.e - 1.0)))
        self.tensor = ManifoldTensor

    def _single(self, x: lorentz.Point) -> object:
        return self.tensor(ball(x).to(SINGLE), manifold=self.manifold)

    def squared_distance(self, x: lorentz.Point, y: lorentz.Point) -> Tensor:
        shape = torch.broadcast_shapes(x.u.shape, y.u.shape)
        first = lorentz.Point(x.a.expand(shape[:-1]), x.u.expand(shape))
        second = lorentz.Point(y.a.expand(shape[:-1]), y.u.expand(shape))
        return self.manifold.dist(self._single(first), self._single(second)).square()

    def centroid(self, x: lorentz.Point) -> lorentz.Point:
        return from_ball(self.manifold.midpoint(self._single(x)).tensor.double())

    def centring(self, mean: lorentz.Point, x: lorentz.Point) -> lorentz.Point:
        shape = x.u.shape
        back = lorentz.gyro_negate(lorentz.Point(mean.a.expand(shape[:-1]), mean.u.expand(shape)))
        return from_ball(
            self.manifold.mobius_add(self._single(back), self._single(x)).tensor.double()
        )


def libraries() -> dict[str, Library]:
    """Whatever is installed."""
    found: dict[str, Library] = {"polar (ours)": Polar(), "ambient": Ambient()}
    for name, kind in (
        ("geoopt Lorentz", GeooptLorentz),
        ("geoopt ball", GeooptBall),
        ("hypll ball", HypllBall),
    ):
        try:
            found[name] = kind()
        except ImportError:
            print(f"{name}: not installed, left out")
    return found
