"""Boosts: the residual step along and across a point's own direction (Eq. 12), and plain ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .gyro import gyro_add
from .point import Point, PointLike, promote
from .scalar import half_squared_norm, norm_and_direction, sinhc_of_root

__all__ = ["axis_boost", "boost", "boost_step"]


def boost(x: PointLike, to: PointLike) -> Point:
    """Apply to x the Lorentz boost that carries the origin to `to`: to ⊕ x."""
    return gyro_add(to, x)


def axis_boost(x: PointLike, rapidity: float | Tensor, *, axis: int = 0) -> Point:
    """Boost x by a rapidity (…) of either sign along one space axis."""
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
