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

from ...softmax import masked_softmax
from ..ops.centroid import centroids
from ..ops.distance import pair_c
from ..ops.point import Point, PointLike, promote
from ..ops.scalar import limit_radius, squared_arcosh1p


class ScoreCoordinates(NamedTuple):
    """`level` (…, N), `scale` (…, N) and `vector` (…, N, m) of a set of points.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> scores = lorentz.polar_score_coordinates(lorentz.exp_map_origin(torch.randn(5, 3)))
        >>> [tuple(part.shape) for part in scores]
        [(5,), (5,), (5, 3)]
    """

    level: Tensor
    scale: Tensor
    vector: Tensor


def attention_limit(dtype: torch.dtype) -> float:
    """The largest radius that attention tells apart: 30 in float32, whose points of that radius lie
    farther apart than their directions resolve (17). Gradients form products of four radii.
    """
    return 170.0 if dtype == torch.float64 else 30.0


def polar_score_coordinates(x: PointLike) -> ScoreCoordinates:
    """(a, sinh a, u) of points, radii limited to `attention_limit`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([[2.0, 0.0]]))
        >>> round(lorentz.polar_score_coordinates(x).scale.item(), 3)
        3.627
    """
    ((a, u),) = promote(x)
    a = limit_radius(a, attention_limit(a.dtype))
    return ScoreCoordinates(a, torch.sinh(a), u)


def half_space_score(log_nu: Tensor, w: Tensor) -> ScoreCoordinates:
    """(ln ν, ν, w) of half-space coordinates."""
    limit = attention_limit(w.dtype)
    log_nu = log_nu.clamp(-limit, limit)
    return ScoreCoordinates(log_nu, torch.exp(log_nu), w)


def pairwise_c(x: ScoreCoordinates, y: ScoreCoordinates) -> Tensor:
    """cosh D − 1 of all pairs, (…, N, M); differentiable twice."""
    c = pair_c(*x, *y)
    return c.clamp(max=torch.finfo(c.dtype).max / 32.0)


def attention_weights(
    query: ScoreCoordinates, key: ScoreCoordinates, gain: Tensor, bias: Tensor | None = None
) -> Tensor:
    """softmax(−gain · D² + bias) of all pairs, (…, N, M); see `dense_attention`."""
    scores = -gain * squared_arcosh1p(pairwise_c(query, key))
    return masked_softmax(scores if bias is None else scores + bias, None)


def weighted_values(value: PointLike, weights: Tensor) -> Point:
    """Centroids of the values under every row of weights, radii limited to `attention_limit`."""
    ((a, u),) = promote(value)
    return centroids((limit_radius(a, attention_limit(a.dtype)), u), weights)


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

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(7, 3))
        >>> coordinates = lorentz.polar_score_coordinates(x)
        >>> lorentz.dense_attention(coordinates, coordinates, x, torch.tensor(0.5)).a.shape
        torch.Size([7])
    """
    return weighted_values(value, attention_weights(query, key, gain, bias))
