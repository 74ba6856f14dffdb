"""The Hugging Face `Trainer`: attach the model, and put telemetry among its logs."""

from __future__ import annotations

from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from .scalars import refuse_unused, telemetry_scalars, transport_of

__all__ = ["TelemetryCallback"]


class TelemetryCallback(TrainerCallback):  # type: ignore[misc]
    """Telemetry in every log of a `transformers.Trainer`, as often as it logs.

    With `Trainer(..., callbacks=[TelemetryCallback()])` the numbers stand in `state.log_history`; reporters
    that the Trainer adds itself (TensorBoard, Weights & Biases) have by then been called.
    `add_to(trainer)` puts this callback in front of them.

    Args:
        attach: also attach the model when training begins, for an optimizer that the Trainer builds
            (`optimizer_cls_and_kwargs`).
        prefix: put in front of every name.
        **options: of `ResidualPolarTransport.attach_model`.
    """

    def __init__(self, *, attach: bool = False, prefix: str = "rpt/", **options: Any) -> None:
        refuse_unused(options, attach)
        self.attach, self.prefix, self.options = attach, prefix, options

    def add_to(self, trainer: Trainer) -> Trainer:
        """Put this callback before all others of `trainer`, so that every reporter gets the numbers."""
        trainer.callback_handler.callbacks.insert(0, self)
        return trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        optimizer = transport_of(given.get("optimizer"))
        if self.attach:
            optimizer.attach_model(given["model"], **self.options)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        # Evaluation logs too, and so does the summary at the end: only a log of training has a loss.
        logs = given.get("logs") or {}
        if "loss" not in logs:
            return
        numbers = telemetry_scalars(given.get("optimizer"), self.prefix)
        logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)
