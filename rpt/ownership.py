"""The seam to ranks: which parameters are mine, the whole gradient in, the update out.

The optimizer knows nothing of ranks. It asks one object, and the object of a single process does
nothing but hand tensors through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from .rounding import round_into

if TYPE_CHECKING:
    from rpt.observers.staging import Committed

    from .update import Step

__all__ = [
    "MODES",
    "Agreement",
    "Live",
    "Outcome",
    "Ownership",
    "SingleProcess",
    "StepSize",
    "apply_updates",
    "choose_ownership",
    "holds_state",
    "is_sharded",
    "largest_entries",
]

# (group index, parameter, gradient)
Live = tuple[int, Tensor, Tensor]

MODES = ("auto", "owner", "replicated", "local")


class Agreement(NamedTuple):
    """What all ranks agree to do in this step.

    Attributes:
        live: parameters that take part.
        peaks: largest absolute entry of each one's whole gradient; not finite where it is not.
        observed: the observations of all ranks.
    """

    live: list[Live]
    peaks: list[float]
    observed: Committed


class Outcome(NamedTuple):
    """Parameters of one group after their step.

    Attributes:
        group: index of the parameter group.
        parameters: those that took part.
        coherence: their q, (k,).
        compared: where q compares two frames, bool (k,).
    """

    group: int
    parameters: Sequence[Tensor]
    coherence: Tensor
    compared: Tensor


class StepSize(NamedTuple):
    """How an update reaches a weight: W <- decay · W - rate · u, then rounding to the weight's dtype.

    Attributes:
        decay: 1 - lr·g·weight_decay: one for all, or a list of 0-d tensors, one for each.
        rate: lr·g.
        rounding: of `rpt.rounding.ROUNDINGS`.
    """

    decay: float | Tensor | list[Tensor]
    rate: float | Tensor
    rounding: str


@runtime_checkable
class Ownership(Protocol):
    """What the optimizer asks about parameters and ranks, in the order in which it asks."""

    def agree(self, live: Sequence[Live], observed: Committed) -> Agreement:
        """Begin a step: from this rank's gradients and observations."""
        ...

    def refuse(self, error: Exception) -> None:
        """Instead of `agree`: this rank cannot take the step; let the others know."""
        ...

    def owns(self, parameter: Tensor) -> bool:
        """Whether its state lives here and its update is computed here."""
        ...

    def portions(self, live: Sequence[Live]) -> Iterator[list[Live]]:
        """What to compute here, part by part, with gradients of whole parameters, plain tensors."""
        ...

    def weight_norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """‖W‖ of whole parameters that are being computed here, (k,)."""
        ...

    def deliver(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        size: StepSize,
        step: Step,
    ) -> None:
        """W <- decay · W - rate · u for every parameter, on every rank that holds a part of it."""
        ...

    def fail(self, error: Exception) -> None:
        """A part could not be computed: leave no other rank waiting."""
        ...

    def finish(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """End the step; returns the outcomes of all ranks' parameters."""
        ...

    def whole_state(self, state: Mapping[Tensor, Any]) -> Mapping[Tensor, Any]:
        """The state of all parameters, for a checkpoint."""
        ...

    def adopt_state(self, state: Mapping[Tensor, Any]) -> None:
        """After loading: keep in `state` what belongs here."""
        ...


class SingleProcess:
    """Everything is here."""

    def agree(self, live: Sequence[Live], observed: Committed) -> Agreement:
        peaks = largest_entries([gradient for *_, gradient in live])
        # One host synchronisation: which parameters take part is the host's decision.
        return Agreement(list(live), peaks.tolist(), observed)

    def refuse(self, error: Exception) -> None:
        pass

    def owns(self, parameter: Tensor) -> bool:
        return True

    def portions(self, live: Sequence[Live]) -> Iterator[list[Live]]:
        yield list(live)

    def weight_norms(self, parameters: Sequence[Tensor]) -> Tensor:
        return weight_norms(parameters)

    def deliver(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        size: StepSize,
        step: Step,
    ) -> None:
        apply_updates(parameters, updates, size)

    def fail(self, error: Exception) -> None:
        pass

    def finish(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        return outcomes

    def whole_state(self, state: Mapping[Tensor, Any]) -> Mapping[Tensor, Any]:
        return state

    def adopt_state(self, state: Mapping[Tensor, Any]) -> None:
        pass


def choose_ownership(
    mode: str | Ownership, optimizer: Optimizer, previous: Ownership | None = None
) -> Ownership:
    """The object for a mode of `MODES`; `rpt.distributed` says what each does on several ranks.

    Args:
        mode: the optimizer's `ownership` option.
        optimizer: whose parameters are shared; its groups and state are read anew in every step.
        previous: what was chosen before parameters were added: they keep their owners.
    """
    if not isinstance(mode, str):
        return mode
    sharded = any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])
    several = (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
    if not sharded and (mode == "local" or not several):
        return SingleProcess()
    # Imported here so that a single process never loads it.
    from .distributed import distribute

    return distribute(mode, optimizer, previous)


def largest_entries(gradients: Sequence[Tensor]) -> Tensor:
    """Largest absolute entry of each gradient, (k,), float64 if any is; NaN or inf stay what they are."""
    if not gradients:
        return torch.zeros(0)
    device = gradients[0].device
    wide = any(gradient.dtype == torch.float64 for gradient in gradients)
    dtype = torch.float64 if wide else torch.float32
    if device.type != "cpu":
        norms = torch._foreach_norm(list(gradients), float("inf"))
        return torch.stack([norm.to(device, dtype) for norm in norms])
    # On a CPU an infinity norm takes ten times as long as both extremes do.
    lows, highs = zip(*(torch.aminmax(gradient) for gradient in gradients), strict=True)
    low = torch.stack([value.to(device, dtype) for value in lows])
    return torch.maximum(-low, torch.stack([value.to(device, dtype) for value in highs]))


def weight_norms(parameters: Sequence[Tensor]) -> Tensor:
    """‖W‖ of each, (k,), in float32 or the parameters' float64: half precision would overflow."""
    dtype = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
    if parameters[0].device.type == "cpu":
        return torch.stack([torch.linalg.vector_norm(p, dtype=dtype) for p in parameters])
    return torch.stack(torch._foreach_norm(list(parameters), 2, dtype=dtype))


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor; asked by attribute, so that DTensor need not be imported."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "full_tensor")


def holds_state(record: Mapping[str, Any]) -> bool:
    """Whether a parameter's record is its state: on ranks that do not own it, large tensors are empty."""
    momentum = record.get("momentum")
    return isinstance(momentum, Tensor) and momentum.numel() > 0


def apply_updates(parameters: Sequence[Tensor], updates: Sequence[Tensor], size: StepSize) -> None:
    """W <- decay · W - rate · u in the update's dtype, then rounded to the parameter's."""
    if not parameters:
        return
    decay, rate = size.decay, size.rate
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
        some = [decay[i] for i in same] if isinstance(decay, list) else decay
        _decay_and_add([parameters[i] for i in same], [updates[i] for i in same], some, rate)
    if isinstance(decay, list):
        decay = [decay[i] for i in low]
    _decay_and_add(wide, [updates[i] for i in low], decay, rate)
    for i, value in zip(low, wide, strict=True):
        round_into(parameters[i], value, updates[i], size.rounding)


def _decay_and_add(
    parameters: list[Tensor],
    updates: list[Tensor],
    decay: float | Tensor | list[Tensor],
    rate: float,
) -> None:
    if isinstance(decay, (Tensor, list)) or decay != 1.0:
        torch._foreach_mul_(parameters, decay)
    torch._foreach_add_(parameters, updates, alpha=-rate)
