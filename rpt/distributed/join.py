"""Uneven inputs: an optimizer inside torch's `Join` context, beside a DistributedDataParallel model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook


class JoinableOptimizer(Joinable):
    """Lets ranks that have run out of data go on computing the updates of what they own.

        with Join([ddp_model, JoinableOptimizer(optimizer)]):
            for batch in batches: ...

    A rank that has joined has no gradient: by the rule for missing gradients it takes that of the ranks
    still training.

    Args:
        optimizer: a `ResidualPolarTransport` over several ranks.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self._notify())

    def _notify(self) -> None:
        Join.notify_join_context(self)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Shadow(self.optimizer)

    @property
    def join_device(self) -> torch.device:
        return self.optimizer.param_groups[0]["params"][0].device

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class _Shadow(JoinHook):
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """One step without gradients of its own."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.step()
