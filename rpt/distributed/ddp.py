"""Replicas: every rank holds the whole parameter, and the gradient has been averaged (DDP)."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Box, whole_box

__all__ = ["Replica"]


class Replica:
    """A plain parameter, the same on `size` ranks."""

    sharded = False

    def __init__(self, parameter: Tensor, size: int) -> None:
        if getattr(parameter, "_is_flat_param", False) or getattr(
            parameter, "_fsdp_flattened", False
        ):
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} belongs to FSDP1 "
                "(FullyShardedDataParallel), whose flat shards have lost the matrices that RPT works "
                "on. Shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        self.parameter = parameter
        self.boxes: list[Box] = [whole_box(parameter.shape)] * size

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def source(self, box: Box, owner: int) -> int:
        return owner

    def global_shape(self) -> torch.Size:
        return self.parameter.shape
