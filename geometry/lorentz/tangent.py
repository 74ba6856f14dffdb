"""Tangent vectors in the polar frame: conversions, inner product, projection (Eq. 13–15)."""

from __future__ import annotations

import torch
from torch import Tensor

from .distance import half_squared_chord
from .point import (
    PointLike,
    Tangent,
    TangentLike,
    check_curvature,
    column,
    is_origin,
    promote,
    square_root,
)

__all__ = [
    "gradient_from_ambient",
    "gradient_from_polar",
    "inner",
    "perpendicular_part",
    "tangent_from_ambient",
    "tangent_norm",
    "tangent_to_ambient",
]


def perpendicular_part(u: Tensor, v: Tensor) -> Tensor:
    """v − (u·v) u for unit vectors (or zero vectors), from differences.

    With e = v − u it is e + ½‖e‖² u; behind the equator, with f = u + v, it is f − ½‖f‖² u.
    """
    behind = ((u * v).sum(-1) < 0).unsqueeze(-1)
    sign = torch.where(behind, 1.0, -1.0)
    e = v + sign * u
    return e - (sign * 0.5) * (e * e).sum(-1, keepdim=True) * u


def _without_component(x: Tensor, u: Tensor) -> Tensor:
    return x - (x * u).sum(-1, keepdim=True) * u


def inner(x: PointLike, first: TangentLike, second: TangentLike) -> Tensor:
    """Riemannian inner product ξ_r ζ_r + ξ_⊥ · ζ_⊥ of shape (…) (Eq. 14): a plain sum."""
    _, first, second = promote(x, first, second)
    return first[0] * second[0] + (first[1] * second[1]).sum(-1)


def tangent_norm(x: PointLike, tangent: TangentLike) -> Tensor:
    """Length of tangent vectors (…); the zero vector has length 0 and gradient 0."""
    squared = inner(x, tangent, tangent)
    nonzero = squared > 0
    return torch.where(nonzero, torch.sqrt(torch.where(nonzero, squared, 1.0)), 0.0)


def tangent_from_ambient(x: PointLike, ambient: Tensor) -> Tangent:
    """Frame components of tangent vectors with ambient coordinates (…, 1 + n) (Eq. 13)."""
    ((a, u),) = promote(x)
    space = ambient[..., 1:].to(u.dtype)
    along = (space * u).sum(-1)
    return Tangent(along / torch.cosh(a), space - along.unsqueeze(-1) * u)


def tangent_to_ambient(x: PointLike, tangent: TangentLike) -> Tensor:
    """Ambient coordinates (…, 1 + n) of ξ_r (sinh a, cosh a u) + (0, ξ_⊥)."""
    (a, u), (radial, perpendicular) = promote(x, tangent)
    time = radial * torch.sinh(a)
    space = (radial * torch.cosh(a)).unsqueeze(-1) * u + perpendicular
    return torch.cat([time.unsqueeze(-1), space], -1)


def gradient_from_ambient(x: PointLike, gradient: Tensor) -> Tangent:
    """Riemannian gradient from the Euclidean gradient (…, 1 + n) by ambient coordinates (Eq. 15).

    Projects the Minkowski-raised gradient onto the tangent space; no division, no cancellation.
    """
    ((a, u),) = promote(x)
    gradient = gradient.to(u.dtype)
    along = (gradient[..., 1:] * u).sum(-1)
    origin = is_origin(a, u)
    radial = gradient[..., 0] * torch.sinh(a) + along * torch.cosh(a)
    return Tangent(torch.where(origin, 0.0, radial), _without_component(gradient[..., 1:], u))


def gradient_from_polar(
    x: PointLike, by_a: Tensor, by_u: Tensor, *, k: float | Tensor = 1.0
) -> Tangent:
    """Riemannian gradient from the gradients by a (…) and u (…, n) that autograd leaves.

    ξ_r = ∂a/√k and ξ_⊥ = (∂u − (∂u·u) u)/(√k sinh a). At the origin ∂u stands for the gradient by
    the space coordinates (in units of √k), so ξ_⊥ = ∂u/√k there.
    """
    (a, u), (by_a, by_u) = promote(x, (by_a, by_u))
    root = square_root(check_curvature(k, a))
    origin = is_origin(a, u)
    # a = 0 with u ≠ 0 is no stored origin: its direction means nothing and gets no gradient.
    scale = torch.where(origin, 1.0, torch.sinh(a))
    perpendicular = (
        _without_component(by_u, u) / torch.where(scale > 0, scale, torch.inf)[..., None]
    )
    return Tangent(torch.where(origin, 0.0, by_a) / root, perpendicular / column(root))


def cosines(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """1 − cos θ and 1 + cos θ of directions (…, n), each from the small difference."""
    apart, behind = half_squared_chord(u, v), half_squared_chord(u, -v)
    # At coincidence the derivative of the chord is 0 whatever arrives: also an overflow.
    return torch.where(apart > 0, apart, 0.0), torch.where(behind > 0, behind, 0.0)
