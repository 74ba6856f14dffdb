"""Gyroaddition, gyro inverse and scalar multiplication in polar form (Eq. 20, 21, App. B.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from .convert import from_unit_space
from .point import (
    Point,
    PointLike,
    check_curvature,
    host_readable,
    is_origin,
    promote,
    radius_limit,
)
from .scalar import half_squared_norm

__all__ = ["gyro_add", "gyro_negate", "gyro_scale"]


def gyro_negate(x: PointLike) -> Point:
    """⊖x = (a, −u): the inverse of x under gyroaddition."""
    return Point(x[0], -x[1])


def gyro_scale(factor: float | Tensor, x: PointLike) -> Point:
    """t ⊗ x = (|t| a, sign(t) u) for a number or a tensor that broadcasts to (…)."""
    ((a, u),) = promote(x)
    factor = torch.as_tensor(factor, dtype=a.dtype, device=a.device)
    at_origin = is_origin(a, u)
    if host_readable(factor) and host_readable(a) and bool((factor > 0).all() & ~at_origin.any()):
        radius = factor * a
        return Point(radius, u.expand(radius.shape + u.shape[-1:]))
    # At the origin the gradient of u stands for that of the space coordinates, which scale by t.
    direction = torch.where(at_origin, factor, torch.sign(factor)).unsqueeze(-1) * u
    return Point(factor.abs() * a, direction)


def gyro_add(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Point:
    """x ⊕ y: the boost that carries the origin to x, applied to y.

    Not commutative. Centring at a mean is (⊖mean) ⊕ x, in this order: then distances between the
    x do not change. With x = (a, u), y = (b, v), e = u + v and c = ½‖e‖², Eq. 21 along u and the
    projection of y across u add up to sinh b · e + [sinh(a−b) + (cosh a − 1) sinh b · c] u, whose
    terms are small together where u and v oppose each other, as in centring, and which loses no
    more elsewhere than the rounding of the directions themselves.

    Args:
        x, y: points of shapes (…), (…, n), broadcast; radii are limited to `radius_limit`.
        k: has no influence on the result in polar form.
    """
    (a, u), (b, v) = promote(x, y)
    check_curvature(k, a)
    x_origin, y_origin = is_origin(a, u), is_origin(b, v)
    limit = radius_limit(a.dtype)
    a, b = a.clamp(max=limit), b.clamp(max=limit)
    sinh_b, half = torch.sinh(b), torch.sinh(0.5 * a)
    e = u + v
    c = half_squared_norm(e)
    rise = 2.0 * half * half
    # At an origin u (or v) stands for its space coordinates; nothing of this changes a value.
    y_origin = y_origin.to(a.dtype)
    scale = sinh_b + y_origin
    along = torch.sinh(a - b) + rise * scale * (c - 0.5 * y_origin) - y_origin
    along = torch.where(x_origin, torch.cosh(b) - scale, along)
    return from_unit_space(torch.addcmul(scale.unsqueeze(-1) * e, along.unsqueeze(-1), u))
