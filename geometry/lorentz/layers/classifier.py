"""Heads for classification: hyperbolic multinomial logistic regression (Bdeir et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import check_count
from ..ops.distance import mlr_logits
from ..ops.maps import log_map_origin
from ..ops.point import PointLike, promote_point
from .curvature import Curvature, as_curvature_module
from .sites import NoSites


class LorentzMLR(NoSites):
    """Classification head on points: one hyperplane per class.

    Args:
        features: n.
        num_classes: C.
        k: curvature −1/k, a number or a shared `Curvature`.

    Parameters: `weight` (C, n), the normals, a Euclidean matrix that is no observation site (its
    product with the input is a distance, not a linear map), and `shift` (C,).

    Raises:
        ValueError: a size below 1, or points of another dimension.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.LorentzMLR(8, num_classes=3)(lorentz.exp_map_origin(torch.randn(5, 8))).shape
        torch.Size([5, 3])
    """

    def __init__(self, features: int, num_classes: int, *, k: float | Curvature = 1.0) -> None:
        super().__init__()
        check_count("features", features)
        check_count("num_classes", num_classes)
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
        a, u = promote_point(x, self.features)
        single = a.dim() == 0
        if single:
            a, u = a.unsqueeze(0), u.unsqueeze(0)
        logits = mlr_logits((a, u), self.weight, self.shift, k=self.curvature())
        return logits.squeeze(0) if single else logits

    def extra_repr(self) -> str:
        return f"{self.features} → {self.num_classes} classes"


class TangentLinear(nn.Linear):
    """A Euclidean linear head on log_o of the points: the baseline of `LorentzMLR`."""

    def __init__(self, features: int, num_classes: int, *, k: Curvature) -> None:
        super().__init__(features, num_classes)
        self.curvature = k

    def forward(self, x: Any) -> Tensor:
        """Points (…), (…, n) → logits (…, C)."""
        return super().forward(log_map_origin(x, k=self.curvature()))

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """It reads a new representation: the logarithm of a centroid."""
        return [self]
