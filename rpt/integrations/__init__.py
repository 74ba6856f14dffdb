"""Trainers and loggers: telemetry where a run's other figures go.

Each trainer's callback is in a module of its own, which imports that trainer: `rpt.integrations.huggingface`,
`rpt.integrations.lightning`. None is needed to train with them: the optimizer takes AdamW's place
(docs/clients.md).
"""

from .scalars import telemetry_scalars, transport_of, write_tensorboard

__all__ = ["telemetry_scalars", "transport_of", "write_tensorboard"]
