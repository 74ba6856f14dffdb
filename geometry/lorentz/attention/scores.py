"""Scores of polar attention, and its dense reference: every step a differentiable operation.

One form of the distance serves polar and half-space coordinates: c_ij = 2 sinh²(½(ρ_i − σ_j)) +
α_i β_j ½‖p_i − q_j‖². With (ρ, α, p) = (a, sinh a, u) it is Eq. 5 of the Polar-ViT paper, with
(ln ν, ν, w) (in units of √k) it is the half-space form, in which a horospherical shift is an
addition to w. Attention needs nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.centroid import centroids
from ..ops.distance import pair_angular
from ..ops.point import Point, PointLike, promote, radius_limit
from ..ops.scalar import squared_arcosh1p

__all__ = [
    "ScoreCoordinates",
    "attention_weights",
    "dense_attention",
    "half_space_score",
    "masked_softmax",
    "pairwise_c",
    "polar_score_coordinates",
]


class ScoreCoordinates(NamedTuple):
    """`level` (…, N), `scale` (…, N) and `vector` (…, N, m) of a set of points."""

    level: Tensor
    scale: Tensor
    vector: Tensor


def polar_score_coordinates(x: PointLike) -> ScoreCoordinates:
    """(a, sinh a, u) of points, radii limited to `radius_limit`."""
    ((a, u),) = promote(x)
    a = a.clamp(max=radius_limit(a.dtype))
    return ScoreCoordinates(a, torch.sinh(a), u)


def half_space_score(log_nu: Tensor, w: Tensor) -> ScoreCoordinates:
    """(ln ν, ν, w) of half-space coordinates."""
    limit = radius_limit(w.dtype)
    log_nu = log_nu.clamp(-limit, limit)
    return ScoreCoordinates(log_nu, torch.exp(log_nu), w)


def pairwise_c(x: ScoreCoordinates, y: ScoreCoordinates) -> Tensor:
    """cosh D − 1 of all pairs, (…, N, M); differentiable twice."""
    half = torch.sinh(0.5 * (x.level.unsqueeze(-1) - y.level.unsqueeze(-2)))
    c = 2.0 * half * half + pair_angular(x.scale, x.vector, y.scale, y.vector)
    return c.clamp(max=torch.finfo(c.dtype).max / 32.0)


def masked_softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension in which a row of −inf gives zeros, with zero gradient."""
    if not scores.shape[-1]:
        return scores
    largest = scores.detach().amax(-1, keepdim=True)
    reachable = largest > -torch.inf
    weights = torch.exp(
        torch.where(scores > -torch.inf, scores - torch.where(reachable, largest, 0.0), -torch.inf)
    )
    return weights / torch.where(reachable, weights.sum(-1, keepdim=True), 1.0)


def attention_weights(
    query: ScoreCoordinates, key: ScoreCoordinates, gain: Tensor, bias: Tensor | None = None
) -> Tensor:
    """softmax(−gain · D² + bias) of all pairs, (…, N, M); see `dense_attention`."""
    scores = -gain * squared_arcosh1p(pairwise_c(query, key))
    return masked_softmax(scores if bias is None else scores + bias)


def dense_attention(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: PointLike,
    gain: Tensor,
    bias: Tensor | None = None,
) -> Point:
    """Centroids of the values under softmax(−gain · D² + bias) (Polar-ViT paper, Eq. 9).

    Args:
        query: score coordinates (…, N), (…, N, m).
        key: score coordinates (…, M), (…, M, m).
        value: points (…, M), (…, M, n).
        gain: broadcasts to (…, N, M): γk/τ, since D is the distance in units of √k.
        bias: broadcasts to (…, N, M), added to the scores; −inf excludes a key.

    Returns:
        Points (…, N), (…, N, n); the origin where every key is excluded.
    """
    return centroids(value, attention_weights(query, key, gain, bias))
