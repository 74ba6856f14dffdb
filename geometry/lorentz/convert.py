"""Between polar form, space coordinates and ambient coordinates (Polar-ViT paper, Eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from .point import (
    Point,
    PointLike,
    check_curvature,
    column,
    is_origin,
    promote,
    radius_limit,
    square_root,
)
from .scalar import asinh_of_norm, norm_and_direction

__all__ = ["from_ambient", "from_space", "to_ambient", "to_space"]


def unit_space(a: Tensor, u: Tensor) -> Tensor:
    """sinh(a) u, the space coordinates in units of √k; reads gradients at the origin."""
    a = a.clamp(max=2.0 * radius_limit(a.dtype))
    return (torch.sinh(a) + is_origin(a, u)).unsqueeze(-1) * u


def klein(a: Tensor, u: Tensor) -> Tensor:
    """χ = tanh(a) u, the Klein vector; reads gradients at the origin."""
    return (torch.tanh(a) + is_origin(a, u)).unsqueeze(-1) * u


def klein_row(a: Tensor, u: Tensor) -> Tensor:
    """(1, χ) of shape (…, 1 + n): ambient coordinates over the time coordinate."""
    return torch.cat([torch.ones_like(a).unsqueeze(-1), klein(a, u)], -1)


def from_unit_space(s: Tensor) -> Point:
    """The point whose space coordinates are √k·s, s of shape (…, n)."""
    norm, direction = norm_and_direction(s)
    return Point(asinh_of_norm(norm), direction)


def to_space(x: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Return the space coordinates √k sinh(a) u, of shape (…, n).

    a is limited to twice `radius_limit` (86 in float32), so that the result stays finite.
    """
    ((a, u),) = promote(x)
    return column(square_root(check_curvature(k, a))) * unit_space(a, u)


def from_space(space: Tensor, *, k: float | Tensor = 1.0) -> Point:
    """Return the points with space coordinates (…, n); the zero vector is the origin."""
    if not space.is_floating_point():
        raise TypeError(f"space coordinates must be floating point, got {space.dtype}")
    space = space.to(torch.promote_types(space.dtype, torch.float32))
    return from_unit_space(space / column(square_root(check_curvature(k, space))))


def to_ambient(x: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Return ambient coordinates (…, 1 + n), time first: √k (cosh a, sinh a · u).

    a is limited to twice `radius_limit` (86 in float32), so that the result stays finite.
    """
    ((a, u),) = promote(x)
    limited = a.clamp(max=2.0 * radius_limit(a.dtype))
    ambient = torch.cat([torch.cosh(limited).unsqueeze(-1), unit_space(a, u)], -1)
    return column(square_root(check_curvature(k, a))) * ambient


def from_ambient(ambient: Tensor, *, k: float | Tensor = 1.0) -> Point:
    """Return the points with ambient coordinates (…, 1 + n), time first.

    Only the space coordinates are read (r = √k arsinh(‖x‖/√k)): the time coordinate follows from
    them and carries no more than their rounding error.
    """
    if ambient.dim() == 0 or ambient.shape[-1] < 2:
        raise ValueError(f"ambient coordinates have shape (…, 1 + n), got {tuple(ambient.shape)}")
    return from_space(ambient[..., 1:], k=k)
