"""Long sequences: attention sums and gradients row block by row block, opaque to the compiler.

Rows are taken `row_block` at a time against all keys (or, beyond `key_block` keys, against one key
block after another with an online softmax): memory is linear in the number of tokens. The loops
live in two custom operators, so that `torch.compile` sees one call each instead of unrolling them.

Both operators take the list of tensors (query level, scale, vector; key level, scale, vector;
value a, u; gain).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .block import (
    Bias,
    Range,
    RowSums,
    Upstream,
    Values,
    biased_scores,
    block_gradients,
    block_scores,
    block_sums,
    deficit_share,
    finish_sums,
    part_of,
    partial_sums,
    ranges,
)
from .scores import ScoreCoordinates

__all__ = ["blocked_gradients", "blocked_sums"]


class _Problem(NamedTuple):
    """One batch entry."""

    query: ScoreCoordinates
    key: ScoreCoordinates
    value: Values
    gain: Tensor
    bias: Bias

    @classmethod
    def of(cls, tensors: list[Tensor], bias: Tensor | None, causal_offset: int | None) -> _Problem:
        return cls(
            ScoreCoordinates(*tensors[0:3]),
            ScoreCoordinates(*tensors[3:6]),
            Values.of(*tensors[6:8]),
            tensors[8],
            Bias(bias, causal_offset),
        )

    def score(self, rows: Range, columns: Range) -> Tensor:
        scores = block_scores(part_of(self.query, rows), part_of(self.key, columns))
        return biased_scores(scores, self.gain, self.bias, rows, columns)

    def key_ranges(self, rows: Range, key_block: int) -> list[Range]:
        """The key blocks that some query of these rows may see."""
        return ranges(self.bias.keys_of(rows, self.value.sinh.shape[-1]), key_block)


def _log_sum(problem: _Problem, rows: Range, columns: list[Range]) -> tuple[Tensor, Tensor | None]:
    """The log of the softmax sum of some query rows (0 where no key is left), one key block at a
    time, and the scores if there is but one."""
    if len(columns) == 1:
        score = problem.score(rows, columns[0])
        log_sum = torch.logsumexp(score, -1)
        return torch.where(log_sum > -torch.inf, log_sum, 0.0), score
    largest = torch.full_like(part_of(problem.query, rows).level, -torch.inf)
    total = torch.zeros_like(largest)
    for part in columns:
        score = problem.score(rows, part)
        new_largest = torch.maximum(largest, score.amax(-1))
        finite = torch.where(new_largest > -torch.inf, new_largest, 0.0)
        total = total * torch.exp(largest - finite) + torch.exp(score - finite[..., None]).sum(-1)
        largest = new_largest
    reached = total > 0
    return torch.where(reached, largest + torch.log(torch.where(reached, total, 1.0)), 0.0), None


def _row_sums(problem: _Problem, rows: Range, columns: list[Range]) -> tuple[RowSums, Tensor]:
    """The sums of some query rows, and the log of their softmax sum."""
    log_sum, score = _log_sum(problem, rows, columns)
    value = problem.value
    if score is not None:
        p = torch.exp(score.sub_(log_sum.unsqueeze(-1)))
        return block_sums(p, value.part(*columns[0])), log_sum

    def weights_of(part: Range) -> Tensor:
        return torch.exp(problem.score(rows, part).sub_(log_sum.unsqueeze(-1)))

    sums = partial_sums(weights_of(columns[0]), value.part(*columns[0]))
    for part in columns[1:]:
        sums += partial_sums(weights_of(part), value.part(*part))
    found, unfinished = finish_sums(sums, value)
    if unfinished:
        shares = [deficit_share(weights_of(c), found.space, value.part(*c)) for c in columns]
        found = found._replace(deficit=torch.stack(shares).sum(0))
    return found, log_sum


def _entries(
    tensors: list[Tensor], bias: Tensor | None
) -> list[tuple[list[Tensor], Tensor | None]] | None:
    """One problem per batch entry, where there are several: transient blocks are that much
    smaller. The gain and the bias may broadcast."""
    level = tensors[0]
    if level.dim() < 3 or level.shape[0] < 2:
        return None

    def entry(x: Tensor, index: int) -> Tensor:
        return x if x.dim() <= level.dim() else x[index if x.shape[0] > 1 else 0]

    return [
        (
            [*(t[i] for t in tensors[:8]), entry(tensors[8], i)],
            None if bias is None else entry(bias, i),
        )
        for i in range(level.shape[0])
    ]


@torch.library.custom_op("rpt_lorentz::blocked_sums", mutates_args=())
def blocked_sums(
    tensors: list[Tensor],
    bias: Tensor | None,
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> list[Tensor]:
    """`RowSums` of all queries, and the log of the softmax sum (…, N)."""
    entries = _entries(tensors, bias)
    if entries is not None:
        options = causal_offset, row_block, key_block
        each = [blocked_sums(*entry, *options) for entry in entries]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]
    problem = _Problem.of(tensors, bias, causal_offset)
    rows = [
        _row_sums(problem, part, problem.key_ranges(part, key_block))
        for part in ranges(tensors[0].shape[-1], row_block)
    ]
    space, *flat = zip(*((*sums, log_sum) for sums, log_sum in rows), strict=True)
    return [torch.cat(space, -2), *(torch.cat(parts, -1) for parts in flat)]


@blocked_sums.register_fake
def _(
    tensors: list[Tensor],
    bias: Tensor | None,
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> list[Tensor]:
    level, value_u = tensors[0], tensors[7]
    dtype = value_u.dtype if value_u.device.type == "mps" else torch.float64
    rows = [value_u.new_empty(level.shape, dtype=dtype) for _ in range(2)]
    space = value_u.new_empty((*level.shape, value_u.shape[-1]), dtype=dtype)
    return [space, *rows, value_u.new_empty(level.shape)]


@torch.library.custom_op("rpt_lorentz::blocked_gradients", mutates_args=())
def blocked_gradients(
    tensors: list[Tensor],
    bias: Tensor | None,
    log_sum: Tensor,
    upstream: list[Tensor],
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> list[Tensor]:
    """Gradients by the tensors of the list, the last by gain per batch entry and head, summed over
    blocks that are recomputed; with the meaning of `BlockGradients`."""
    entries = _entries(tensors, bias)
    if entries is not None:
        options = causal_offset, row_block, key_block
        each = [
            blocked_gradients(*entry, log_sum[i], [t[i] for t in upstream], *options)
            for i, entry in enumerate(entries)
        ]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]
    problem = _Problem.of(tensors, bias, causal_offset)
    totals = [torch.zeros_like(t) for t in tensors[:8]]
    gain_total = torch.zeros_like(log_sum[..., 0])
    for rows in ranges(tensors[0].shape[-1], row_block):
        some = slice(*rows)
        part = part_of(problem.query, rows)
        up = Upstream(
            upstream[0][..., some, :],
            upstream[1][..., some],
            upstream[2][..., some, :],
            upstream[3][..., some],
        )
        for keys in problem.key_ranges(rows, key_block):
            some_keys, values = part_of(problem.key, keys), problem.value.part(*keys)
            scores = block_scores(part, some_keys)
            score = biased_scores(scores, problem.gain, problem.bias, rows, keys)
            p = torch.exp(score.sub_(log_sum[..., some].unsqueeze(-1)))
            g = block_gradients(part, some_keys, values, scores, p, up)
            _add(totals[:3], g.query, some)
            _add(totals[3:], (*g.key, g.a, g.u), slice(*keys))
            gain_total = gain_total + g.gain
    return [*totals, gain_total]


@blocked_gradients.register_fake
def _(
    tensors: list[Tensor],
    bias: Tensor | None,
    log_sum: Tensor,
    upstream: list[Tensor],
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> list[Tensor]:
    return [*(torch.empty_like(t) for t in tensors[:8]), torch.empty_like(log_sum[..., 0])]


def _add(totals: list[Tensor], parts: tuple[Tensor, ...], where: slice) -> None:
    """Add per-token gradients into their rows; the token axis is −2 for vectors, else −1."""
    vector_dim = totals[0].dim() + 1
    for total, part in zip(totals, parts, strict=True):
        target = total[..., where, :] if total.dim() == vector_dim else total[..., where]
        target += part
