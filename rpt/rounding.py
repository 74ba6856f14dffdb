"""Rounding a finished float32 weight to the parameter's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUNDINGS", "round_into"]

ROUNDINGS = ("nearest", "stochastic")


def round_into(parameter: Tensor, value: Tensor, update: Tensor, rounding: str) -> None:
    """Write a float32 (or float64) `value` to `parameter`, rounding to its dtype.

    "nearest" loses every step smaller than half the spacing of bfloat16 numbers, 0.2 % of a weight.
    "stochastic" rounds up or down with the probabilities that make it right on average (Gupta et al.
    2015). Its randomness is a hash of the bits of the update and of the value: no generator to keep in a
    checkpoint, the same on every rank that holds the weight, the same in a resumed run.

    Args:
        parameter: any floating dtype; other than bfloat16 it is rounded to nearest.
        value: the new weight, of the same shape.
        update: what it was changed by, of the same shape and `value`'s dtype.
        rounding: one of `ROUNDINGS`.
    """
    if rounding == "stochastic" and parameter.dtype == torch.bfloat16:
        value = _dither(value.float(), update.float())
    parameter.copy_(value)


def _dither(value: Tensor, update: Tensor) -> Tensor:
    """Round to a multiple of bfloat16's spacing, up with the probability of what is cut off."""
    bits = value.contiguous().view(torch.int32)
    # 2³²/φ (Knuth's multiplicative hash), then a mixing constant of MurmurHash3.
    noise = update.contiguous().view(torch.int32) * -1640531527
    noise = noise ^ (noise >> 15) ^ bits
    noise = noise * -2048144789
    noise = (noise ^ (noise >> 13)) & 0xFFFF
    rounded = ((bits + noise) & -65536).view(torch.float32)
    # Next to the largest number a carry would make an infinity, and in a NaN another number.
    return torch.where(value.abs() < 3.3e38, rounded, value)
