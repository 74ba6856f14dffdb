"""The anchored rule for the output radius of a polar layer (Eq. 8), and those it is compared with (Table 6).

Each of the others maps (ln(‖h‖/√k), a, χ, u) of the layer's output before normalisation and of its input to
ℓ = ln sinh a′. All but `HardBound` start from a random point.

Example:
    >>> import torch, rpt.geometry.lorentz as lorentz
    >>> lorentz.RADIUS_RULES[:3]
    ('anchored', 'lorentz', 'power')
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...checks import check_choice
from ..ops.scalar import asinh_exp, log_sinh

RADIUS_RULES = (
    "anchored",
    "lorentz",
    "power",
    "affine_klein",
    "affine_direction",
    "sigmoid",
    "bounded",
)


def anchored_log_radius(
    log_norm: Tensor, a: Tensor, by_direction: Tensor, *, power_change: Tensor, gain: Tensor,
    bias: Tensor,
) -> Tensor:  # fmt: skip
    """ℓ = β ln(‖h‖/√k) + λa + φᵀχ + φ₀ (Polar-ViT paper, Eq. 8), β = 1 + `power_change`; φᵀχ is
    `by_direction`."""
    power = 1.0 + power_change.to(a.dtype)
    return power * log_norm + gain.to(a.dtype) * a + by_direction + bias.to(a.dtype)


class RadiusRule(nn.Module):
    """ℓ (…) from ln(‖h‖/√k) (…), the input radius a (…), χ = tanh(a) u and u (…, n)."""

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        """Return ln sinh a′."""
        raise NotImplementedError


class FreePower(RadiusRule):
    """ℓ = β ln(‖h‖/√k) + φ₀ with β drawn around 1 with standard deviation ½."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(1.0 + 0.5 * torch.randn(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        return self.power.to(a.dtype) * log_norm + self.bias.to(a.dtype)


class Affine(RadiusRule):
    """a′ = softplus(λa + φᵀχ + φ₀), or φᵀu in place of φᵀχ: positive, and its slope 1 far out."""

    def __init__(self, features: int, *, klein: bool) -> None:
        super().__init__()
        self.klein = klein
        self.gain = nn.Parameter(1.0 + 0.5 * torch.randn(()))
        self.direction = nn.Parameter(torch.randn(features) / math.sqrt(features))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        read = chi if self.klein else u
        radius = self.gain.to(a.dtype) * a + (read * self.direction.to(a.dtype)).sum(-1)
        return log_sinh(nn.functional.softplus(radius + self.bias.to(a.dtype)) + 1e-6)


class SigmoidBounded(RadiusRule):
    """cosh a′ = 1 + e^s σ(φᵀχ + φ₀), bounded (Chen et al. 2022, with χ for ambient coordinates)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.direction = nn.Parameter(torch.randn(features) / math.sqrt(features))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        logit = (chi * self.direction.to(a.dtype)).sum(-1) + self.bias.to(a.dtype)
        # cosh² − 1 = (cosh − 1)(cosh + 1): from the logarithm of cosh − 1, which may be tiny.
        log_rise = self.log_scale.to(a.dtype) + nn.functional.logsigmoid(logit)
        return 0.5 * (log_rise + torch.log(torch.exp(log_rise) + 2.0))


class HardBound(RadiusRule):
    """The plain Lorentz layer cut at a′ = 4: no gradient beyond."""

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        return log_sinh(asinh_exp(log_norm).clamp(max=4.0))


def make_radius_rule(name: str, features: int) -> RadiusRule | None:
    """The rule of this name for inputs of dimension n; None for the two that `PolarLinear` holds."""
    check_choice("radius", name, RADIUS_RULES)
    if name == "power":
        return FreePower()
    if name in ("affine_klein", "affine_direction"):
        return Affine(features, klein=name == "affine_klein")
    if name == "sigmoid":
        return SigmoidBounded(features)
    return HardBound() if name == "bounded" else None
