"""The curvature of a layer: −1/k with k a positive number, fixed or learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Curvature(nn.Module):
    """k as a module, so that layers can share one: the curvature is −1/k.

    Calling it returns k as a 0-d tensor. The parameter is ln k, of the module's dtype, which keeps
    k positive and makes equal steps equal ratios. A fixed k is part of the layer's definition, not
    of its state: it is exact, whatever dtype the module is cast to, and is not saved.

    Args:
        k: the initial value.
        learnable: whether ln k is a parameter.

    Raises:
        ValueError: k is not positive and finite.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> k = lorentz.Curvature(2.0, learnable=False)
        >>> layer, head = lorentz.PolarLinear(8, 4, k=k), lorentz.LorentzMLR(4, 3, k=k)
        >>> k()
        tensor(2., dtype=torch.float64)
    """

    undecayed_parameters = ("log_k",)

    def __init__(self, k: float = 1.0, *, learnable: bool = True) -> None:
        super().__init__()
        if not (k > 0 and math.isfinite(k)):
            raise ValueError(f"k (the curvature is −1/k) must be positive and finite, got {k!r}")
        self.initial = float(k)
        self.log_k: nn.Parameter | None = None
        if learnable:
            self.log_k = nn.Parameter(torch.tensor(math.log(k), dtype=torch.get_default_dtype()))

    def forward(self) -> Tensor:
        """Return k, a 0-d tensor, float32 or float64."""
        if self.log_k is None:
            return torch.tensor(self.initial, dtype=torch.float64)
        return self.log_k.to(torch.promote_types(self.log_k.dtype, torch.float32)).exp()

    def extra_repr(self) -> str:
        return f"{self.initial}, learnable={self.log_k is not None}"


def as_curvature_module(k: float | Curvature) -> Curvature:
    """A number becomes a fixed curvature; a module is shared as it is."""
    return k if isinstance(k, Curvature) else Curvature(k, learnable=False)
