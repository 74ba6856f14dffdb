"""Polar attention in memory linear in the number of tokens, with a closed-form backward.

The two sums of `attention_block` are formed block by block over the keys: V with an online
softmax, F in a second sweep once û is known. The backward recomputes each block. No tensor of
(N, M) or (N, M, n) is stored, and none of (N, M, n) is formed.

A sequence that fits into one block keeps its (N, M) intermediates for the backward instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attention_block import (
    BlockScores,
    Upstream,
    Values,
    block_gradients,
    block_scores,
    block_terms,
)
from .centroid import point_from_sums
from .point import Point, PointLike, promote, radius_limit, without_autocast
from .score import ScoreCoordinates

__all__ = ["causal_bias", "fused_attention"]

_Range = tuple[int, int]


class _Bias(NamedTuple):
    """What is added to the scores: a tensor that broadcasts to (…, N, M), and causality."""

    tensor: Tensor | None
    causal_offset: int | None

    def add_to(self, score: Tensor, rows: _Range, columns: _Range) -> Tensor:
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

    def excludes(self, rows: _Range, columns: _Range) -> bool:
        """Whether causality excludes the whole block."""
        return self.causal_offset is not None and columns[0] > rows[1] - 1 + self.causal_offset


def causal_bias(rows: int, columns: int, like: Tensor, offset: int) -> Tensor:
    """(rows, columns): −inf where key j > query i + offset, else 0."""
    later = torch.ones(rows, columns, dtype=torch.bool, device=like.device).triu(offset + 1)
    return torch.zeros(rows, columns, dtype=like.dtype, device=like.device).masked_fill_(
        later, -torch.inf
    )


def _ranges(length: int, size: int) -> list[_Range]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _part(x: ScoreCoordinates, part: _Range) -> ScoreCoordinates:
    start, stop = part
    return ScoreCoordinates(
        x.level[..., start:stop], x.scale[..., start:stop], x.vector[..., start:stop, :]
    )


def _unit(space_sum: Tensor) -> Tensor:
    largest = space_sum.abs().amax(-1, keepdim=True)
    scaled = space_sum / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(norm > 0, norm, 1.0)


def _weights(
    scores: BlockScores, gain: Tensor, bias: _Bias, rows: _Range, columns: _Range
) -> Tensor:
    """−g D² + bias of one block."""
    return bias.add_to(scores.squared * -gain, rows, columns)


def _rows_at_once(
    scores: BlockScores, value: Values, gain: Tensor, bias: _Bias, rows: _Range
) -> tuple[Tensor, Tensor, Tensor]:
    """V, f and P of some query rows and all keys."""
    score = _weights(scores, gain, bias, rows, (0, value.sinh.shape[-1]))
    p = torch.softmax(score, -1)
    if bias.tensor is not None or (bias.causal_offset is not None and bias.causal_offset < 0):
        p = torch.where(score.amax(-1, keepdim=True) > -torch.inf, p, 0.0)
    space_sum = p @ value.space
    return space_sum, block_terms(_unit(space_sum), value), p


def _rows_in_one_block(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: Values,
    gain: Tensor,
    bias: _Bias,
    rows: _Range,
) -> tuple[Tensor, Tensor, Tensor]:
    """V, F and the log of the softmax sum of some query rows and all keys, in one sweep."""
    scores = block_scores(query, key)
    score = _weights(scores, gain, bias, rows, (0, value.sinh.shape[-1]))
    log_sum = torch.logsumexp(score, -1)
    log_sum = torch.where(log_sum > -torch.inf, log_sum, 0.0)
    p = torch.exp(score.sub_(log_sum.unsqueeze(-1)))
    space_sum = p @ value.space
    terms = block_terms(_unit(space_sum), value)
    return space_sum, terms.mul_(p).sum(-1), log_sum


def _rows_online(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: Values,
    gain: Tensor,
    bias: _Bias,
    rows: _Range,
    key_ranges: list[_Range],
) -> tuple[Tensor, Tensor, Tensor]:
    """V, F and the log of the softmax sum of some query rows, one key block at a time."""
    largest = torch.full_like(query.level, -torch.inf)
    total = torch.zeros_like(query.level)
    shape = (*query.level.shape, value.u.shape[-1])
    space_sum = torch.zeros(shape, dtype=value.u.dtype, device=value.u.device)
    for columns in key_ranges:
        if bias.excludes(rows, columns):
            continue
        scores = block_scores(query, _part(key, columns))
        score = _weights(scores, gain, bias, rows, columns)
        new_largest = torch.maximum(largest, score.amax(-1))
        finite = torch.where(new_largest > -torch.inf, new_largest, 0.0)
        shrink = torch.exp(largest - finite)
        weights = torch.exp(score - finite.unsqueeze(-1))
        total = total * shrink + weights.sum(-1)
        space_sum = space_sum * shrink.unsqueeze(-1) + weights @ value.part(*columns).space
        largest = new_largest
    reached = total > 0
    safe_total = torch.where(reached, total, 1.0)
    space_sum = space_sum / safe_total.unsqueeze(-1)
    log_sum = torch.where(reached, largest + torch.log(safe_total), 0.0)
    direction = _unit(space_sum)
    deficit = torch.zeros_like(total)
    for columns in key_ranges:
        if bias.excludes(rows, columns):
            continue
        scores = block_scores(query, _part(key, columns))
        p = torch.exp(_weights(scores, gain, bias, rows, columns) - log_sum.unsqueeze(-1))
        deficit = deficit + (p * block_terms(direction, value.part(*columns))).sum(-1)
    return space_sum, deficit, log_sum


class _AttentionSums(torch.autograd.Function):
    """(V, F) of all queries. Not twice differentiable: the dense reference is."""

    @staticmethod
    def forward(
        ctx: Any,
        query_level: Tensor,
        query_scale: Tensor,
        query_vector: Tensor,
        key_level: Tensor,
        key_scale: Tensor,
        key_vector: Tensor,
        value_a: Tensor,
        value_u: Tensor,
        gain: Tensor,
        bias: Tensor | None,
        causal_offset: int | None,
        row_block: int,
        key_block: int,
    ) -> tuple[Tensor, Tensor]:
        query = ScoreCoordinates(query_level, query_scale, query_vector)
        key = ScoreCoordinates(key_level, key_scale, key_vector)
        value, added = Values.of(value_a, value_u), _Bias(bias, causal_offset)
        n, m = query_level.shape[-1], key_level.shape[-1]
        ctx.causal_offset, ctx.row_block, ctx.key_block = causal_offset, row_block, key_block
        inputs = (*query, *key, value_a, value_u, gain, bias)
        if n * m <= row_block * key_block // 16:
            scores = block_scores(query, key)
            space_sum, terms, p = _rows_at_once(scores, value, gain, added, (0, n))
            deficit = (p * terms).sum(-1)
            ctx.save_for_backward(*inputs, space_sum, deficit, None, *scores, p, terms)
            return space_sum, deficit
        key_ranges = _ranges(m, key_block)
        parts = [
            _rows_online(_part(query, rows), key, value, gain, added, rows, key_ranges)
            if len(key_ranges) > 1
            else _rows_in_one_block(_part(query, rows), key, value, gain, added, rows)
            for rows in _ranges(n, row_block)
        ]
        space_sum = torch.cat([part[0] for part in parts], -2)
        deficit = torch.cat([part[1] for part in parts], -1)
        log_sum = torch.cat([part[2] for part in parts], -1)
        ctx.save_for_backward(*inputs, space_sum, deficit, log_sum)
        return space_sum, deficit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_sum: Tensor, by_deficit: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        query, key = ScoreCoordinates(*saved[0:3]), ScoreCoordinates(*saved[3:6])
        value_a, value_u, gain, bias, space_sum, deficit, log_sum = saved[6:13]
        value, added = Values.of(value_a, value_u), _Bias(bias, ctx.causal_offset)
        row_mean = (by_sum * space_sum).sum(-1) + by_deficit * deficit
        upstream = Upstream(by_sum, by_deficit, row_mean, _unit(space_sum))
        with without_autocast(value_u.device.type):
            if len(saved) > 13:
                scores, p, terms = BlockScores(*saved[13:16]), saved[16], saved[17]
                g = block_gradients(query, key, value, scores, p, terms, upstream)
                flat = [*g.query, *g.key, g.a, g.u]
                by_gain = g.gain
            else:
                flat, by_gain = _blockwise_gradients(
                    query, key, value, gain, added, log_sum, upstream, ctx
                )
        # What all gradients of queries and keys share: ∂score/∂c = −2g D/sinh D.
        common = -2.0 * gain
        for index in range(6):
            flat[index] = flat[index] * (common if flat[index].dim() > 3 else common.squeeze(-1))
        by_gain = by_gain[..., None, None].sum_to_size(gain.shape)
        return (*flat, by_gain, None, None, None, None)


def _blockwise_gradients(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: Values,
    gain: Tensor,
    bias: _Bias,
    log_sum: Tensor,
    upstream: Upstream,
    ctx: Any,
) -> tuple[list[Tensor], Tensor]:
    """Sum of all blocks' gradients, each block recomputed."""
    query_total = [torch.zeros_like(t) for t in query]
    key_total = [torch.zeros_like(t) for t in (*key, value.sinh, value.u)]
    gain_total = torch.zeros_like(log_sum[..., 0])
    key_ranges = _ranges(key.level.shape[-1], ctx.key_block)
    for rows in _ranges(query.level.shape[-1], ctx.row_block):
        some = slice(*rows)
        part = _part(query, rows)
        up = Upstream(
            upstream.by_sum[..., some, :],
            upstream.by_deficit[..., some],
            upstream.row_mean[..., some],
            upstream.direction[..., some, :],
        )
        for columns in key_ranges:
            if bias.excludes(rows, columns):
                continue
            keys, values = _part(key, columns), value.part(*columns)
            scores = block_scores(part, keys)
            score = _weights(scores, gain, bias, rows, columns)
            p = torch.exp(score - log_sum[..., some].unsqueeze(-1))
            terms = block_terms(up.direction, values)
            g = block_gradients(part, keys, values, scores, p, terms, up)
            _add(query_total, g.query, some)
            _add(key_total, (*g.key, g.a, g.u), slice(*columns))
            gain_total = gain_total + g.gain
    return [*query_total, *key_total], gain_total


