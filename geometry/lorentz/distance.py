"""Distances by the hyperbolic law of haversines (Polar-ViT paper, Eq. 5): nothing cancels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .chord import pair_angular
from .point import PointLike, check_curvature, is_origin, promote, radius_limit, square_root
from .scalar import arcosh1p, half_squared_norm, log_sinh, squared_arcosh1p

__all__ = [
    "distance",
    "distance_to_origin",
    "pairwise_cosh_distance_minus_one",
    "pairwise_distance",
    "pairwise_squared_distance",
    "squared_distance",
]


def half_squared_chord(u: Tensor, v: Tensor) -> Tensor:
    """½‖u − v‖² = 1 − cos θ from differences; 1 − u·v loses everything below θ = 1e-4."""
    return half_squared_norm(u - v)


def cosh_distance_minus_one(a: Tensor, u: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """c = cosh D − 1 of points (…) within the radius limit, with gradients at the origin."""
    sinh_a, sinh_b = torch.sinh(a), torch.sinh(b)
    half = torch.sinh(0.5 * (a - b))
    c = 2.0 * half * half + sinh_a * sinh_b * half_squared_chord(u, v)
    # Zero in value: u (or v) is 0 there. It carries the derivative by the space coordinates.
    at_origin = torch.where(is_origin(a, u), sinh_b, torch.where(is_origin(b, v), sinh_a, 0.0))
    return c - at_origin * (u * v).sum(-1)


def _distance_beyond_limit(a: Tensor, u: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """D where sinh a · sinh b would overflow, from ln c."""
    gap = (a - b).abs()
    radial = gap + 2.0 * torch.log(-torch.expm1(-gap.clamp(min=1e-20))) - math.log(2.0)
    chord = half_squared_chord(u, v)
    apart = chord > 0
    log_chord = torch.where(apart, torch.log(torch.where(apart, chord, 1.0)), -1e30)
    angular = (log_sinh(a) + log_sinh(b)).clamp(min=-1e30) + log_chord
    log_c = torch.logaddexp(radial, angular)
    near = arcosh1p(torch.exp(log_c.clamp(max=40.0)))
    return torch.where(log_c < 40.0, near, log_c + math.log(2.0))


def _split_by_limit(x: PointLike, y: PointLike) -> tuple[Tensor, Tensor, Tensor]:
    """c within the limit (elsewhere of limited radii), D beyond it (elsewhere of 1), where."""
    (a, u), (b, v) = promote(x, y)
    limit = radius_limit(a.dtype)
    beyond = (a > limit) | (b > limit)
    c = cosh_distance_minus_one(a.clamp(max=limit), u, b.clamp(max=limit), v)
    far = _distance_beyond_limit(torch.where(beyond, a, 1.0), u, torch.where(beyond, b, 1.0), v)
    return c, far, beyond


def squared_distance(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Squared geodesic distance of points (…) and (…), in units of r².

    Exact to the resolution of the stored points at every radius, also beyond `radius_limit`;
    coincident points have distance exactly 0 and gradient 0. For all pairs of two sets use
    `pairwise_squared_distance`, which needs no (N, M, n) tensor.

    Args:
        x, y: points (a, u) of shapes (…) and (…, n), broadcast against each other. Half precision
            is computed and returned in float32.
        k: the curvature is −1/k; a positive float or a tensor that broadcasts to (…).

    Raises:
        TypeError, ValueError: an argument is no point, the shapes do not belong together, k ≤ 0.
    """
    c, far, beyond = _split_by_limit(x, y)
    return check_curvature(k, c) * torch.where(beyond, far * far, squared_arcosh1p(c))


def distance(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Geodesic distance of points (…) and (…), in units of r; see `squared_distance`.

    The derivative of a distance jumps at coincidence; it is 0 there by choice.
    """
    c, far, beyond = _split_by_limit(x, y)
    return square_root(check_curvature(k, c)) * torch.where(beyond, far, arcosh1p(c))


def distance_to_origin(x: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Radius r = √k a of points (…)."""
    ((a, _),) = promote(x)
    return square_root(check_curvature(k, a)) * a


def pairwise_cosh_distance_minus_one(x: PointLike, y: PointLike) -> Tensor:
    """c = cosh D − 1 of all pairs: (…, N) and (…, M) points give (…, N, M)."""
    (a, u), (b, v) = promote(x, y)
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError("pairwise distances need sets of points: a of shape (…, N), u (…, N, n)")
    limit = radius_limit(a.dtype)
    a, b = a.clamp(max=limit), b.clamp(max=limit)
    half = torch.sinh(0.5 * (a.unsqueeze(-1) - b.unsqueeze(-2)))
    return 2.0 * half * half + pair_angular(torch.sinh(a), u, torch.sinh(b), v)


def pairwise_squared_distance(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Squared distances of all pairs: (…, N) and (…, M) points give (…, N, M).

    Radii are limited to `radius_limit`.
    """
    c = pairwise_cosh_distance_minus_one(x, y)
    return check_curvature(k, c) * squared_arcosh1p(c)


def pairwise_distance(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Distances of all pairs; see `pairwise_squared_distance`."""
    c = pairwise_cosh_distance_minus_one(x, y)
    return square_root(check_curvature(k, c)) * arcosh1p(c)
