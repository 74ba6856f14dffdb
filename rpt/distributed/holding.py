"""How one parameter lies on the ranks of a team: the small interface that DDP and DTensor share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .layout import Box

__all__ = ["Holding"]


class Holding(Protocol):
    """One parameter's layout.

    Attributes:
        parameter: as the optimizer knows it.
        boxes: what every rank of the team holds of it.
        sharded: whether a rank holds less than the whole. Then gradients travel to the owner and the
            update's pieces travel back; else the owner's gradient is already whole, and what travels
            is the parameter's new value, which leaves replicas equal bit for bit by construction.
    """

    parameter: Tensor
    boxes: list[Box]
    sharded: bool

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's plain part of the parameter, or of its gradient."""
        ...

    def source(self, box: Box, owner: int) -> int:
        """The rank that sends this box of the gradient to the owner."""
        ...

    def global_shape(self) -> torch.Size: ...
