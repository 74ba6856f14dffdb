"""When to measure: every k-th step, and early once a parameter's gradient frame has turned far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["Cadence"]


class Cadence:
    """Per-parameter age of the last measurement, in steps.

    A parameter is due in the first step, again once its last measurement is `every` steps old, and
    in the step after its frame coherence q fell below `coherence_threshold`. A q that stays there
    (an oscillating frame) forces no second measurement until it has been above again.

    Args:
        parameters: What is measured.
        every: Steps from one measurement to the next, at least 1.
        coherence_threshold: q in [−1, 1] below which the frame counts as turned far. On a small
            GPT the median q of a layer is about −0.1 and 1 in 100 lies below −0.5.
    """

    def __init__(
        self, parameters: Iterable[Tensor], every: int, coherence_threshold: float
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"observe_every must be a whole number of steps ≥ 1, got {every!r}")
        self.every = every
        self.coherence_threshold = coherence_threshold
        self._ages: dict[Tensor, int] = dict.fromkeys(parameters, every)
        self._low: set[Tensor] = set()
        self._turned: tuple[list[Tensor], Tensor, torch.cuda.Event | None] | None = None

    def due(self, parameter: Tensor) -> bool:
        """Whether to measure in the coming step."""
        return self._ages[parameter] >= self.every

    def advance(self, measured: Iterable[Tensor], coherence: Mapping[Tensor, Tensor]) -> None:
        """End a step: `measured` were observed in it, `coherence` is each parameter's q."""
        fresh = set(measured)
        for parameter, age in self._ages.items():
            self._ages[parameter] = 1 if parameter in fresh else age + 1
        if self.every == 1:
            return
        # On an accelerator the q of this step arrives during the next forward: reading it now
        # would make the host wait, so it is read one step later.
        self.settle()
        watched = [p for p in self._ages if p in coherence]
        if not watched:
            return
        device = coherence[watched[0]].device
        values = torch.stack([coherence[p].detach().to(device, torch.float32) for p in watched])
        if values.is_cuda:
            landed = torch.empty(len(watched), pin_memory=True)
            landed.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._turned = (watched, landed, event)
        else:
            self._turned = (watched, values, None)
            self.settle()

    def settle(self) -> None:
        """Take in the coherences that are on their way to the host."""
        if self._turned is None:
            return
        watched, values, event = self._turned
        self._turned = None
        if event is not None:
            event.synchronize()
        # On the host by now: the CPU's own, or copied by the step before and waited for just above.
        for parameter, q in zip(watched, values.tolist(), strict=True):
            if q >= self.coherence_threshold:
                self._low.discard(parameter)
            elif parameter not in self._low:
                self._low.add(parameter)
                self._ages[parameter] = max(self._ages[parameter], self.every)

    def ages(self) -> dict[Tensor, int]:
        """Steps since each parameter's last measurement; at least `every` where one is due.

        Negative where q is below the threshold already, so that a checkpoint keeps that too.
        """
        self.settle()
        return {p: -age if p in self._low else age for p, age in self._ages.items()}

    def restore(self, ages: Mapping[Tensor, int]) -> None:
        """Continue with the ages of a checkpoint; parameters it lacks keep theirs."""
        for parameter, age in ages.items():
            if parameter in self._ages:
                self._ages[parameter] = abs(int(age))
                (self._low.add if age < 0 else self._low.discard)(parameter)
