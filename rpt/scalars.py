"""A step's numbers, a few per parameter: arrays of NumPy where the host may read them, else tensors.

On a CPU an operation on ten numbers costs a tensor several times what it costs an array, and a step of a
stack takes about a hundred of them; on a device they must stay tensors, or the host would wait. Both
take the same operators, so every formula is written once, with the functions here for the rest. An
array shares its memory with the tensor it came from. What divides by zero in an array would warn:
formulas either avoid it or run under `quiet()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Scalars",
    "as_scalars",
    "as_tensor",
    "at_least",
    "at_most",
    "choose",
    "quiet",
    "write_columns",
]

# np.ndarray | Tensor: no common type describes what both can do.
Scalars = Any


def as_scalars(tensor: Tensor, host_reads: bool) -> Scalars:
    """An array on the tensor's memory, which then must be the host's, if it may be read; else the tensor."""
    return tensor.numpy() if host_reads else tensor


def as_tensor(scalars: Scalars) -> Tensor:
    """A tensor on the same memory."""
    return torch.from_numpy(scalars) if isinstance(scalars, np.ndarray) else scalars


def at_least(scalars: Scalars, low: float) -> Scalars:
    """max(x, low); NaN stays NaN."""
    if isinstance(scalars, np.ndarray):
        return np.maximum(scalars, low)
    return scalars.clamp_min(low)


def at_most(scalars: Scalars, high: float) -> Scalars:
    """min(x, high); NaN stays NaN."""
    if isinstance(scalars, np.ndarray):
        return np.minimum(scalars, high)
    return scalars.clamp_max(high)


def choose(condition: Scalars, chosen: Scalars, otherwise: Scalars) -> Scalars:
    """`chosen` where the condition holds; one of the two may be a plain number."""
    where = np.where if isinstance(condition, np.ndarray) else torch.where
    return where(condition, chosen, otherwise)


def write_columns(target: Tensor, columns: Sequence[Scalars]) -> None:
    """Write (k, 1) columns into (k, len(columns)) in place."""
    if isinstance(columns[0], np.ndarray):
        np.concatenate(columns, axis=1, out=target.numpy(), casting="unsafe")
    else:
        target.copy_(torch.cat([column.to(target.dtype) for column in columns], dim=1))


def quiet() -> np.errstate:
    """Arithmetic on arrays as tensors do it: infinities and NaN without a warning."""
    return np.errstate(all="ignore")
