"""Polar attention in memory linear in the number of tokens, with a closed-form backward.

The two sums of `attention_block` are all that is kept of a row of scores: V first, which gives û,
then F. The backward recomputes each block. No tensor of (N, M) or (N, M, n) is stored, and none of
(N, M, n) is ever formed. A short sequence is one block, and keeps its (N, M) intermediates for the
backward instead.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.centroid import point_from_sums
from ..ops.point import Point, PointLike, promote, radius_limit, without_autocast
from .block import (
    Bias,
    BlockScores,
    Upstream,
    Values,
    biased_scores,
    block_gradients,
    block_scores,
    block_sums,
    unit_rows,
)
from .scores import ScoreCoordinates
from .sweeps import blocked_gradients, blocked_sums

__all__ = [
    "blocked_attention",
    "fused_attention",
]


# Up to 128 × 128 scores per head are kept rather than recomputed.
_SMALL = 128 * 128


def _weights(scores: BlockScores, gain: Tensor, bias: Bias, n: int, m: int) -> Tensor:
    """P of a whole sequence (…, N, M): zeros where every key is excluded."""
    score = biased_scores(scores, gain, bias, (0, n), (0, m))
    p = torch.softmax(score, -1)
    if bias.tensor is not None or (bias.causal_offset is not None and bias.causal_offset < 0):
        p = torch.where(score.amax(-1, keepdim=True) > -torch.inf, p, 0.0)
    return p


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
        n, m = query_level.shape[-1], key_level.shape[-1]
        ctx.causal_offset, ctx.row_block, ctx.key_block = causal_offset, row_block, key_block
        inputs = (*query, *key, value_a, value_u, gain, bias)
        ctx.small = n * m <= min(_SMALL, row_block * key_block)
        if ctx.small:
            value, added = Values.of(value_a, value_u), Bias(bias, causal_offset)
            scores = block_scores(query, key)
            p = _weights(scores, gain, added, n, m)
            space_sum, deficit = block_sums(p, value)
            ctx.save_for_backward(*inputs, space_sum, deficit, *scores, p)
        else:
            space_sum, deficit, log_sum = blocked_sums(
                list(query),
                list(key),
                value_a,
                value_u,
                gain,
                bias,
                causal_offset,
                row_block,
                key_block,
            )
            ctx.save_for_backward(*inputs, space_sum, deficit, log_sum)
        return space_sum, deficit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_sum: Tensor, by_deficit: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        query, key = ScoreCoordinates(*saved[0:3]), ScoreCoordinates(*saved[3:6])
        value_a, value_u, gain, bias, space_sum, deficit = saved[6:12]
        row_mean = (by_sum * space_sum).sum(-1) + by_deficit * deficit
        upstream = Upstream(by_sum, by_deficit, row_mean, unit_rows(space_sum))
        with without_autocast(value_u.device.type):
            if ctx.small:
                scores, p = BlockScores(*saved[12:15]), saved[15]
                value = Values.of(value_a, value_u)
                g = block_gradients(query, key, value, scores, p, upstream)
                *flat, by_gain = *g.query, *g.key, g.a, g.u, g.gain
            else:
                *flat, by_gain = blocked_gradients(
                    list(query),
                    list(key),
                    value_a,
                    value_u,
                    gain,
                    bias,
                    saved[12],
                    list(upstream),
                    ctx.causal_offset,
                    ctx.row_block,
                    ctx.key_block,
                )
        # What all gradients of queries and keys share: ∂score/∂c = −2g D/sinh D.
        common = -2.0 * gain
        for index, of_query in enumerate((*query, *key)):
            per_vector = of_query.dim() > query.level.dim()
            flat[index] = flat[index] * (common if per_vector or not gain.dim() else common[..., 0])
        by_gain = by_gain[..., None, None].sum_to_size(gain.shape)
        return (*flat, by_gain, None, None, None, None)


def blocked_attention(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: PointLike,
    gain: Tensor,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    row_block: int = 128,
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
        raise ValueError("blocked attention gives no gradient to a bias; use dense_attention")
    offset = key.level.shape[-1] - query.level.shape[-1] if is_causal else None
    with without_autocast(u.device.type):
        space_sum, deficit = _AttentionSums.apply(
            *query, *key, a, u, gain.to(u.dtype), bias, offset, row_block, key_block
        )
    return point_from_sums(space_sum, deficit)


def fused_attention(*arguments: Any, **options: Any) -> Point:
    """Deprecated name of `blocked_attention`."""
    warnings.warn(
        "fused_attention is now called blocked_attention, which is what it is",
        DeprecationWarning,
        stacklevel=2,
    )
    return blocked_attention(*arguments, **options)
