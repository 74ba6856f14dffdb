"""Long sequences: attention sums and gradients row block by row block, opaque to the compiler.

Rows are taken `row_block` at a time against all keys (or, beyond `key_block` keys, against one key
block after another with an online softmax): memory is linear in the number of tokens. The loops
live in two custom operators, so that `torch.compile` sees one call each instead of unrolling them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block import (
    Bias,
    Range,
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

__all__ = [
    "blocked_gradients",
    "blocked_sums",
]


def _rows_in_one_block(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: Values,
    gain: Tensor,
    bias: Bias,
    rows: Range,
) -> tuple[Tensor, Tensor, Tensor]:
    """V, F and the log of the softmax sum of some query rows and all keys, in one sweep."""
    scores = block_scores(query, key)
    score = biased_scores(scores, gain, bias, rows, (0, value.sinh.shape[-1]))
    log_sum = torch.logsumexp(score, -1)
    log_sum = torch.where(log_sum > -torch.inf, log_sum, 0.0)
    p = torch.exp(score.sub_(log_sum.unsqueeze(-1)))
    space_sum, deficit = block_sums(p, value)
    return space_sum, deficit, log_sum


def _rows_online(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: Values,
    gain: Tensor,
    bias: Bias,
    rows: Range,
    key_ranges: list[Range],
) -> tuple[Tensor, Tensor, Tensor]:
    """V, F and the log of the softmax sum of some query rows, one key block at a time."""
    kept = [columns for columns in key_ranges if not bias.excludes(rows, columns)] or key_ranges[:1]
    largest = torch.full_like(query.level, -torch.inf)
    total = torch.zeros_like(query.level)
    for columns in kept:
        score = biased_scores(block_scores(query, part_of(key, columns)), gain, bias, rows, columns)
        new_largest = torch.maximum(largest, score.amax(-1))
        finite = torch.where(new_largest > -torch.inf, new_largest, 0.0)
        weights = torch.exp(score - finite.unsqueeze(-1))
        total = total * torch.exp(largest - finite) + weights.sum(-1)
        largest = new_largest
    reached = total > 0
    log_sum = torch.where(reached, largest + torch.log(torch.where(reached, total, 1.0)), 0.0)

    def weights_of(columns: Range) -> Tensor:
        scores = block_scores(query, part_of(key, columns))
        score = biased_scores(scores, gain, bias, rows, columns)
        return torch.exp(score.sub_(log_sum.unsqueeze(-1)))

    sums = partial_sums(weights_of(kept[0]), value.part(*kept[0]))
    for columns in kept[1:]:
        sums += partial_sums(weights_of(columns), value.part(*columns))
    space_sum, deficit = finish_sums(sums, value.u.shape[-1])
    if deficit is None:
        shares = [deficit_share(weights_of(c), space_sum, value.part(*c)) for c in kept]
        deficit = torch.stack(shares).sum(0)
    return space_sum, deficit, log_sum


def _many(level: Tensor) -> bool:
    """Whether there are batch entries to take one by one: transient blocks are that much smaller."""
    return level.dim() > 2 and level.shape[0] > 1


def _entry(x: Tensor, index: int, dim: int) -> Tensor:
    """One batch entry of what broadcasts to `dim` dimensions."""
    return x if x.dim() < dim else x[index if x.shape[0] > 1 else 0]


def _sums(
    query: list[Tensor],
    key: list[Tensor],
    value_a: Tensor,
    value_u: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `blocked_sums` returns, of one batch entry."""
    queries, keys = ScoreCoordinates(*query), ScoreCoordinates(*key)
    value, added = Values.of(value_a, value_u), Bias(bias, causal_offset)
    key_ranges = ranges(keys.level.shape[-1], key_block)
    parts = []
    for rows in ranges(queries.level.shape[-1], row_block):
        part = part_of(queries, rows)
        if len(key_ranges) > 1:
            parts.append(_rows_online(part, keys, value, gain, added, rows, key_ranges))
        else:
            parts.append(_rows_in_one_block(part, keys, value, gain, added, rows))
    return (
        torch.cat([part[0] for part in parts], -2),
        torch.cat([part[1] for part in parts], -1),
        torch.cat([part[2] for part in parts], -1),
    )


