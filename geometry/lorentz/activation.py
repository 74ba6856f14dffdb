"""Activations on the space coordinates, safe at the origin and at any radius."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .convert import from_space, to_space
from .curvature import Curvature, as_curvature_module
from .point import Point, PointLike, is_origin, promote
from .scalar import asinh_exp, log_sinh, norm_and_direction

__all__ = ["PolarDropout", "PolarReLU", "SpaceActivation", "homogeneous_activation"]


def homogeneous_activation(x: PointLike, activation: Callable[[Tensor], Tensor]) -> Point:
    """Apply φ with φ(cx) = cφ(x), c > 0, to the space coordinates without forming them.

    The direction becomes that of φ(u), and ln sinh a gains ln‖φ(u)‖; φ(u) = 0 gives the origin.
    """
    ((a, u),) = promote(x)
    mapped = activation(u)
    norm, direction = norm_and_direction(mapped)
    somewhere = (norm > 0) & (a > 0)
    log_radius = log_sinh(torch.where(a > 0, a, 1.0)) + torch.log(torch.where(norm > 0, norm, 1.0))
    # An origin passes the gradient of its space coordinates on; elsewhere a zero result has none.
    direction = (somewhere | is_origin(a, u)).to(u.dtype).unsqueeze(-1) * direction
    return Point(torch.where(somewhere, asinh_exp(log_radius), 0.0), direction)


class PolarReLU(nn.Module):
    """relu on the space coordinates: direction relu(u), ln sinh a + ln‖relu(u)‖."""

    def forward(self, x: PointLike) -> Point:
        """Points to points of the same shapes."""
        return homogeneous_activation(x, torch.relu)


class SpaceActivation(nn.Module):
    """Any function of the space coordinates that keeps their shape, e.g. `gelu` or `tanh`.

    Radii are limited to twice `radius_limit`, where the space coordinates stay finite.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], *, k: float | Curvature = 1.0) -> None:
        super().__init__()
        self.function = function
        self.curvature = as_curvature_module(k)

    def forward(self, x: PointLike) -> Point:
        """Points to points of the same shapes."""
        k = self.curvature()
        return from_space(self.function(to_space(x, k=k)), k=k)


class PolarDropout(nn.Module):
    """Dropout on the space coordinates."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x: PointLike) -> Point:
        """Points to points of the same shapes; the identity in evaluation."""
        if not self.training or self.dropout.p == 0:
            return Point(*promote(x)[0])
        return homogeneous_activation(x, self.dropout)
