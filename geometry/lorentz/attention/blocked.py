"""Polar attention in memory linear in the number of tokens, with a closed-form backward.

The two sums of `block` are all that is kept of a row of scores, and the backward recomputes each
block: no (N, M) tensor is stored, and no (N, M, n) one is ever formed. A short sequence is one block,
and keeps its (N, M) intermediates for the backward instead.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..ops.centroid import point_from_sums
from ..ops.point import Point, PointLike, promote, without_autocast
from ..ops.scalar import limit_radius
from .block import (
    Bias,
    BlockScores,
    RowSums,
    Upstream,
    Values,
    block_gradients,
    block_scores,
    block_sums,
)
from .scores import ScoreCoordinates, attention_limit
from .sweeps import blocked_gradients, blocked_sums

# Up to 128 × 128 scores per head are kept rather than recomputed.
_SMALL = 128 * 128


def _weights(scores: BlockScores, gain: Tensor, bias: Bias) -> Tensor:
    """P of a whole sequence (…, N, M): zeros where every key is excluded."""
    score = bias.add_to(scores.squared * -gain)
    p = torch.softmax(score, -1)
    if bias.tensor is not None or (bias.causal_offset is not None and bias.causal_offset < 0):
        p = torch.where((score > -torch.inf).any(-1, keepdim=True), p, 0.0)
    return p


class _AttentionSums(torch.autograd.Function):
    """(V, F) of all queries, once differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        bias: Tensor | None,
        causal_offset: int | None,
        row_block: int,
        block_size: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        query, key = ScoreCoordinates(*tensors[0:3]), ScoreCoordinates(*tensors[3:6])
        ctx.options = causal_offset, row_block, block_size
        ctx.small = query.level.shape[-1] * key.level.shape[-1] <= min(_SMALL, block_size)
        if ctx.small:
            value, added = Values.of(*tensors[6:8]), Bias(bias, causal_offset)
            scores = block_scores(query, key)
            p = _weights(scores, tensors[8], added)
            sums, kept = block_sums(p, value), [*scores, p]
        else:
            *rows, log_sum = blocked_sums(list(tensors), bias, *ctx.options)
            sums, kept = RowSums(*rows), [log_sum]
        ctx.save_for_backward(bias, *tensors, *sums, *kept)
        dtype = query.level.dtype
        return sums.space.to(dtype), sums.deficit.to(dtype)

    @staticmethod
    def backward(ctx: Any, by_sum: Tensor, by_deficit: Tensor) -> tuple[Tensor | None, ...]:
        bias, *saved = ctx.saved_tensors
        tensors, sums, kept = saved[:9], RowSums(*saved[9:12]), saved[12:]
        with torch.no_grad(), without_autocast(by_sum.device.type):
            upstream = Upstream.of(by_sum, by_deficit, sums)
            gradients = _gradients(ctx, bias, tensors, kept, upstream)
        if torch.is_grad_enabled():
            gradients = _Last.apply(len(gradients), *gradients, *tensors)
        return (None, None, None, None, *gradients)


def _gradients(
    ctx: Any,
    bias: Tensor | None,
    tensors: list[Tensor],
    kept: list[Tensor],
    upstream: Upstream,
) -> list[Tensor]:
    """By the nine tensors of `_AttentionSums`."""
    query, gain = ScoreCoordinates(*tensors[0:3]), tensors[8]
    if ctx.small:
        g = block_gradients(
            query,
            ScoreCoordinates(*tensors[3:6]),
            Values.of(*tensors[6:8]),
            BlockScores(*kept[:3]),
            kept[3],
            upstream,
        )
        *flat, by_gain = *g.query, *g.key, g.a, g.u, g.gain
    else:
        *flat, by_gain = blocked_gradients(tensors, bias, kept[0], list(upstream), *ctx.options)
    # What all gradients of queries and keys share: ∂score/∂c = −2g D/sinh D.
    common = -2.0 * gain
    coordinates = []
    for gradient in flat[:6]:
        per_vector = gradient.dim() > query.level.dim()
        shared = common if per_vector or not gain.dim() else common[..., 0]
        coordinates.append(gradient * shared)
    return [*coordinates, *flat[6:], by_gain[..., None, None].sum_to_size(gain.shape)]


class _Last(torch.autograd.Function):
    """Gradients that say in plain words that they cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            "blocked_attention has first derivatives only. For second ones build the layer with "
            "PolarMultiheadAttention(..., backend='dense'), or call dense_attention"
        )


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

    Values equal `dense_attention`; second derivatives need that one.

    Args:
        query: score coordinates (…, N), (…, N, m), all leading dimensions alike in every argument.
        key: score coordinates (…, M), (…, M, m).
        value: points (…, M), (…, M, n).
        gain: broadcasts to (…, 1, 1): one number per batch entry or head at most.
        bias: broadcasts to (…, N, M), added to the scores; −inf excludes a key. No gradient.
        is_causal: query i sees keys up to i + M − N; blocks of keys that no query sees are skipped.
        row_block: queries per block.
        key_block: with more keys than these, blocks have fewer queries (8 at least).

    Returns:
        Points (…, N), (…, N, n); the origin where every key is excluded.

    Raises:
        ValueError: the gain has another shape, or the bias wants a gradient.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(2, 7, 3))
        >>> coordinates = lorentz.polar_score_coordinates(x)
        >>> lorentz.blocked_attention(coordinates, coordinates, x, torch.tensor(0.5)).u.shape
        torch.Size([2, 7, 3])
    """
    ((a, u),) = promote(value)
    a = limit_radius(a, attention_limit(a.dtype))
    if gain.dim() and gain.shape[-2:] != (1, 1):
        raise ValueError(f"gain must have shape (…, 1, 1), got {tuple(gain.shape)}")
    if bias is not None and bias.requires_grad:
        raise ValueError("blocked attention gives no gradient to a bias; use dense_attention")
    offset = key.level.shape[-1] - query.level.shape[-1] if is_causal else None
    with without_autocast(u.device.type):
        space_sum, deficit = _AttentionSums.apply(
            bias, offset, row_block, row_block * key_block, *query, *key, a, u, gain.to(u.dtype)
        )
    return point_from_sums(space_sum, deficit)


def fused_attention(*arguments: Any, **options: Any) -> Point:
    """Deprecated name of `blocked_attention`: the same arguments, points and errors, with a warning.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.zeros(2, 7, 3))
        >>> coordinates = lorentz.polar_score_coordinates(x)
        >>> lorentz.fused_attention(coordinates, coordinates, x, torch.tensor(0.5)).a.shape
        torch.Size([2, 7])
    """
    warnings.warn(
        "fused_attention is now called blocked_attention, which is what it is",
        DeprecationWarning,
        stacklevel=2,
    )
    return blocked_attention(*arguments, **options)
