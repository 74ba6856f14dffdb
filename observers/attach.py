"""From a model to running observers: strategy, sites and cadence in one object."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from .cadence import Cadence
from .caller import warn
from .compiled import CompiledObserver
from .explicit import ExplicitObserver
from .hook import HookObserver, Observer
from .selection import Site, select_sites
from .staging import ObservationStage

__all__ = ["STRATEGIES", "Attachment", "attach"]

STRATEGIES: dict[str, Callable[[], Observer]] = {
    "hook": HookObserver,
    "compiled": CompiledObserver,
    "explicit": ExplicitObserver,
}


# Below the first percentile of q on a small GPT: a turn that noise alone does not make.
COHERENCE_THRESHOLD = -0.5


class Observed(NamedTuple):
    """An observed layer: its dotted path in the model, and its matrix."""

    name: str
    parameter: Tensor


class Attachment:
    """A model under observation.

    A deep copy observes the copied model, if model and optimizer are copied in one call. A pickle
    is None: hooks are never serialised.

    Attributes:
        sites: The observed layers.
        observer: The strategy at work.
        stage: Where observations wait for the step.
    """

    def __init__(
        self, sites: list[Site], observer: Observer, cadence: Cadence, stage: ObservationStage
    ) -> None:
        self.sites = [Observed(site.name, site.parameter) for site in sites]
        self.observer = observer
        self.stage = stage
        self._cadence = cadence
        self._warned: set[str] = set()
        observer.attach(sites, stage)
        observer.schedule(cadence.due)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        self._cadence.settle()
        twin: Attachment = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.observer.schedule(twin._cadence.due)
        return twin

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _unserialised, ()

    @property
    def lost(self) -> bool:
        """Whether this is the copy of an attachment whose model was not copied with it."""
        return isinstance(self.observer, HookObserver) and self.observer.lost

    def detach(self) -> None:
        """Remove every tap from the model. What is staged stays staged."""
        self.observer.detach()
        self.sites = []

    def clear(self) -> None:
        """Drop what is staged for the observed layers."""
        self.observer.clear()

    def after_step(self, coherence: Mapping[Tensor, Tensor] | None = None) -> None:
        """End an optimizer step, after the stage's commit and before gradients are cleared.

        Advances the cadence, and warns, once per layer, of those that were due and received a
        gradient but were not observed.

        Args:
            coherence: Each parameter's frame coherence q in this step, 0-d.
        """
        if not self.sites:
            return
        observed = self.stage.last_counts
        silent = [
            site.name
            for site in self.sites
            if site.parameter not in observed
            and site.parameter.grad is not None
            and self._cadence.due(site.parameter)
            and site.name not in self._warned
        ]
        if silent:
            self._warned.update(silent)
            warn(_silence(silent))
        self._cadence.advance(observed, coherence or {})
        self.observer.schedule(self._cadence.due)

    def ages(self) -> dict[Tensor, int]:
        """Steps since each observed parameter's last measurement, for checkpoints.

        Empty where the caller decides when to measure.
        """
        return {} if isinstance(self.observer, ExplicitObserver) else self._cadence.ages()

    def restore_ages(self, ages: Mapping[Tensor, int]) -> None:
        """Continue the cadence of a checkpoint."""
        self._cadence.restore(ages)
        self.observer.schedule(self._cadence.due)


def _silence(names: list[str]) -> str:
    which = ", ".join(repr(name) for name in names)
    return (
        f"observed layers produced no statistics in this step: {which}. Either the model was "
        "compiled before it was attached, or another of its class was (attach first, then "
        "torch.compile; torch.compiler.reset() forgets earlier graphs), or the layer's weight "
        "is used without calling the layer, as nn.MultiheadAttention and F.linear do (call "
        "optimizer.observe_residual with its activations and cotangents, or leave it out with "
        "sites= or module_filter=). Until then such a layer is updated without an observation of "
        "its own."
    )


def _unserialised() -> None:
    """What an attachment is after unpickling."""


def attach(
    model: nn.Module,
    owned: Iterable[Tensor],
    stage: ObservationStage,
    *,
    module_filter: Callable[[nn.Module], bool] | None = None,
    strategy: str | Observer = "hook",
    observe_every: int = 1,
    sites: Iterable[Any] | None = None,
    coherence_threshold: float = COHERENCE_THRESHOLD,
    replacing: Attachment | None = None,
) -> Attachment:
    """Observe `model`'s layers into `stage`.

    Args:
        model: Whose layers to observe.
        owned: The optimizer's parameters.
        stage: Where observations wait for the optimizer's step.
        module_filter: Overrides what the model declares, and the default of every linear layer.
        strategy: "hook", "compiled", "explicit", or an `Observer` of your own.
        observe_every: Measure in every k-th step.
        sites: Exactly these layers: modules, dotted names, or what `derive_sites` returned.
        coherence_threshold: Measure again at once after q fell below it.
        replacing: An earlier attachment, detached once it is known that this one can be.

    Raises:
        TypeError: For a model, filter or strategy of another kind.
        ValueError: For an unknown strategy or cadence, or a layer that cannot be observed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model to attach must be an nn.Module, got {type(model).__name__}")
    if module_filter is not None and (
        isinstance(module_filter, nn.Module) or not callable(module_filter)
    ):
        raise TypeError(
            "module_filter must be a function from a module to True or False, got "
            f"{type(module_filter).__name__}: layers or their names go to sites=[…]"
        )
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {sorted(STRATEGIES)}, got {strategy!r}")
        observer = STRATEGIES[strategy]()
    elif isinstance(strategy, Observer):
        observer = strategy
    else:
        raise TypeError(f"strategy must be a name or an Observer, got {type(strategy).__name__}")
    chosen = select_sites(
        model, owned, module_filter, sites, isinstance(observer, ExplicitObserver)
    )
    cadence = Cadence((site.parameter for site in chosen), observe_every, coherence_threshold)
    if replacing is not None:
        replacing.detach()
    return Attachment(chosen, observer, cadence, stage)
