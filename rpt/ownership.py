"""The seam to ranks: which parameters are mine, the whole gradient in, the update out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from .apply import StepSize, apply_updates, largest_entries, weight_norms
from .store.layout import is_fake

if TYPE_CHECKING:
    from rpt.observers.staging import Committed

# (group index, parameter, gradient)
Live = tuple[int, Tensor, Tensor]

OwnershipMode = Literal["auto", "owner", "replicated", "local"]


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
        coherence: their q, (k,).
        compared: where q compares two frames, bool (k,).
    """

    group: int
    parameters: Sequence[Tensor]
    coherence: Tensor
    compared: Tensor


class Ownership:
    """What the optimizer asks about parameters and ranks, in this order; here of a single process.

    `rpt.distributed` has the answers of several ranks.
    """

    def agree(self, live: list[Live], observed: Committed) -> Agreement:
        """Begin a step, from this rank's gradients and observations."""
        gradients = [gradient for *_, gradient in live]
        # One host synchronisation: which parameters take part is the host's decision.
        return Agreement(live, largest_entries(gradients).tolist(), observed)

    def refuse(self, error: Exception) -> None:
        """Instead of `agree`: this rank cannot take the step; let the others know."""

    def owns(self, parameter: Tensor) -> bool:
        """Whether its state lives here and its update is computed here."""
        return True

    def portions(self, live: list[Live]) -> Iterable[list[Live]]:
        """What to compute here, part by part, with gradients of whole parameters, plain tensors."""
        return [live]

    def weight_norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """‖W‖ of whole parameters that are being computed here, (k,)."""
        return weight_norms(parameters)

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
        apply_updates(parameters, updates, size)

    def fail(self, error: Exception) -> None:
        """A part could not be computed: leave no other rank waiting."""

    def finish(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """End the step; returns the outcomes of all ranks' parameters."""
        return outcomes

    def whole_state(self, state: Mapping[Tensor, Any]) -> Mapping[Tensor, Any]:
        """The state of all parameters, for a checkpoint."""
        return state

    def adopt_state(self, state: Mapping[Tensor, Any]) -> None:
        """After loading: keep in `state` what belongs here."""


def check_mode(mode: OwnershipMode | Ownership) -> OwnershipMode | Ownership:
    """The optimizer's `ownership` option, if it is one.

    Raises:
        ValueError: no such mode.
    """
    modes = get_args(OwnershipMode)
    if isinstance(mode, str) and mode not in modes:
        raise ValueError(
            f"ownership={mode!r} is unknown: choose one of {', '.join(map(repr, modes))}"
        )
    return mode


def choose_ownership(
    mode: OwnershipMode | Ownership, optimizer: Optimizer, previous: Ownership | None
) -> Ownership:
    """The object for a mode; `rpt.distributed` says what each does on several ranks.

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
        return Ownership()
    # Imported here so that a single process never loads it.
    from .distributed import distribute

    return distribute(mode, optimizer, previous)


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor; asked by attribute, so that DTensor need not be imported."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "full_tensor")


def unreadable(parameter: Tensor) -> bool:
    """Whether its entries have no values: a meta tensor, or a fake one of a tracer."""
    return parameter.device.type == "meta" or is_fake(parameter)
