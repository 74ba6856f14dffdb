"""Long sequences: attention sums and gradients row block by row block, opaque to the compiler.

Rows are taken some at a time against all the keys they may see: memory is linear in the number of
tokens. The loops live in two custom operators, so that `torch.compile` sees one call each instead
of unrolling them.

Both operators take the list of tensors (query level, scale, vector; key level, scale, vector;
value a, u; gain). A block has no more than `block_size` scores per head, or 8 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block import Bias, BlockScores, Upstream, Values, block_gradients, block_scores, block_sums
from .scores import ScoreCoordinates


class _Block(NamedTuple):
    """Some query rows and the keys that some of them may see."""

    rows: slice
    keys: slice
    query: ScoreCoordinates
    key: ScoreCoordinates
    value: Values
    scores: BlockScores
    biased: Tensor


def _blocks(
    tensors: list[Tensor],
    bias: Tensor | None,
    causal_offset: int | None,
    row_block: int,
    block_size: int,
) -> Iterator[_Block]:
    """The blocks of one batch entry; one empty block where there are no queries."""
    value, gain, added = Values.of(*tensors[6:8]), tensors[8], Bias(bias, causal_offset)
    n, m = tensors[0].shape[-1], tensors[3].shape[-1]
    height = min(row_block, max(8, block_size // max(m, 1)))
    for start in range(0, max(n, 1), height):
        stop = min(start + height, n)
        rows, keys = slice(start, stop), slice(0, added.keys_of(stop, m))
        query, key = _part(tensors[:3], rows), _part(tensors[3:6], keys)
        scores = block_scores(query, key)
        biased = added.add_to(scores.squared * -gain, start)
        yield _Block(rows, keys, query, key, value.part(keys), scores, biased)


def _part(tensors: list[Tensor], tokens: slice) -> ScoreCoordinates:
    level, scale, vector = tensors
    return ScoreCoordinates(level[..., tokens], scale[..., tokens], vector[..., tokens, :])


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


# Schemas are spelt out: torch 2.6 cannot infer one from `list[Tensor]`.
@torch.library.custom_op(
    "rpt_lorentz::blocked_sums",
    mutates_args=(),
    schema="(Tensor[] tensors, Tensor? bias, int? causal_offset, int row_block, int block_size)"
    " -> Tensor[]",
)
def blocked_sums(
    tensors: list[Tensor],
    bias: Tensor | None,
    causal_offset: int | None,
    row_block: int,
    block_size: int,
) -> list[Tensor]:
    """`RowSums` of all queries, and the log of the softmax sum (…, N), 0 where no key is left."""
    options = causal_offset, row_block, block_size
    entries = _entries(tensors, bias)
    if entries is not None:
        each = [blocked_sums(*entry, *options) for entry in entries]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]
    found = []
    for block in _blocks(tensors, bias, *options):
        log_sum = torch.logsumexp(block.biased, -1)
        log_sum = torch.where(log_sum > -torch.inf, log_sum, 0.0)
        p = torch.exp(block.biased.sub_(log_sum.unsqueeze(-1)))
        found.append((*block_sums(p, block.value), log_sum))
    space, *flat = zip(*found, strict=True)
    return [torch.cat(space, -2), *(torch.cat(parts, -1) for parts in flat)]


@blocked_sums.register_fake
def _(tensors: list[Tensor], *_: Any) -> list[Tensor]:
    level, value_u = tensors[0], tensors[7]
    dtype = value_u.dtype if value_u.device.type == "mps" else torch.float64
    rows = [value_u.new_empty(level.shape, dtype=dtype) for _ in range(2)]
    space = value_u.new_empty((*level.shape, value_u.shape[-1]), dtype=dtype)
    return [space, *rows, value_u.new_empty(level.shape)]


@torch.library.custom_op(
    "rpt_lorentz::blocked_gradients",
    mutates_args=(),
    schema="(Tensor[] tensors, Tensor? bias, Tensor log_sum, Tensor[] upstream, int? causal_offset,"
    " int row_block, int block_size) -> Tensor[]",
)
def blocked_gradients(
    tensors: list[Tensor],
    bias: Tensor | None,
    log_sum: Tensor,
    upstream: list[Tensor],
    causal_offset: int | None,
    row_block: int,
    block_size: int,
) -> list[Tensor]:
    """Gradients by the tensors of the list, the last by gain per batch entry and head, summed over
    blocks that are recomputed; with the meaning of `BlockGradients`."""
    options = causal_offset, row_block, block_size
    entries = _entries(tensors, bias)
    if entries is not None:
        each = [
            blocked_gradients(*entry, log_sum[i], [t[i] for t in upstream], *options)
            for i, entry in enumerate(entries)
        ]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]
    totals = [torch.zeros_like(t) for t in tensors[:8]]
    gain_total = torch.zeros_like(log_sum[..., 0])
    by_sum, by_deficit, direction, mean = upstream
    for block in _blocks(tensors, bias, *options):
        rows = block.rows
        up = Upstream(
            by_sum[..., rows, :], by_deficit[..., rows], direction[..., rows, :], mean[..., rows]
        )
        p = torch.exp(block.biased.sub_(log_sum[..., rows].unsqueeze(-1)))
        g = block_gradients(block.query, block.key, block.value, block.scores, p, up)
        _add(totals[:3], g.query, rows)
        _add(totals[3:], (*g.key, g.a, g.u), block.keys)
        gain_total = gain_total + g.gain
    return [*totals, gain_total]


@blocked_gradients.register_fake
def _(tensors: list[Tensor], bias: Tensor | None, log_sum: Tensor, *_: Any) -> list[Tensor]:
    return [*(torch.empty_like(t) for t in tensors[:8]), torch.empty_like(log_sum[..., 0])]


def _add(totals: list[Tensor], parts: tuple[Tensor, ...], where: slice) -> None:
    """Add per-token gradients into their rows; the token axis is −2 for vectors, else −1."""
    vector_dim = totals[0].dim() + 1
    for total, part in zip(totals, parts, strict=True):
        target = total[..., where, :] if total.dim() == vector_dim else total[..., where]
        target += part
