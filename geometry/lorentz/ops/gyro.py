"""Gyroaddition (Eq. 20, 21, App. B.6), boosts, and the residual step (Eq. 12) in polar form."""

from __future__ import annotations

import torch
from torch import Tensor

from .coordinates import from_unit_space
from .point import (
    Point,
    PointLike,
    check_curvature,
    host_readable,
    is_origin,
    promote,
)
from .scalar import half_squared_norm, limit_radius, norm_and_direction, sinhc_of_root


def gyro_negate(x: PointLike) -> Point:
    """⊖x = (a, −u): the inverse of x under gyroaddition.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> lorentz.gyro_negate(x).u[0]
        tensor(-1.)
    """
    ((a, u),) = promote(x)
    return Point(a, -u)


def gyro_scale(factor: float | Tensor, x: PointLike) -> Point:
    """t ⊗ x = (|t| a, sign(t) u) for a number or a tensor that broadcasts to (…).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> lorentz.gyro_scale(-2.0, x)
        Point(a=tensor(6.), u=tensor([-1., -0.]))
    """
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
    x do not change. With x = (a, u), y = (b, v), e = u + v and c = ½‖e‖² the result is the part of
    sinh b · e across u, and sinh(a−b) + cosh a sinh b · c along u (Eq. 21), whose terms are small
    together where u and v oppose each other, as in centring. e is projected, rather than its part
    along u taken to be c: stored directions have length 1 up to rounding only.

    Args:
        x, y: points of shapes (…), (…, n), broadcast; radii are limited to `radius_limit`.
        k: has no influence on the result in polar form.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> round(lorentz.gyro_add(x, x).a.item(), 3)
        6.0
    """
    (a, u), (b, v) = promote(x, y)
    check_curvature(k, a)
    x_origin, y_origin = is_origin(a, u), is_origin(b, v)
    a, b = limit_radius(a), limit_radius(b)
    e = u + v
    c = half_squared_norm(e)
    # At an origin u (or v) stands for its space coordinates; nothing of this changes a value.
    y_origin = y_origin.to(a.dtype)
    scale = torch.sinh(b) + y_origin
    along = torch.sinh(a - b) + torch.cosh(a) * scale * (c - 0.5 * y_origin)
    along = torch.where(x_origin, torch.cosh(b) - scale, along)
    across = e - (e * u).sum(-1, keepdim=True) * u
    return from_unit_space(torch.addcmul(scale.unsqueeze(-1) * across, along.unsqueeze(-1), u))


def boost(x: PointLike, to: PointLike) -> Point:
    """Apply to x the Lorentz boost that carries the origin to `to`: to ⊕ x.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> round(lorentz.boost(x, to=x).a.item(), 3)
        6.0
    """
    return gyro_add(to, x)


def axis_boost(x: PointLike, rapidity: float | Tensor, *, axis: int = 0) -> Point:
    """Boost x by a rapidity (…) of either sign along one space axis.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> round(lorentz.axis_boost(x, 1.5).a.item(), 3)
        4.5
    """
    ((a, u),) = promote(x)
    rapidity = torch.as_tensor(rapidity, dtype=a.dtype, device=a.device).expand(a.shape)
    unit = torch.zeros_like(u)
    unit[..., axis] = 1.0
    moved = (rapidity != 0).unsqueeze(-1)
    direction = torch.where(
        moved, torch.sign(rapidity).unsqueeze(-1) * unit, rapidity[..., None] * unit
    )
    return gyro_add((rapidity.abs(), direction), (a, u))


def boost_step(
    x: PointLike,
    y: PointLike,
    alpha: float | Tensor,
    mean_weights: Tensor | None = None,
) -> Point:
    """The polar boost residual (Eq. 12): move x by the step y = (b, v), scaled by alpha.

    a′ = a + α(b_∥ − mean b_∥), b_∥ = b u·v; the direction is tilted by tanh(a) u +
    α sinhc(αb_⊥)(b v − b_∥ u). An x at the origin takes u := v; a′ < 0 becomes (|a′|, −u′).

    Args:
        x, y: points of shapes (…, P), (…, P, n).
        alpha: step size, a number or a tensor that broadcasts to (…, P).
        mean_weights: (…, P), summing to 1 over P: the weights of the mean of b_∥ that is
            subtracted, so that the step moves no token outward on average. None: no centring.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> round(lorentz.boost_step(x, x, alpha=0.1).a.item(), 3)
        3.3
    """
    (a, u), (b, v) = promote(x, y)
    alpha = torch.as_tensor(alpha, device=a.device).to(a.dtype)
    no_direction = u.detach().abs().amax(-1) == 0
    u = torch.addcmul(u, no_direction.to(u.dtype).unsqueeze(-1), v)
    # v − (u·v) u = e + c u, with e = v − u and c = ½‖e‖² = 1 − u·v.
    e = v - u
    c = half_squared_norm(e)
    along = b * (1.0 - c)
    radial = along
    if mean_weights is not None:
        radial = along - (mean_weights.to(a.dtype) * along).sum(-1, keepdim=True)
    new_a = a + alpha * radial
    # ‖α across‖ beyond the limit tilts no further than float can tell.
    step = alpha * b
    squared = (step * step * (c * (2.0 - c)).clamp(min=0.0)).clamp(max=1600.0)
    tilt = sinhc_of_root(squared) * step
    # tanh(0) u + 0 has no direction of its own: u := v stays.
    keep = torch.tanh(a) + (no_direction & (a == 0)) + tilt * c
    moved = torch.addcmul(keep.unsqueeze(-1) * u, tilt.unsqueeze(-1), e)
    _, direction = norm_and_direction(moved)
    direction = torch.sign(new_a).unsqueeze(-1) * direction
    return Point(new_a.abs(), direction)
