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


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor; asked by attribute, so that DTensor need not be imported."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "full_tensor")