@torch.library.custom_op("rpt_lorentz::blocked_sums", mutates_args=())
def blocked_sums(
    query: list[Tensor],
    key: list[Tensor],
    value_a: Tensor,
    value_u: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """V (…, N, n), F (…, N) and the log of the softmax sum (…, N) of all queries."""
    if _many(query[0]):
        dim = query[0].dim() + 1
        each = [
            _sums(
                [t[i] for t in query],
                [t[i] for t in key],
                value_a[i],
                value_u[i],
                _entry(gain, i, dim),
                None if bias is None else _entry(bias, i, dim),
                causal_offset,
                row_block,
                key_block,
            )
            for i in range(query[0].shape[0])
        ]
        first, second, third = zip(*each, strict=True)
        return torch.stack(first), torch.stack(second), torch.stack(third)
    return _sums(query, key, value_a, value_u, gain, bias, causal_offset, row_block, key_block)


@blocked_sums.register_fake
def _(
    query: list[Tensor],
    key: list[Tensor],
    value_a: Tensor,
    value_u: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    level = query[0]
    space_sum = value_u.new_empty((*level.shape, value_u.shape[-1]))
    return space_sum, value_u.new_empty(level.shape), value_u.new_empty(level.shape)


def _gradients(
    query: list[Tensor],
    key: list[Tensor],
    value_a: Tensor,
    value_u: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    log_sum: Tensor,
    upstream: list[Tensor],
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> list[Tensor]:
    """What `blocked_gradients` returns, of one batch entry."""
    queries, keys = ScoreCoordinates(*query), ScoreCoordinates(*key)
    value, added = Values.of(value_a, value_u), Bias(bias, causal_offset)
    query_total = [torch.zeros_like(t) for t in query]
    key_total = [torch.zeros_like(t) for t in (*key, value_a, value_u)]
    gain_total = torch.zeros_like(log_sum[..., 0])
    key_ranges = ranges(keys.level.shape[-1], key_block)
    for rows in ranges(queries.level.shape[-1], row_block):
        some = slice(*rows)
        part = part_of(queries, rows)
        up = Upstream(
            upstream[0][..., some, :],
            upstream[1][..., some],
            upstream[2][..., some],
            upstream[3][..., some, :],
        )
        for columns in key_ranges:
            if added.excludes(rows, columns):
                continue
            some_keys, values = part_of(keys, columns), value.part(*columns)
            scores = block_scores(part, some_keys)
            score = biased_scores(scores, gain, added, rows, columns)
            p = torch.exp(score.sub_(log_sum[..., some].unsqueeze(-1)))
            g = block_gradients(part, some_keys, values, scores, p, up)
            _add(query_total, g.query, some)
            _add(key_total, (*g.key, g.a, g.u), slice(*columns))
            gain_total = gain_total + g.gain
    return [*query_total, *key_total, gain_total]


@torch.library.custom_op("rpt_lorentz::blocked_gradients", mutates_args=())
def blocked_gradients(
    query: list[Tensor],
    key: list[Tensor],
    value_a: Tensor,
    value_u: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    log_sum: Tensor,
    upstream: list[Tensor],
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> list[Tensor]:
    """Gradients by queries, keys (each level, scale, vector), values (a, u) and gain, summed over
    blocks that are recomputed; with the meaning of `BlockGradients`."""
    if _many(query[0]):
        dim = query[0].dim() + 1
        each = [
            _gradients(
                [t[i] for t in query],
                [t[i] for t in key],
                value_a[i],
                value_u[i],
                _entry(gain, i, dim),
                None if bias is None else _entry(bias, i, dim),
                log_sum[i],
                [t[i] for t in upstream],
                causal_offset,
                row_block,
                key_block,
            )
            for i in range(query[0].shape[0])
        ]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]
    return _gradients(
        query,
        key,
        value_a,
        value_u,
        gain,
        bias,
        log_sum,
        upstream,
        causal_offset,
        row_block,
        key_block,
    )


@blocked_gradients.register_fake
def _(
    query: list[Tensor],
    key: list[Tensor],
    value_a: Tensor,
    value_u: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    log_sum: Tensor,
    upstream: list[Tensor],
    causal_offset: int | None,
    row_block: int,
    key_block: int,
) -> list[Tensor]:
    shaped = [torch.empty_like(t) for t in (*query, *key, value_a, value_u)]
    return [*shaped, torch.empty_like(log_sum[..., 0])]


def _add(totals: list[Tensor], parts: tuple[Tensor, ...], where: slice) -> None:
    """Add per-token gradients into their rows; the token axis is −2 for vectors, else −1."""
    vector_dim = totals[0].dim() + 1
    for total, part in zip(totals, parts, strict=True):
        target = total[..., where, :] if total.dim() == vector_dim else total[..., where]
        target += part
