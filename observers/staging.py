"""Observations wait here between the backward that made them and the step that uses them.

A step that never happens (loss-scale overflow, an exception, an abandoned backward) must leave no
trace, and nobody announces it. So statistics are staged, `commit` hands them over once, and what an
earlier backward left behind is recognised by its gradient: when a new backward begins and a
parameter's `grad` is None although statistics of an earlier backward are staged for it, those
belong to gradients that were thrown away, and go too. A sharded parameter whose gradient had not
arrived when that backward ended is no such case: FSDP2 keeps it elsewhere until the micro-batch that
synchronises.
"""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from .rank import ObserverSettings, Statistics, ranks

__all__ = ["Committed", "ObservationStage"]


class Committed(NamedTuple):
    """What one step takes from the stage.

    Attributes:
        ranks: Per observed parameter the mean rank of its observations, 0-d.
        global_rank: Mean of the ranks queued for no parameter in particular, or None. It stands in
            for parameters absent from `ranks`.
        counts: Per observed parameter the number of observations behind its mean.
    """

    ranks: dict[Tensor, Tensor]
    global_rank: Tensor | None
    counts: dict[Tensor, int]


class _Entry(NamedTuple):
    content: Statistics | Tensor
    backward: int | None
    """Which backward staged it; None for what a caller staged by hand."""
    awaits: _Gradient | None = None
    """The gradient as it was, where autograd.grad returned this one's to its caller."""


class _Gradient:
    """A parameter's `grad` at one moment, to tell whether anything reached it since."""

    def __init__(self, parameter: Tensor) -> None:
        grad = parameter.grad
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = None if grad is None else grad._version

    def is_still(self, parameter: Tensor) -> bool:
        grad = parameter.grad
        if grad is None or self._grad is None:
            return grad is None
        return self._grad() is grad and self._version == grad._version


class ObservationStage:
    """The sink of every observer, and the optimizer's one source of ranks.

    Copies and pickles of a stage are empty: what is staged belongs to gradients, which are not
    copied either.
    """

    def __init__(self, settings: ObserverSettings | None = None) -> None:
        self.settings = settings or ObserverSettings()
        self.last_counts: dict[Tensor, int] = {}
        self._own: dict[Tensor, list[_Entry]] = {}
        self._global: list[_Entry] = []
        self._running: set[int] = set()
        self._backward = 0
        self._awaited: set[Tensor] = set()

    def __len__(self) -> int:
        """The number of observations staged."""
        return sum(map(len, self._own.values())) + len(self._global)

    def __reduce__(self) -> tuple[type[ObservationStage], tuple[ObserverSettings]]:
        return type(self), (self.settings,)

    def add(self, parameter: Tensor, statistics: Statistics) -> None:
        """Stage one observation of `parameter`, made outside any backward hook."""
        self._own.setdefault(parameter, []).append(_Entry(statistics, None))

    def add_from_backward(
        self, parameter: Tensor, statistics: Statistics, returned: bool = False
    ) -> None:
        """Stage one observation of `parameter` from within the backward that produced it.

        Args:
            parameter: The observed one.
            statistics: What was observed.
            returned: Whether autograd.grad hands the gradient to its caller. It counts only if
                the parameter's own is found to be another by the next backward, or by the step.
        """
        self._enter_backward()
        awaits = _Gradient(parameter) if returned else None
        self._own.setdefault(parameter, []).append(_Entry(statistics, self._backward, awaits))

    def add_rank(self, rank: float | Tensor, parameter: Tensor | None = None) -> None:
        """Stage a rank that was measured elsewhere; for every unobserved parameter if None.

        Raises:
            ValueError: For a number outside [0, 1], or a tensor that is not 0-d. The value of a
                tensor is not looked at, which would wait for the device: one that is not finite
                counts as 1, and others are clipped.
        """
        if isinstance(rank, Tensor):
            if rank.numel() != 1:
                raise ValueError(f"a rank must be a single number, got shape {tuple(rank.shape)}")
            value = rank.detach().reshape(())
            value = torch.where(torch.isfinite(value), value.clamp(0.0, 1.0), 1.0)
        else:
            if not (math.isfinite(rank) and 0.0 <= rank <= 1.0):
                raise ValueError(f"an entropy rank must lie in [0, 1], got {rank!r}")
            device = None if parameter is None else parameter.device
            wide = device is None or device.type != "mps"
            dtype = torch.float64 if wide else torch.float32
            value = torch.tensor(float(rank), dtype=dtype, device=device)
        queue = self._global if parameter is None else self._own.setdefault(parameter, [])
        queue.append(_Entry(value, None))

    def commit(self) -> Committed:
        """Average what is staged, per parameter, and empty the stage.

        All statistics of equal size are solved in one batched call.
        """
        self._drop_returned()
        own, queued = self._own, self._global
        self.clear()
        entries = [entry for group in own.values() for entry in group]
        pending = [e.content for e in entries if isinstance(e.content, Statistics)]
        solved = iter(ranks(pending, self.settings))
        mean = {}
        for parameter, group in own.items():
            values = [
                next(solved) if isinstance(entry.content, Statistics) else entry.content
                for entry in group
            ]
            mean[parameter] = _mean(values)
        counts = {parameter: len(group) for parameter, group in own.items()}
        self.last_counts = counts
        overall = _mean([e.content for e in queued if isinstance(e.content, Tensor)])
        return Committed(
            {parameter: value for parameter, value in mean.items() if value is not None},
            overall,
            counts,
        )

    def clear(self) -> None:
        """Drop everything staged."""
        self._own, self._global = {}, []
        self._running.clear()
        self._awaited = set()

    def drop(self, parameter: Tensor) -> None:
        """Drop what is staged for one parameter."""
        self._own.pop(parameter, None)

    def settle(self) -> None:
        """Note that no backward is running: one that raised has left its mark behind."""
        if self._running and torch._C._current_graph_task_id() == -1:
            self._running.clear()

    def _enter_backward(self) -> None:
        # Reentrant checkpoints nest backwards; all that overlap count as one.
        task = torch._C._current_graph_task_id()
        if task in self._running:
            return
        if not self._running:
            self._backward += 1
            self._drop_returned()
            self._drop_discarded()
        if task != -1:
            self._running.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(  # type: ignore[attr-defined]
                lambda: self._end_backward(task)
            )

    def _end_backward(self, task: int) -> None:
        """Runs after FSDP2's own callback, which was queued before the first tap was reached."""
        self._running.discard(task)
        self._awaited = {p for p in self._own if hasattr(p, "device_mesh") and p.grad is None}

    def _drop_discarded(self) -> None:
        for parameter, group in list(self._own.items()):
            if parameter.grad is None and parameter not in self._awaited:
                self._keep(parameter, [entry for entry in group if entry.backward is None])

    def _drop_returned(self) -> None:
        """Settle what autograd.grad returned: it became the gradient, or it is dropped."""
        for parameter, group in list(self._own.items()):
            if any(entry.awaits is not None for entry in group):
                kept = [e for e in group if e.awaits is None or not e.awaits.is_still(parameter)]
                self._keep(parameter, [entry._replace(awaits=None) for entry in kept])

    def _keep(self, parameter: Tensor, entries: list[_Entry]) -> None:
        if entries:
            self._own[parameter] = entries
        else:
            del self._own[parameter]


def _mean(values: list[Tensor]) -> Tensor | None:
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = torch.promote_types(dtype, value.dtype)
    device = values[0].device
    return torch.stack([value.to(device=device, dtype=dtype) for value in values]).mean()
