"""Batch normalisation of points (Bdeir et al. 2024) in polar form."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .centroid import centroid
from .curvature import Curvature, as_curvature_module
from .gyro import gyro_add, gyro_negate, gyro_scale
from .maps import exp_map_origin
from .point import Point, PointLike, promote

__all__ = ["PolarBatchNorm2d"]


class PolarBatchNorm2d(nn.Module):
    """x ↦ β ⊕ (γ/(δ + ε) ⊗ ((⊖x̄) ⊕ x)), x̄ the centroid of all pixels of the batch.

    δ is the *mean distance* to x̄, not a root mean square: as published. Since (⊖x̄) ⊕ x has the
    distance of x to x̄ as its radius, δ is the mean of radii that are needed anyway. Running
    estimates replace both in evaluation: x̄ by the centroid of old and new with weights
    (1 − momentum, momentum), δ by the same mean.

    Args:
        channels: n.
        k: curvature −1/k, a number or a shared `Curvature`.
        momentum: of the running estimates.
        eps: ε, a distance.

    Parameters: `log_gain` (ln γ) and `bias` (n,), the tangent vector at the origin that β is the
    exponential of: scale parameters, never decayed.
    """

    running_radius: Tensor
    running_direction: Tensor
    running_distance: Tensor
    undecayed_parameters = ("log_gain", "bias")

    def __init__(
        self,
        channels: int,
        *,
        k: float | Curvature = 1.0,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.channels, self.momentum, self.eps = channels, momentum, eps
        self.curvature = as_curvature_module(k)
        self.log_gain = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_radius", torch.zeros(()))
        self.register_buffer("running_direction", torch.zeros(channels))
        self.register_buffer("running_distance", torch.ones(()))

    def forward(self, x: PointLike) -> Point:
        """Points (…), (…, n) to points of the same shapes; means over all leading dimensions."""
        ((a, u),) = promote(x)
        if u.shape[-1] != self.channels:
            raise ValueError(f"expected points of dimension {self.channels}, got {u.shape[-1]}")
        root = self.curvature().to(a.dtype).sqrt()
        flat = Point(a.reshape(-1), u.reshape(-1, self.channels))
        if self.training:
            mean = centroid(flat)
        else:
            mean = Point(self.running_radius.to(a.dtype), self.running_direction.to(a.dtype))
        centred = gyro_add(gyro_negate(Point(mean.a[None], mean.u[None])), flat)
        if self.training:
            distance = root * centred.a.mean()
            self._update(mean, distance)
        else:
            distance = self.running_distance.to(a.dtype)
        factor = torch.exp(self.log_gain.to(a.dtype)) / (distance + self.eps)
        bias = exp_map_origin(self.bias.to(a.dtype), k=self.curvature())
        result = gyro_add(Point(bias.a[None], bias.u[None]), gyro_scale(factor, centred))
        return Point(result.a.reshape(a.shape), result.u.reshape(u.shape))

    @torch.no_grad()
    def _update(self, mean: Point, distance: Tensor) -> None:
        dtype = mean.a.dtype
        both = Point(
            torch.stack([self.running_radius.to(dtype), mean.a.detach()]),
            torch.stack([self.running_direction.to(dtype), mean.u.detach()]),
        )
        weights = both.a.new_tensor([1.0 - self.momentum, self.momentum])
        moved = centroid(both, weights)
        self.running_radius.copy_(moved.a)
        self.running_direction.copy_(moved.u)
        self.running_distance.lerp_(distance.detach().to(self.running_distance), self.momentum)

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """No matrix, no site."""
        return []

    def extra_repr(self) -> str:
        """The dimension."""
        return f"{self.channels}"
