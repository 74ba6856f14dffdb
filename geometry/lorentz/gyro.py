"""Gyroaddition, gyro inverse and scalar multiplication in polar form (Eq. 20, 21, App. B.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from .convert import from_unit_space
from .distance import half_squared_chord
from .point import Point, PointLike, check_curvature, is_origin, promote, radius_limit
from .tangent import perpendicular_part

__all__ = ["gyro_add", "gyro_negate", "gyro_scale"]


def gyro_negate(x: PointLike) -> Point:
    """⊖x = (a, −u): the inverse of x under gyroaddition."""
    return Point(x[0], -x[1])


def gyro_scale(factor: float | Tensor, x: PointLike) -> Point:
    """t ⊗ x = (|t| a, sign(t) u) for a number or a tensor that broadcasts to (…)."""
    ((a, u),) = promote(x)
    factor = torch.as_tensor(factor, dtype=a.dtype, device=a.device)
    # At the origin the gradient of u stands for that of the space coordinates, which scale by t.
    direction = torch.where(is_origin(a, u), factor, torch.sign(factor)).unsqueeze(-1) * u
    return Point(factor.abs() * a, direction)


def gyro_add(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Point:
    """x ⊕ y: the boost that carries the origin to x, applied to y.

    Not commutative. Centring at a mean is (⊖mean) ⊕ x, in this order: then distances between the
    x do not change. With x = (a, u), y = (b, v) the component of the result along u is
    sinh(a−b) + cosh a sinh b ½‖u+v‖² (Eq. 21) where the directions oppose each other and the sum
    of positive terms elsewhere; across u it is sinh b (v − (u·v) u).

    Args:
        x, y: points of shapes (…), (…, n), broadcast; radii are limited to `radius_limit`.
        k: has no influence on the result in polar form.
    """
    (a, u), (b, v) = promote(x, y)
    check_curvature(k, a)
    x_origin, y_origin = is_origin(a, u), is_origin(b, v)
    limit = radius_limit(a.dtype)
    a, b = a.clamp(max=limit), b.clamp(max=limit)
    # Zero in value: derivatives by the space coordinates of an x or y at the origin.
    u_origin = torch.where(x_origin.unsqueeze(-1), u, 0.0)
    v_origin = torch.where(y_origin.unsqueeze(-1), v, 0.0)
    u = torch.where(x_origin.unsqueeze(-1), 0.0, u)
    cosine = (u * v).sum(-1)
    sinh_b, cosh_a, cosh_b = torch.sinh(b), torch.cosh(a), torch.cosh(b)
    opposed = torch.sinh(a - b) + cosh_a * sinh_b * half_squared_chord(u, -v)
    aligned = torch.sinh(a) * cosh_b + cosh_a * sinh_b * cosine
    along = torch.where(cosine < 0, opposed, aligned)
    along = along + (cosh_a - 1.0) * (v_origin * u).sum(-1)
    space = along.unsqueeze(-1) * u + sinh_b.unsqueeze(-1) * perpendicular_part(u, v)
    space = space + cosh_b.unsqueeze(-1) * u_origin + v_origin
    return from_unit_space(space)
