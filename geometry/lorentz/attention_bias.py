"""What is added to attention scores, block by block, and the small pieces blocks share."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .attention_block import BlockScores
from .score import ScoreCoordinates

__all__ = ["Bias", "Range", "biased_scores", "causal_bias", "part_of", "ranges"]

Range: TypeAlias = tuple[int, int]


class Bias(NamedTuple):
    """What is added to the scores: a tensor that broadcasts to (…, N, M), and causality."""

    tensor: Tensor | None
    causal_offset: int | None

    def add_to(self, score: Tensor, rows: Range, columns: Range) -> Tensor:
        """Scores of a block with its bias."""
        if self.tensor is not None:
            part = self.tensor
            if part.shape[-2] > 1:
                part = part[..., rows[0] : rows[1], :]
            if part.shape[-1] > 1:
                part = part[..., columns[0] : columns[1]]
            score = score + part
        if self.causal_offset is not None and columns[1] - 1 > rows[0] + self.causal_offset:
            score = score + causal_bias(
                rows[1] - rows[0],
                columns[1] - columns[0],
                score,
                rows[0] + self.causal_offset - columns[0],
            )
        return score

    def excludes(self, rows: Range, columns: Range) -> bool:
        """Whether causality excludes the whole block."""
        return self.causal_offset is not None and columns[0] > rows[1] - 1 + self.causal_offset


def causal_bias(rows: int, columns: int, like: Tensor, offset: int) -> Tensor:
    """(rows, columns): −inf where key j > query i + offset, else 0."""
    later = torch.ones(rows, columns, dtype=torch.bool, device=like.device).triu(offset + 1)
    return torch.zeros(rows, columns, dtype=like.dtype, device=like.device).masked_fill_(
        later, -torch.inf
    )


def ranges(length: int, size: int) -> list[Range]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def part_of(x: ScoreCoordinates, part: Range) -> ScoreCoordinates:
    start, stop = part
    return ScoreCoordinates(
        x.level[..., start:stop], x.scale[..., start:stop], x.vector[..., start:stop, :]
    )


def biased_scores(
    scores: BlockScores, gain: Tensor, bias: Bias, rows: Range, columns: Range
) -> Tensor:
    """−g D² + bias of one block."""
    return bias.add_to(scores.squared * -gain, rows, columns)
