"""Lightning: attach the module, and send telemetry to its loggers."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from .scalars import refuse_unused, telemetry_scalars, transport_of

__all__ = ["TelemetryCallback"]


class TelemetryCallback(Callback):  # type: ignore[misc]
    """Telemetry to the loggers of a Lightning `Trainer`, and into its `callback_metrics`.

    Args:
        every: steps between two readings; None: the Trainer's `log_every_n_steps`.
        attach: also attach the module when training begins.
        prefix: put in front of every name.
        **options: of `ResidualPolarTransport.attach_model`.
    """

    def __init__(
        self,
        every: int | None = None,
        *,
        attach: bool = False,
        prefix: str = "rpt/",
        **options: Any,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every={every} must be at least 1, a number of steps")
        refuse_unused(options, attach)
        self.every, self.attach, self.prefix, self.options = every, attach, prefix, options
        self._last = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step
        optimizer = transport_of(trainer.optimizers[0])
        if self.attach:
            optimizer.attach_model(pl_module, **self.options)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *batch: Any, **more: Any
    ) -> None:
        step, every = trainer.global_step, self.every or trainer.log_every_n_steps
        # Several batches make one step where gradients accumulate: one reading for it.
        if not every or step == self._last or step % every:
            return
        self._last = step
        numbers = telemetry_scalars(trainer.optimizers[0], self.prefix)
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in numbers.items()})
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)