def _add(totals: list[Tensor], parts: tuple[Tensor, ...], where: slice) -> None:
    """Add per-token gradients into their rows; the token axis is −2 for vectors, else −1."""
    vector_dim = totals[0].dim() + 1
    for total, part in zip(totals, parts, strict=True):
        target = total[..., where, :] if total.dim() == vector_dim else total[..., where]
        target += part


def fused_attention(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: PointLike,
    gain: Tensor,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    row_block: int = 64,
    key_block: int = 4096,
) -> Point:
    """Centroids of the values under softmax(−gain · D² + bias), in memory linear in N and M.

    Args:
        query: score coordinates (…, N), (…, N, m), all leading dimensions alike in every argument.
        key: score coordinates (…, M), (…, M, m).
        value: points (…, M), (…, M, n).
        gain: broadcasts to (…, 1, 1): one number per batch entry or head at most.
        bias: broadcasts to (…, N, M), added to the scores; −inf excludes a key. No gradient.
        is_causal: query i sees keys up to i + M − N; no mask is formed for it.
        row_block: queries per block.
        key_block: keys per block.

    Returns:
        Points (…, N), (…, N, n); the origin where every key is excluded. Values equal
        `dense_attention`; second derivatives need that one.
    """
    ((a, u),) = promote(value)
    a = a.clamp(max=radius_limit(a.dtype))
    if gain.dim() and gain.shape[-2:] != (1, 1):
        raise ValueError(f"gain must have shape (…, 1, 1), got {tuple(gain.shape)}")
    if bias is not None and bias.requires_grad:
        raise ValueError("fused attention gives no gradient to a bias; use dense_attention")
    offset = key.level.shape[-1] - query.level.shape[-1] if is_causal else None
    with without_autocast(u.device.type):
        space_sum, deficit = _AttentionSums.apply(
            *query, *key, a, u, gain.to(u.dtype), bias, offset, row_block, key_block
        )
    return point_from_sums(space_sum, deficit)
