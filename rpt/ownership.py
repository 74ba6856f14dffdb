"""The seam to ranks: which parameters are mine, the whole gradient in, the update out.

The optimizer knows nothing of ranks. It asks one object, and the object of a single process does
nothing but hand tensors through.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from rpt.observers.staging import Committed

__all__ = [
    "MODES",
    "Agreement",
    "Live",
    "Outcome",
    "Ownership",
    "OwnershipMode",
    "StepSize",
    "choose_ownership",
    "is_sharded",
    "unreadable",
]

# (group index, parameter, gradient)
Live = tuple[int, Tensor, Tensor]

OwnershipMode = Literal["auto", "owner", "replicated", "local"]
MODES = get_args(OwnershipMode)


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
        rounding: "nearest" or "stochastic".
    """

    decay: float | Tensor | list[Tensor]
    rate: float | Tensor
    rounding: str


@runtime_checkable
class Ownership(Protocol):
    """What the optimizer asks about parameters and ranks, in the order in which it asks."""

    def agree(self, live: list[Live], observed: Committed) -> Agreement:
        """Begin a step: from this rank's gradients and observations."""
        ...

    def refuse(self, error: Exception) -> None:
        """Instead of `agree`: this rank cannot take the step; let the others know."""
        ...

    def owns(self, parameter: Tensor) -> bool:
        """Whether its state lives here and its update is computed here."""
        ...

    def portions(self, live: list[Live]) -> Iterable[list[Live]]:
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
        compared: Tensor,
        refreshed: Sequence[int],
    ) -> None:
        """W <- decay · W - rate · u for every parameter, on every rank that holds a part of it.

        Args:
            parameters: k of them, each whole.
            updates: u of each, in its shape.
            size: how they reach the weights.
            compared: which frames were compared with an earlier one, bool (k,).
            refreshed: which ones' roots were made anew.
        """
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
    mode: OwnershipMode | Ownership, optimizer: Optimizer, previous: Ownership | None = None
) -> Ownership | None:
    """The object for a mode of `MODES`; `rpt.distributed` says what each does on several ranks.

    Args:
        mode: the optimizer's `ownership` option.
        optimizer: whose parameters are shared; its groups and state are read anew in every step.
        previous: what was chosen before parameters were added: they keep their owners.

    Returns:
        None where this process is alone with its parameters.
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
        return None
    # Imported here so that a single process never loads it.
    from .distributed import distribute

    return distribute(mode, optimizer, previous)


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor; asked by attribute, so that DTensor need not be imported."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "full_tensor")


def unreadable(parameter: Tensor) -> bool:
    """Whether its entries have no values: a meta tensor, or a fake one of a tracer."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return parameter.device.type == "meta" or (
        fakes is not None and isinstance(parameter, fakes.FakeTensor)
    )
