"""What an optimizer has to do with observation; the statistics themselves are `rpt.observers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rpt.observers.attach import Attachment, attach
from rpt.observers.caller import warn
from rpt.observers.explicit import ExplicitObserver
from rpt.observers.rank import ObserverSettings
from rpt.observers.staging import Committed, ObservationStage

from .ownership import Outcome

NOTHING = Committed({}, None, {})


class Observing:
    """A stage of observations, and perhaps an attached model.

    Attributes:
        anything: whether anything may be staged.
        bereft: whether the run that this one continues had a model to observe.
    """

    def __init__(self, settings: ObserverSettings, attachment: Attachment | None = None) -> None:
        self.stage = attachment.stage if attachment else ObservationStage(settings)
        self.attachment = attachment
        self.anything = attachment is not None
        self.bereft = False

    def attach(self, model: nn.Module, parameters: Sequence[Tensor], **options: Any) -> list[str]:
        """Observe a model in place of an earlier one; the names of the observed modules."""
        self.attachment = attach(
            model, parameters, self.stage, replacing=self.attachment, **options
        )
        self.anything, self.bereft = True, False
        return [name for name, *_ in self.attachment.sites]

    def detach(self) -> None:
        self.bereft = False
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None

    def remove(self, state: Mapping[Tensor, Any]) -> None:
        """Leave the model for good: nothing is expected of it after a resumption."""
        self.detach()
        for record in state.values():
            if "observation_age" in record:
                record["observation_age"] = 0

    def measure(self, activations: Tensor, residuals: Tensor, chosen: list[Any] | None) -> Tensor:
        self.anything = True
        return ExplicitObserver(self.stage).observe(activations, residuals, chosen)

    def queue(self, rank: float | Tensor, chosen: list[Any] | None) -> None:
        self.anything = True
        for parameter in chosen or [None]:
            self.stage.add_rank(rank, parameter)

    def clear(self) -> None:
        self.stage.clear()
        if self.attachment is not None:
            self.attachment.clear()

    def commit(self) -> Committed:
        # What is staged by hand outlives its observer.
        self.anything = self.attachment is not None
        return self.stage.commit()

    def end_step(self, peaks: Sequence[float], outcomes: Sequence[Outcome]) -> None:
        """Advance the cadence; say so, once, where a copy or a loaded run has lost its model."""
        # Distributed checkpoints make the state's keys by a step on zero gradients, which no forward
        # led to: nothing was to be observed.
        if peaks and not any(peaks):
            return
        if self.attachment is not None and self.attachment.lost:
            self.detach()
            self.bereft = True
        if self.bereft:
            self.bereft = False
            warn(
                "this optimizer continues a run that observed a model, but observes none itself: it "
                "was unpickled, loaded, or copied without the model. Call attach_model(model) on it, "
                "or remove_observers() if that is meant; until then polar weights stay as they are"
            )
        elif self.attachment is not None:
            self.attachment.after_step(
                {p: q for o in outcomes for p, q in zip(o.parameters, o.coherence, strict=True)}
            )

    def note_ages(self, state: Mapping[Tensor, Any]) -> None:
        """Write the cadence into the state, so that a resumed run measures when this would."""
        if self.attachment is not None:
            for parameter, age in self.attachment.ages().items():
                if "step" in state.get(parameter, {}):
                    state[parameter]["observation_age"] = age

    def restore_ages(self, state: Mapping[Tensor, Any]) -> None:
        """Continue the cadence of a checkpoint."""
        ages = {p: r["observation_age"] for p, r in state.items() if r.get("observation_age")}
        if self.attachment is not None:
            self.attachment.restore_ages(ages)
        else:
            self.bereft = bool(ages)


def own(
    parameters: Tensor | Iterable[Tensor] | None, all_of_them: Callable[[], Iterable[Tensor]]
) -> list[Any] | None:
    """The chosen parameters as a list, each checked to be one of the optimizer's."""
    if parameters is None:
        return None
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    owned = {id(p) for p in all_of_them()}
    for parameter in chosen:
        if id(parameter) not in owned:
            raise ValueError(
                f"a tensor of shape {tuple(parameter.shape)} is no parameter of this optimizer: pass "
                "the module's own weight"
            )
    if not chosen:
        raise ValueError("parameters is empty: pass None to reach every matrix")
    return chosen
