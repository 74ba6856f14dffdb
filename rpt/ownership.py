"""The seam to ranks: which parameters are mine, the whole gradient in, the update out.

The optimizer knows nothing of ranks. It asks one object, and the object of a single process does
nothing but hand tensors through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Ownership", "SingleProcess"]


class Ownership(Protocol):
    """What the optimizer asks about parameters and ranks."""

    def owned(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those whose state lives here and whose update is computed here."""
        ...

    def whole_gradient(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the whole parameter, a plain tensor of its global shape."""
        ...

    def deliver(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        decay: float | Tensor,
        rate: float | Tensor,
    ) -> None:
        """W <- decay · W - rate · u for every parameter, on every rank that holds a part of it."""
        ...


class SingleProcess:
    """Everything is here."""

    def owned(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return list(parameters)

    def whole_gradient(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient

    def deliver(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        decay: float | Tensor,
        rate: float | Tensor,
    ) -> None:
        apply_updates(parameters, updates, decay, rate)


def apply_updates(
    parameters: Sequence[Tensor],
    updates: Sequence[Tensor],
    decay: float | Tensor,
    rate: float | Tensor,
) -> None:
    """W <- decay · W - rate · u in the update's dtype, then rounded to the parameter's."""
    if isinstance(rate, Tensor):
        updates = torch._foreach_mul(list(updates), rate)
        rate = 1.0
    low = [
        i for i, (p, u) in enumerate(zip(parameters, updates, strict=True)) if p.dtype != u.dtype
    ]
    if not low:
        _decay_and_add(list(parameters), list(updates), decay, rate)
        return
    # Allocated before anything is written: running out of memory then changes no weight.
    wide = [parameters[i].to(updates[i].dtype) for i in low]
    if len(low) < len(parameters):
        same = [i for i in range(len(parameters)) if i not in set(low)]
        _decay_and_add([parameters[i] for i in same], [updates[i] for i in same], decay, rate)
    _decay_and_add(wide, [updates[i] for i in low], decay, rate)
    for i, value in zip(low, wide, strict=True):
        parameters[i].copy_(value)


def _decay_and_add(
    parameters: list[Tensor], updates: list[Tensor], decay: float | Tensor, rate: float
) -> None:
    if isinstance(decay, Tensor) or decay != 1.0:
        torch._foreach_mul_(parameters, decay)
    torch._foreach_add_(parameters, updates, alpha=-rate)
