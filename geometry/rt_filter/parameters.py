"""Filter parameters: positive and unit-interval numbers per head, kept in float32 under half casts.

Source: RT-Filter paper, appendix F.3 and the definitions of Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import check_number
from .transport import rotary_frequencies

__all__ = [
    "DecayRates",
    "FilterScalars",
    "Float32Module",
    "PositiveParameter",
    "RotaryFrequencies",
    "UnitIntervalParameter",
    "decay_rates",
    "inverse_sigmoid",
    "inverse_softplus",
]


def inverse_softplus(value: float) -> float:
    """x with log(1 + e^x) = value. Raises ValueError unless value > 0."""
    if not value > 0:
        raise ValueError(f"softplus reaches only positive values, got {value}")
    return value + math.log(-math.expm1(-value))


def inverse_sigmoid(value: float) -> float:
    """x with 1/(1 + e^{−x}) = value. Raises ValueError unless 0 < value < 1."""
    if not 0 < value < 1:
        raise ValueError(f"a sigmoid reaches only values strictly between 0 and 1, got {value}")
    return math.log(value) - math.log1p(-value)


class Float32Module(nn.Module):
    """A module whose own tensors ignore casts to half precision (and, if `fixed`, any cast)."""

    fixed = False

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Float32Module:
        own = {**self._parameters, **self._buffers}
        before = {name: tensor.detach() for name, tensor in own.items() if tensor is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype in (torch.float16, torch.bfloat16) or (
                self.fixed and new.dtype != old.dtype
            ):
                exact = new.detach().to(old.dtype) if old.is_meta else old.to(new.device)
                if isinstance(new, nn.Parameter):
                    new.data = exact
                else:
                    setattr(self, name, exact)
        return self


class PositiveParameter(Float32Module):
    """Positive numbers softplus(raw), `raw` stored at the inverse softplus of the initial value."""

    def __init__(self, initial: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full(shape, inverse_softplus(initial), dtype=torch.float32))

    def forward(self) -> Tensor:
        # Without a threshold: softplus(x) must not jump to x for large values.
        return F.softplus(self.raw, threshold=60.0)


class UnitIntervalParameter(Float32Module):
    """Numbers sigmoid(raw) in (0, 1), `raw` stored at the inverse sigmoid of the initial value."""

    def __init__(self, initial: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full(shape, inverse_sigmoid(initial), dtype=torch.float32))

    def forward(self) -> Tensor:
        return torch.sigmoid(self.raw)


def decay_rates(num_heads: int, low: float, high: float) -> list[float]:
    """μ per head: the first num_heads // 4 are 0, the others log-spaced from `low` to `high`."""
    check_number("decay_range[0]", low, above=0.0)
    check_number("decay_range[1]", high, low)
    still = num_heads // 4
    moving = num_heads - still
    steps = [index / max(moving - 1, 1) for index in range(moving)]
    return [0.0] * still + [low ** (1 - s) * high**s for s in steps]


class DecayRates(Float32Module):
    """μ ≥ 0 per head. A head that starts at 0 is masked, for softplus cannot reach 0."""

    moving: Tensor

    def __init__(self, initial: list[float]) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.tensor([inverse_softplus(v or 1.0) for v in initial]))
        self.register_buffer("moving", torch.tensor([float(v > 0) for v in initial]))

    def forward(self) -> Tensor:
        return F.softplus(self.raw, threshold=60.0) * self.moving


class RotaryFrequencies(Float32Module):
    """Angular frequencies (dimension,), float32 whatever the module is cast to."""

    frequencies: Tensor
    fixed = True

    def __init__(
        self, dimension: int, base: float, *, conjugate_pairs: bool, learned: bool
    ) -> None:
        super().__init__()
        omega = rotary_frequencies(dimension, base, conjugate_pairs=conjugate_pairs)
        if learned:
            self.frequencies = nn.Parameter(omega)
        else:
            self.register_buffer("frequencies", omega)

    def forward(self) -> Tensor:
        return self.frequencies


class FilterScalars(NamedTuple):
    """The numbers of Algorithm 1, one per head, each a tensor of shape (heads,).

    Variances are those of the paper: η²_{t,k}, η²_{t,q}, ι²_t, η²_{r,k}, η²_{r,q}, ι²_r, m²_∞, and
    σ² of the process noise (0 without it). `sphere_scale` multiplies the squared distance: the
    product of the query's and the key's learned gain, over d where magnitudes are in raw units.
    """

    decay: Tensor
    key_tangential: Tensor
    query_tangential: Tensor
    inflation_tangential: Tensor
    key_radial: Tensor
    query_radial: Tensor
    inflation_radial: Tensor
    magnitude_floor: Tensor
    process_noise: Tensor
    nu_tangential: Tensor
    nu_radial: Tensor
    temperature: Tensor
    sphere_scale: Tensor

    def reshaped(self, *trailing: int) -> FilterScalars:
        """Each tensor (heads,) as (heads, *trailing)."""
        return FilterScalars(*(p.reshape(-1, *trailing) for p in self))
