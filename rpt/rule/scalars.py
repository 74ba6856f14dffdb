"""A step's numbers, a few per parameter: arrays of NumPy where the host may read them, else tensors.

On a CPU an operation on ten numbers costs a tensor several times what it costs an array, and a step of a
stack takes about a hundred of them; on a device they must stay tensors, or the host would wait. Both
take the same operators, so every formula is written once, with the functions of a `Numbers` for the
rest. An array shares its memory with the tensor it came from. What divides by zero in an array would
warn: whoever calls the formulas runs them under `np.errstate(all="ignore")`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# np.ndarray | Tensor: no common type describes what both can do.
Scalars = Any


class Numbers(NamedTuple):
    """How the numbers of a stack are kept, and what is not an operator.

    Attributes:
        on_host: whether they are arrays.
        dtype: the stack's working dtype, NumPy's or torch's.
        wide: float64, likewise.
        read: tensor -> numbers on the same memory.
        tensor: numbers -> tensor on the same memory.
        cast: (numbers, `dtype`) -> numbers of that dtype.
        where: (condition, chosen, otherwise) -> numbers; one of the two may be a plain number.
        at_least: (numbers, low) -> max(x, low); NaN stays NaN.
        at_most: (numbers, high) -> min(x, high); NaN stays NaN.
    """

    on_host: bool
    dtype: Any
    wide: Any
    read: Callable[[Tensor], Scalars]
    tensor: Callable[[Scalars], Tensor]
    cast: Callable[[Scalars, Any], Scalars]
    where: Callable[..., Scalars]
    at_least: Callable[[Scalars, float], Scalars]
    at_most: Callable[[Scalars, float], Scalars]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@cache
def numbers_of(dtype: torch.dtype, on_host: bool) -> Numbers:
    """Those of a stack with a working dtype, float32 or float64."""
    if not on_host:
        return Numbers(
            False,
            dtype,
            torch.float64,
            _same,
            _same,
            torch.Tensor.to,
            torch.where,
            torch.clamp_min,
            torch.clamp_max,
        )
    # Methods and functions written in C: a step calls them some fifty times.
    return Numbers(
        True,
        np.float64 if dtype == torch.float64 else np.float32,
        np.float64,
        torch.Tensor.numpy,
        torch.from_numpy,
        np.ndarray.astype,
        np.where,
        np.maximum,
        np.minimum,
    )
