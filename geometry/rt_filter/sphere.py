"""Exponential and logarithmic map, and geodesic interpolation, on the unit sphere in R^n.

A complex unit sphere in C^d is the real unit sphere in R^{2d} under the real inner product.
Source: RT-Filter paper, appendix C.2 (the geodesic directional update).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .model import multiply_by_i, unit_direction

__all__ = ["across", "geodesic_angle", "slerp", "sphere_exp", "sphere_log", "tangent_project"]


def tangent_project(base: Tensor, vector: Tensor) -> Tensor:
    """P_T(base) vector = vector − base ⟨base, vector⟩/‖base‖², (…, n), real inner product (Eq. 2).

    Written as a ratio of two equal reductions, so that vector = base gives exactly zero. A zero
    base projects nothing away.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import tangent_project
        >>> tangent_project(torch.tensor([0.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor([3., 0.])
    """
    squared = (base * base).sum(-1, keepdim=True)
    along = (base * vector).sum(-1, keepdim=True) / squared.clamp_min(torch.finfo(base.dtype).tiny)
    return vector - base * along


def across(own: Tensor, direction: Tensor, *, exact: bool) -> Tensor:
    """`tangent_project`; if `exact` (extension G.1), with no component along i·own, either."""
    tangential = tangent_project(own, direction)
    return tangent_project(multiply_by_i(own), tangential) if exact else tangential


def geodesic_angle(u: Tensor, v: Tensor) -> Tensor:
    """Angle in radians, (…), between unit vectors; accurate near 0 and π, where arccos is not (C.2).

    Between two zero vectors, which have no direction, it is 0 with gradient 0.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import geodesic_angle
        >>> geodesic_angle(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor(1.5708)
    """
    apart = torch.linalg.vector_norm(u - v, dim=-1)
    along = torch.linalg.vector_norm(u + v, dim=-1)
    return 2.0 * torch.atan2(apart, along.masked_fill((apart == 0) & (along == 0), 1.0))


def sphere_exp(base: Tensor, tangent: Tensor) -> Tensor:
    """Exp_base(tangent) = cos‖t‖ base + sinc‖t‖ tangent, for unit `base` (…, n); zero stays zero.

    Source: RT-Filter paper, appendix C.2.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import sphere_exp
        >>> sphere_exp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, torch.pi / 4]))
        tensor([0.7071, 0.7071])
    """
    length = torch.linalg.vector_norm(tangent, dim=-1, keepdim=True)
    moved = torch.cos(length) * base + torch.sinc(length / torch.pi) * tangent
    return unit_direction(moved)[1]


def sphere_log(base: Tensor, point: Tensor) -> Tensor:
    """Log_base(point), the tangent vector (…, n) at `base` that Exp takes to `point`; unit vectors.

    At the antipode, where no unique geodesic exists, the result is zero (appendix C.2).

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import sphere_log
        >>> sphere_log(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor([0.0000, 1.5708])
    """
    across = tangent_project(base, point)
    sine = torch.linalg.vector_norm(across, dim=-1, keepdim=True)
    angle = geodesic_angle(base, point).unsqueeze(-1)
    tiny = torch.finfo(base.dtype).tiny ** 0.5
    return torch.where(sine > tiny, across * (angle / sine.clamp_min(tiny)), across)


def slerp(start: Tensor, end: Tensor, fraction: Tensor | float) -> Tensor:
    """Spherical linear interpolation: Exp_start(fraction · Log_start(end)), unit vectors (…, n).

    Source: RT-Filter paper, appendix C.2.2.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import slerp
        >>> slerp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 1 / 3)
        tensor([0.8660, 0.5000])
    """
    return sphere_exp(start, fraction * sphere_log(start, end))
