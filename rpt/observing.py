"""The optimizer's calls that concern observation; the statistics themselves are `rpt.observers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from rpt.observers.attach import Attachment, attach
from rpt.observers.caller import warn
from rpt.observers.explicit import ExplicitObserver
from rpt.observers.staging import ObservationStage

from .checkpoint import canonical_name

__all__ = ["ObservingOptimizer"]

Self = TypeVar("Self", bound="ObservingOptimizer")


class ObservingOptimizer(Optimizer):
    """An optimizer with a stage of observations, and perhaps an attached model."""

    _stage: ObservationStage
    _attachment: Attachment | None
    _observe_every: int
    _names: dict[Tensor, str]  # what attached models call their parameters
    _bereft: bool  # whether the run that this one continues had a model to observe

    def attach_model(
        self,
        model: nn.Module,
        module_filter: Callable[[nn.Module], bool] | None = None,
        *,
        strategy: str = "hook",
        observe_every: int | None = None,
        sites: Iterable[Any] | None = None,
    ) -> list[str]:
        """Observe a model's boundaries, replacing an earlier attachment.

        Observed are the modules that the model, or any module inside it, names in
        `optimizer_observation_modules()`; without one, every `nn.Linear` (and `Conv1D` of
        transformers) of this optimizer whose smaller side is at least 2. `module_filter` and `sites`
        override both. One warning says what was found where that leaves nothing.

        Args:
            model: the model that is trained.
            module_filter: True for modules to observe.
            strategy: "hook", or "compiled" for a model that `torch.compile` is to take whole.
            observe_every: measure at every k-th update; None: 4, or with `preset="paper"` in each.
            sites: modules, module names, or what `rpt.observers.derive_sites` returned.

        Returns:
            The names of the observed modules.

        Raises:
            TypeError, ValueError: what cannot be attached; an earlier attachment then stays.
        """
        self._attachment = attach(
            model,
            self._all_parameters(),
            self._stage,
            module_filter=module_filter,
            strategy=strategy,
            observe_every=self._observe_every if observe_every is None else observe_every,
            sites=sites,
            replacing=self._attachment,
        )
        self._bereft = False
        names: dict[Tensor, str] = {p: canonical_name(name) for name, p in model.named_parameters()}
        self._names |= {p: names[p] for p in self._all_parameters() if p in names}
        self._restore_observation_ages()
        return [name for name, *_ in self._attachment.sites]

    @contextmanager
    def observing(self: Self, model: nn.Module, **options: Any) -> Iterator[Self]:
        """Observe a model inside a `with` block; options as in `attach_model`."""
        self.attach_model(model, **options)
        try:
            yield self
        finally:
            self.remove_observers()

    def observe_residual(
        self,
        activations: Tensor,
        residuals: Tensor,
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Queue one observation by hand, for maps that no module hook can see.

        Args:
            activations: X, (..., n): the input of the linear map.
            residuals: Δ, (..., m): the cotangent of its output.
            parameters: whose polar weight it concerns; None for every matrix without its own.

        Returns:
            The normalised entropy rank, 0-d.

        Raises:
            ValueError: widths that do not fit a named weight, or rows that do not match.
        """
        explicit = ExplicitObserver(self._stage)
        return explicit.observe(activations, residuals, self._own(parameters))

    def set_residual_entropy_rank(
        self, rank: float | Tensor, parameters: Tensor | Iterable[Tensor] | None = None
    ) -> None:
        """Queue a known entropy rank in [0, 1] for the next step; parameters as above."""
        for parameter in self._own(parameters) or [None]:
            self._stage.add_rank(rank, parameter)

    def clear_observations(self) -> None:
        """Drop everything observed since the last step."""
        self._stage.clear()
        if self._attachment is not None:
            self._attachment.clear()

    def remove_observers(self) -> None:
        """Detach from the model; polar weights keep their values."""
        self._detach()
        for record in self.state.values():
            if "observation_age" in record:
                record["observation_age"] = 0

    def _detach(self) -> None:
        self._bereft = False
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None

    def _end_observed_step(self, coherence: Mapping[Tensor, Tensor]) -> None:
        """Advance the cadence; say so, once, where a copy or a loaded run has lost its model."""
        if self._attachment is not None and self._attachment.lost:
            self._detach()
            self._bereft = True
        if self._bereft:
            self._bereft = False
            warn(
                "this optimizer continues a run that observed a model, but observes none itself: it "
                "was unpickled, loaded, or copied without the model. Call attach_model(model) on it, "
                "or remove_observers() if that is meant; until then polar weights stay as they are"
            )
        elif self._attachment is not None:
            self._attachment.after_step(coherence)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and drop observations of the backward passes they came from."""
        self.clear_observations()
        super().zero_grad(set_to_none)

    def _note_observation_ages(self) -> None:
        """Write the observers' cadence into the state, so that a resumed run measures when this would."""
        if self._attachment is not None:
            for parameter, age in self._attachment.ages().items():
                if "step" in self.state.get(parameter, {}):
                    self.state[parameter]["observation_age"] = age

    def _restore_observation_ages(self) -> None:
        ages = {p: r["observation_age"] for p, r in self.state.items() if r.get("observation_age")}
        if self._attachment is not None:
            self._attachment.restore_ages(ages)
        else:
            self._bereft = bool(ages)

    def _all_parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _own(self, parameters: Tensor | Iterable[Tensor] | None) -> list[Any] | None:
        """The chosen parameters as a list, each checked to belong to this optimizer."""
        if parameters is None:
            return None
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owned = {id(p) for p in self._all_parameters()}
        for parameter in chosen:
            if id(parameter) not in owned:
                raise ValueError(
                    f"a tensor of shape {tuple(parameter.shape)} is no parameter of this optimizer: "
                    "pass the module's own weight"
                )
        if not chosen:
            raise ValueError("parameters is empty: pass None to reach every matrix")
        return chosen
