"""Replicas: every rank holds the whole parameter, and the gradient has been averaged (DDP)."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Box, whole_box

__all__ = ["Replica", "refuse_flat_shards"]


class Replica:
    """A plain parameter, the same on `size` ranks."""

    sharded = False

    def __init__(self, parameter: Tensor, size: int) -> None:
        self.parameter = parameter
        self.boxes: list[Box] = [whole_box(parameter.shape)] * size

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def source(self, box: Box, owner: int) -> int:
        return owner

    def global_shape(self) -> torch.Size:
        return self.parameter.shape


def refuse_flat_shards(parameter: Tensor) -> None:
    """Refuse a parameter of FSDP1, which looks like a plain tensor and is a piece of a flat one."""
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        raise RuntimeError(
            f"a parameter of local shape {tuple(parameter.shape)} belongs to FSDP1 "
            "(FullyShardedDataParallel), whose flat shards have lost the matrices that RPT works on. "
            "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
