"""Several optimizers, observers and averages behind one small interface for the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

__all__ = ["Averaged", "Bundle"]


class Bundle:
    """One or more optimizers that together train a model.

    Args:
        optimizers: stepped in order.
        scheduled: False for rules that bring their own averaging in a schedule's place: the task's
            warm-up then applies, its decay does not.
        evaluation: what to enter around a held-out measurement.
        after_step: called after every step.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        scheduled: bool = True,
        evaluation: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self.scheduled = scheduled
        self.evaluation = evaluation or contextlib.nullcontext
        self._after_step = after_step
        self._rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]

    def set_factor(self, factor: float) -> None:
        """Every group's rate is its own first rate times `factor`."""
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self._after_step is not None:
            self._after_step()


class Averaged:
    """An average of the iterates, in place of the last one while the model is measured.

    Weight k of the average is `decay`^(age), with the usual correction of a short history.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = list(model.parameters())
        self._decay = decay
        self._average = [torch.zeros_like(p) for p in self._parameters]
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        torch._foreach_lerp_(self._average, self._parameters, 1 - self._decay)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        if not self._steps:
            yield
            return
        own = [p.detach().clone() for p in self._parameters]
        correction = 1 - self._decay**self._steps
        with torch.no_grad():
            for p, average in zip(self._parameters, self._average, strict=True):
                p.copy_(average / correction)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self._parameters, own, strict=True):
                    p.copy_(value)
