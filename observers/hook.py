"""Observation through forward hooks: the strategy for eager models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from .selection import Site
from .staging import ObservationStage
from .tap import TapSite, install

__all__ = ["HookObserver", "Observer"]


@runtime_checkable
class Observer(Protocol):
    """How observations of some layers reach a stage.

    Example:
        >>> from rpt.observers import HookObserver, Observer
        >>> isinstance(HookObserver(), Observer)
        True
    """

    def attach(self, sites: Sequence[Site], stage: ObservationStage) -> None:
        """Begin to observe `sites`, staging into `stage`; replaces an earlier attachment."""
        ...

    def detach(self) -> None:
        """Stop observing and leave nothing in the model."""
        ...

    def clear(self) -> None:
        """Drop what is staged for the observed layers."""
        ...

    def schedule(self, due: Callable[[Tensor], bool]) -> None:
        """Measure those parameters that are due, and pay nothing for the others."""
        ...


class HookObserver:
    """Taps each layer's output with a forward hook (see `rpt.observers.tap`).

    No module backward hook is involved: those wrap outputs in views, which forbids in-place
    activations, fire unevenly under activation checkpointing, and keep activations of abandoned
    graphs. If the model is compiled after attaching, the same hook traces into the compiled graph.

    Example:
        >>> import rpt, torch
        >>> from rpt.observers import HookObserver
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> rpt.RPT(model.parameters()).attach_model(model, strategy=HookObserver())
        ['0', '1']
    """

    through_operator = False

    def __init__(self) -> None:
        self._sites: list[TapSite] = []

    def attach(self, sites: Sequence[Site], stage: ObservationStage) -> None:
        self.detach()
        for site in sites:
            tapped = TapSite(site.name, site.module, site.parameter, stage)
            self._sites.append(tapped)
            install(tapped, site.module, self.through_operator)

    def detach(self) -> None:
        for site in self._sites:
            site.remove()
        self._sites = []

    def clear(self) -> None:
        for site in self._sites:
            site.stage.drop(site.parameter)

    def schedule(self, due: Callable[[Tensor], bool]) -> None:
        for site in self._sites:
            site.active = due(site.parameter)

    @property
    def lost(self) -> bool:
        """Whether no tap in any model leads here, as in a copy made without its model."""
        return bool(self._sites) and not any(site.installed for site in self._sites)

    def __deepcopy__(self, memo: dict[int, Any]) -> HookObserver:
        twin: HookObserver = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for site in twin._sites:
            site.attached = True
        return twin

    def __reduce__(self) -> tuple[type[HookObserver], tuple[()]]:
        # Hooks are never serialised: unpickled, it observes nothing until it is attached.
        return type(self), ()
