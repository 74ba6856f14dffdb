"""The dense reference of polar attention: every step a differentiable operation, (N, M) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .centroid import centroids
from .point import Point, PointLike
from .scalar import squared_arcosh1p
from .score import ScoreCoordinates, pairwise_c

__all__ = ["dense_attention", "masked_softmax"]


def masked_softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension in which a row of −inf gives zeros, with zero gradient."""
    largest = scores.detach().amax(-1, keepdim=True)
    reachable = largest > -torch.inf
    weights = torch.exp(
        torch.where(scores > -torch.inf, scores - torch.where(reachable, largest, 0.0), -torch.inf)
    )
    return weights / torch.where(reachable, weights.sum(-1, keepdim=True), 1.0)


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
    scores = -gain * squared_arcosh1p(pairwise_c(query, key))
    if bias is not None:
        scores = scores + bias
    return centroids(value, masked_softmax(scores))
