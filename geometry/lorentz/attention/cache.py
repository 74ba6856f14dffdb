"""Keys and values of earlier tokens, for decoding step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.point import Point
from .scores import ScoreCoordinates

__all__ = [
    "PolarCache",
]


class PolarCache:
    """Encoded keys and values of the tokens seen so far, for decoding step by step.

    Every call of an attention layer with `cache=` appends its new tokens, in place; `length` is
    the number of tokens held. One cache per layer.
    """

    def __init__(self) -> None:
        self.key: ScoreCoordinates | None = None
        self.value: Point | None = None
        self.padding: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self.key is None else self.key.level.shape[-1]

    def append(
        self, key: ScoreCoordinates, value: Point, padding: Tensor | None
    ) -> tuple[ScoreCoordinates, Point, Tensor | None]:
        """Add new tokens and return everything held."""
        if padding is not None or self.padding is not None:
            held = self.length
            batch = key.level.shape[0]
            old, new = self.padding, padding
            if old is None:
                old = torch.zeros(batch, held, dtype=torch.bool, device=key.level.device)
            if new is None:
                count = key.level.shape[-1]
                new = torch.zeros(batch, count, dtype=torch.bool, device=key.level.device)
            self.padding = torch.cat([old, new], -1)
        if self.key is None or self.value is None:
            self.key, self.value = key, value
        else:
            self.key = ScoreCoordinates(
                torch.cat([self.key.level, key.level], -1),
                torch.cat([self.key.scale, key.scale], -1),
                torch.cat([self.key.vector, key.vector], -2),
            )
            self.value = Point(
                torch.cat([self.value.a, value.a], -1), torch.cat([self.value.u, value.u], -2)
            )
        return self.key, self.value, self.padding
