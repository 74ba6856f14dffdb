"""The weighted Lorentz centroid as sums of non-negative terms (Polar-ViT paper, Eq. 6, 7, 22)."""

from __future__ import annotations

import torch
from torch import Tensor

from .distance import half_squared_chord, pair_chord
from .point import (
    Point,
    PointLike,
    check_curvature,
    is_origin,
    promote,
    without_autocast,
)
from .scalar import asinh_of_norm, limit_radius, norm_and_direction


def point_from_sums(space_sum: Tensor, deficit: Tensor) -> Point:
    """The centroid from V = Σ w sinh(a) u (…, n) and E + S = T − ‖V‖ (…), T = Σ w cosh a; the origin
    from all-zero sums."""
    # a_μ = arsinh(‖V‖/√((E+S)(T+‖V‖))), and T + ‖V‖ = E + S + 2‖V‖.
    deficit = deficit + (deficit <= 0)
    norm = norm_and_direction(space_sum)[0]
    total = deficit + 2.0 * norm
    root = torch.sqrt(deficit) * torch.sqrt(total)
    norm, direction = norm_and_direction(space_sum, at_zero=root)
    return Point(asinh_of_norm(norm / root), direction)


def _terms(points: PointLike) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sinh a (1 at origins, where u stands for the space coordinates), e^−a, u, and where the
    origins are; radii limited."""
    ((a, u),) = promote(points)
    a = limit_radius(a)
    at_origin = is_origin(a, u)
    return torch.sinh(a) + at_origin, torch.exp(-a), u, at_origin


def _check_weights(weights: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        raise TypeError("weights must be a floating-point tensor of non-negative numbers")
    return weights.to(dtype)


def centroid(points: PointLike, weights: Tensor | None = None, *, k: float | Tensor = 1.0) -> Point:
    """Weighted Lorentz centroid √k Σwx / ‖Σwx‖ (Law et al. 2019) over the last axis of `a`.

    Args:
        points: a of shape (…, N), u of shape (…, N, n); radii are limited to `radius_limit`, beyond
            which the derivative by a weight leaves the range of the dtype.
        weights: (…, N), non-negative, of any sum; None means equal. The values are not checked.
        k: has no influence on the result in polar form.

    Returns:
        Points of shapes (…) and (…, n). All-zero weights, and N = 0, give the origin with finite
        gradients.

    Raises:
        TypeError, ValueError: weights that are no floating tensor (…, N), or no set of points.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> points = lorentz.exp_map_origin(torch.tensor([[3.0, 0.0], [1.0, 0.0]]))
        >>> round(lorentz.centroid(points, torch.tensor([0.5, 0.5])).a.item(), 3)
        2.0
    """
    sinh_a, falling, u, at_origin = _terms(points)
    check_curvature(k, u)
    if sinh_a.dim() == 0:
        raise ValueError("centroid needs a set of points: a of shape (…, N), u of (…, N, n)")
    if weights is None:
        weights = torch.full_like(sinh_a, 1.0 / max(sinh_a.shape[-1], 1))
    weights = _check_weights(weights, u.dtype)
    if weights.dim() == 0 or weights.shape[-1] != sinh_a.shape[-1]:
        raise ValueError(
            f"weights must have shape (…, {sinh_a.shape[-1]}), one per point, got "
            f"{tuple(weights.shape)}; for a matrix of weights use centroids"
        )
    # Summed as differences from the direction it nearly has: a plain sum of long nearly parallel
    # vectors loses several roundings of their length, each worth an error of the whole point.
    mass = (weights * sinh_a).unsqueeze(-2)
    away = (~at_origin).to(u.dtype)
    with without_autocast(u.device.type):
        nearly = norm_and_direction((mass @ u).detach())[1]
        off = torch.addcmul(u, away.unsqueeze(-1), nearly, value=-1.0)
        whole = (mass.squeeze(-2) * away).sum(-1)[..., None, None]
        space_sum = (whole * nearly + mass @ off).squeeze(-2)
    direction = norm_and_direction(space_sum)[1].unsqueeze(-2)
    # ½‖u − û‖² − ½‖û‖² at an origin: zero, with the derivative by its space coordinates.
    excess = at_origin * (0.5 * (direction * direction).sum(-1))
    terms = falling + sinh_a * half_squared_chord(u, direction) - excess
    deficit = (weights * terms).sum(-1)
    return point_from_sums(space_sum, deficit)


def centroids(points: PointLike, weights: Tensor) -> Point:
    """Centroids of one set of points under every row of a weight matrix.

    Args:
        points: a of shape (…, M), u of shape (…, M, n); radii are limited to `radius_limit`.
        weights: (…, N, M), non-negative.

    Returns:
        Points of shapes (…, N) and (…, N, n). Needs memory for a few (N, M) tensors, no (N, M, n).

    Raises:
        TypeError, ValueError: weights that are no floating tensor (…, N, M).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> points = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.centroids(points, torch.rand(4, 5)).u.shape
        torch.Size([4, 3])
    """
    sinh_a, falling, u, at_origin = _terms(points)
    weights = _check_weights(weights, u.dtype)
    if weights.dim() < 2 or weights.shape[-1] != sinh_a.shape[-1]:
        raise ValueError(
            f"weights must have shape (…, N, {sinh_a.shape[-1]}), got {tuple(weights.shape)}"
        )
    with without_autocast(u.device.type):
        # Products of differences from the middle of all points, as in `centroid`.
        middle = norm_and_direction((sinh_a.unsqueeze(-1) * u).sum(-2).detach())[1].unsqueeze(-2)
        away = (~at_origin).to(u.dtype).unsqueeze(-1)
        mass = sinh_a.unsqueeze(-1)
        off = mass * torch.addcmul(u, away, middle, value=-1.0)
        space_sum = (weights @ (mass * away)) * middle + weights @ off
        direction = norm_and_direction(space_sum)[1]
        chord = pair_chord(direction, u)
        excess = 0.5 * (direction * direction).sum(-1, keepdim=True)
        terms = falling.unsqueeze(-2) + sinh_a.unsqueeze(-2) * chord
        terms = terms - torch.where(at_origin.unsqueeze(-2), excess, 0.0)
        deficit = (weights * terms).sum(-1)
    return point_from_sums(space_sum, deficit)
