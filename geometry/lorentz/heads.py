"""Splitting points into heads and joining them (Lorentz direct concatenation) in polar form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .point import Point, PointLike, is_origin, promote
from .scalar import asinh_exp, log_of_norm, log_sinh, norm_and_direction

__all__ = ["HeadGain", "join_heads", "split_heads"]


def split_heads(x: PointLike, num_heads: int, log_gain: Tensor | None = None) -> Point:
    """Slice the space coordinates into heads: (…), (…, n) → (…, H), (…, H, n/H).

    ln sinh a_h = ln sinh a + ln‖u_h‖ (+ the gain of the head); each head is a point of its own.
    A round trip through `join_heads` is exact to float error up to a = 85 in float32.

    Args:
        x: points of shapes (…), (…, n).
        num_heads: H, which divides n.
        log_gain: (H,) added to ln sinh a_h.
    """
    ((a, u),) = promote(x)
    if num_heads < 1 or u.shape[-1] % num_heads:
        raise ValueError(f"{num_heads} heads do not divide points of dimension {u.shape[-1]}")
    slices = u.unflatten(-1, (num_heads, -1))
    # A zero slice is a head at its origin; sinh a times the slice are its space coordinates.
    sinh_a = torch.sinh(a.clamp(max=80.0)) + is_origin(a, u)
    gain = None if log_gain is None else log_gain.to(a.dtype)
    with torch.no_grad():
        at_zero = (1.0 / (sinh_a + (sinh_a == 0))).unsqueeze(-1).expand(slices.shape[:-1])
        if gain is not None:
            at_zero = at_zero / torch.exp(gain)
    norm, direction = norm_and_direction(slices, at_zero=at_zero)
    # ln sinh 0 = −∞ is a head at the origin, with gradient 0.
    log_radius = log_of_norm(norm) + log_sinh(a).unsqueeze(-1)
    if gain is not None:
        log_radius = log_radius + gain
    return Point(asinh_exp(log_radius) * (norm > 0), direction)


def join_heads(x: PointLike) -> Point:
    """Concatenate the space coordinates of heads: (…, H), (…, H, m) → (…), (…, H·m).

    ln sinh a = ½ logsumexp_h(2 ln sinh a_h), the Lorentz direct concatenation.
    """
    ((a, u),) = promote(x)
    if a.dim() == 0:
        raise ValueError("join_heads needs points of shapes (…, H) and (…, H, m)")
    outward = a > 0
    log_heads = log_sinh(torch.where(outward, a, 1.0))
    log_heads = torch.where(outward, log_heads, -torch.inf)
    largest = log_heads.detach().amax(-1, keepdim=True)
    some = largest > -torch.inf
    largest = torch.where(some, largest, 0.0)
    # A head at its origin keeps the derivative by its space coordinates (its u is 0).
    shares = torch.exp(torch.where(outward, log_heads, 0.0) - largest)
    total = torch.where(outward, shares * shares, 0.0).sum(-1, keepdim=True)
    length = torch.sqrt(torch.where(some, total, 1.0))
    joined = ((shares / length).unsqueeze(-1) * u).flatten(-2)
    log_radius = (torch.log(length) + largest).squeeze(-1)
    return Point(torch.where(some.squeeze(-1), asinh_exp(log_radius), 0.0), joined)


class HeadGain(nn.Module):
    """Splits into heads and moves each head's ln sinh a by a learned gain.

    `log_gain` (H,) is the deviation from the buffer `log_gain_offset`, which `calibrate_` sets.
    """

    log_gain_offset: Tensor
    calibrated: Tensor
    undecayed_parameters = ("log_gain",)

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.log_gain = nn.Parameter(torch.zeros(num_heads))
        self.register_buffer("log_gain_offset", torch.zeros(num_heads))
        self.register_buffer("calibrated", torch.tensor(False))

    def forward(self, x: PointLike) -> Point:
        """Points (…), (…, n) → heads (…, H), (…, H, n/H)."""
        return split_heads(x, self.num_heads, self.log_gain + self.log_gain_offset)

    def shift_log_radius_(self, shift: Tensor) -> None:
        """Move the gains by (H,) numbers: what calibration does."""
        with torch.no_grad():
            self.log_gain_offset.add_(shift.to(self.log_gain_offset.dtype))
            self.calibrated.fill_(True)

    def extra_repr(self) -> str:
        """The number of heads."""
        return f"num_heads={self.num_heads}"
