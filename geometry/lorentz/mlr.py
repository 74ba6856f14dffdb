"""Hyperbolic multinomial logistic regression in polar form (Bdeir et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .chord import pair_angular
from .curvature import Curvature, as_curvature_module
from .point import PointLike, promote, radius_limit
from .scalar import norm_and_direction

__all__ = ["LorentzMLR", "mlr_logits"]


def mlr_logits(x: PointLike, normals: Tensor, shifts: Tensor, *, k: float | Tensor = 1.0) -> Tensor:
    """Signed distances to hyperplanes, scaled by the normals' lengths: (…, N) points → (…, N, C).

    logit = ‖z‖ √k arsinh(sinh(a − s) − cosh s · sinh a · ½‖u − ẑ‖²).

    Args:
        x: points (…, N), (…, N, n).
        normals: z of shape (C, n).
        shifts: s of shape (C,), the hyperplane's rapidity along ẑ.
        k: the curvature is −1/k.
    """
    ((a, u),) = promote(x)
    limit = radius_limit(a.dtype)
    a = a.clamp(max=limit).unsqueeze(-1)
    length, direction = norm_and_direction(normals.to(a.dtype))
    shifts = shifts.to(a.dtype).clamp(-limit, limit)
    rapidity = torch.sinh(a - shifts)
    angular = pair_angular(torch.sinh(a.squeeze(-1)), u, torch.cosh(shifts), direction)
    root = k.to(a.dtype).sqrt() if isinstance(k, Tensor) else math.sqrt(k)
    return length * root * torch.asinh(rapidity - angular)


class LorentzMLR(nn.Module):
    """Classification head on points: one hyperplane per class.

    Args:
        features: n.
        num_classes: C.
        k: curvature −1/k, a number or a shared `Curvature`.

    Parameters: `weight` (C, n), the normals, a Euclidean matrix without a live matrix path (its
    product with the input is a distance, not a linear map), and `shift` (C,).
    """

    def __init__(self, features: int, num_classes: int, *, k: float | Curvature = 1.0) -> None:
        super().__init__()
        if features < 1 or num_classes < 1:
            raise ValueError(f"need positive sizes, got {features} features, {num_classes} classes")
        self.features, self.num_classes = features, num_classes
        self.curvature = as_curvature_module(k)
        self.weight = nn.Parameter(torch.empty(num_classes, features))
        self.shift = nn.Parameter(torch.zeros(num_classes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normals of length about 1/√… as a linear layer's, hyperplanes through the origin."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.shift)

    def forward(self, x: PointLike) -> Tensor:
        """Points (…), (…, n) → logits (…, C), float32 at least."""
        ((a, u),) = promote(x)
        if u.shape[-1] != self.features:
            raise ValueError(f"expected points of dimension {self.features}, got {u.shape[-1]}")
        single = a.dim() == 0
        if single:
            a, u = a.unsqueeze(0), u.unsqueeze(0)
        logits = mlr_logits((a, u), self.weight, self.shift, k=self.curvature())
        return logits.squeeze(0) if single else logits

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """No linear map, no site."""
        return []

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.features} → {self.num_classes} classes"
