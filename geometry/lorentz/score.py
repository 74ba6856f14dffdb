"""Score coordinates: one form of the distance for polar and for half-space coordinates.

Both distances are c_ij = 2 sinh²(½(ρ_i − σ_j)) + α_i β_j ½‖p_i − q_j‖²: with (ρ, α, p) =
(a, sinh a, u) it is Eq. 5 of the Polar-ViT paper, with (ln ν, ν, w) (in units of √k) it is the
half-space form, in which a horospherical shift is an addition to w. Attention needs nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chord import pair_angular
from .point import PointLike, promote, radius_limit

__all__ = ["ScoreCoordinates", "half_space_score", "pairwise_c", "polar_score_coordinates"]


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
