"""Distances by the hyperbolic law of haversines (Polar-ViT paper, Eq. 5): nothing cancels.

They stand on half squared chords of directions. `cdist` without the matrix-product identity gives
½‖u − v‖² to 7e-8 relative at angles of 1e-6, without an (N, M, n) tensor; the identity (centred or
not) is wrong by tens of percent for clustered directions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .point import (
    PointLike,
    check_curvature,
    is_origin,
    promote,
    radius_limit,
    square_root,
    without_autocast,
)
from .scalar import (
    arcosh1p,
    asinh_exp,
    half_squared_norm,
    limit_radius,
    log_sinh,
    norm_and_direction,
    squared_arcosh1p,
)


def half_squared_differences(p: Tensor, q: Tensor) -> Tensor:
    """½‖p_i − q_j‖² as plain values, without a gradient: (…, N, n), (…, M, n) → (…, N, M)."""
    lengths = torch.cdist(p, q, compute_mode="donot_use_mm_for_euclid_dist")
    return lengths.square_().mul_(0.5)


def mean_row(x: Tensor) -> Tensor:
    """The mean (…, 1, n) of rows (…, N, n) as plain values; zeros where there are none."""
    return x.detach().sum(-2, keepdim=True) / max(1, x.shape[-2])


def chord_gradients(gradient: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of Σ g_ij ½‖p_i − q_j‖² by p and q (Polar-ViT paper, Eq. 25)."""
    # Row sum and product nearly cancel for neighbours. Both sides are centred first, which helps one
    # cluster, and float32 on a CPU is computed in float64, which helps several.
    with without_autocast(p.device.type):
        work = torch.float64 if p.dtype == torch.float32 and p.device.type == "cpu" else p.dtype
        g, p64, q64 = gradient.to(work), p.to(work), q.to(work)
        p_centre, q_centre = mean_row(p64), mean_row(q64)
        by_p = (p64 - q_centre) * g.sum(-1).unsqueeze(-1) - g @ (q64 - q_centre)
        by_q = (q64 - p_centre) * g.sum(-2).unsqueeze(-1) - g.mT @ (p64 - p_centre)
        by_p, by_q = by_p.to(p.dtype), by_q.to(q.dtype)
    return by_p, by_q


class _PairChord(torch.autograd.Function):
    """cdist forward, Eq. 25 backward: what cdist's own backward lacks is a second derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, q: Tensor) -> Tensor:
        return half_squared_differences(p, q)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return chord_gradients(gradient, *ctx.saved_tensors)


def pair_chord(p: Tensor, q: Tensor) -> Tensor:
    """½‖p_i − q_j‖² of all pairs (…, N, n), (…, M, n): (…, N, M), twice differentiable, without an
    (N, M, n) tensor. Leading dimensions broadcast."""
    if p.shape[:-2] != q.shape[:-2]:
        batch = torch.broadcast_shapes(p.shape[:-2], q.shape[:-2])
        p, q = p.expand(*batch, *p.shape[-2:]), q.expand(*batch, *q.shape[-2:])
    return _PairChord.apply(p, q)


class _PairAngular(torch.autograd.Function):
    """α_i β_j ½‖p_i − q_j‖² with gradients at the origin: where α_i = 0 (and p_i = 0), p_i stands
    for the space coordinates α_i p_i."""

    generate_vmap_rule = True

    @staticmethod
    def forward(alpha: Tensor, p: Tensor, beta: Tensor, q: Tensor) -> Tensor:
        chord = half_squared_differences(p, q)
        return chord.mul_(alpha.unsqueeze(-1)).mul_(beta.unsqueeze(-2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        alpha, p, beta, q = ctx.saved_tensors
        rows, columns = alpha.unsqueeze(-1), beta.unsqueeze(-2)
        by_product = gradient * pair_chord(p, q)
        by_alpha = (by_product * columns).sum(-1)
        by_beta = (by_product * rows).sum(-2)
        by_p, _ = chord_gradients(gradient * columns, p, q)
        _, by_q = chord_gradients(gradient * rows, p, q)
        by_p = by_p * torch.where(rows == 0, 1.0, rows)
        by_q = by_q * torch.where(beta == 0, 1.0, beta).unsqueeze(-1)
        return by_alpha, by_p, by_beta, by_q


def pair_angular(alpha: Tensor, p: Tensor, beta: Tensor, q: Tensor) -> Tensor:
    """α_i β_j ½‖p_i − q_j‖² of all pairs, (…, N, M): the angular term of Eq. 5. As `pair_chord`."""
    batch = torch.broadcast_shapes(p.shape[:-2], q.shape[:-2])
    p, q = p.expand(*batch, *p.shape[-2:]), q.expand(*batch, *q.shape[-2:])
    return _PairAngular.apply(alpha.expand(p.shape[:-1]), p, beta.expand(q.shape[:-1]), q)


def pair_c(rho: Tensor, alpha: Tensor, p: Tensor, sigma: Tensor, beta: Tensor, q: Tensor) -> Tensor:
    """c_ij = 2 sinh²(½(ρ_i − σ_j)) + α_i β_j ½‖p_i − q_j‖² of all pairs: cosh D − 1 from
    (a, sinh a, u), and from the half-space coordinates (ln ν, ν, w). Twice differentiable."""
    half = torch.sinh(0.5 * (rho.unsqueeze(-1) - sigma.unsqueeze(-2)))
    return 2.0 * half * half + pair_angular(alpha, p, beta, q)


def half_squared_chord(u: Tensor, v: Tensor) -> Tensor:
    """½‖u − v‖² = 1 − cos θ from differences; 1 − u·v loses everything below θ = 1e-4."""
    return half_squared_norm(u - v)


def cosh_distance_minus_one(a: Tensor, u: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """c = cosh D − 1 of points (…) within the radius limit, with gradients at the origin."""
    sinh_a, sinh_b = torch.sinh(a), torch.sinh(b)
    half = torch.sinh(0.5 * (a - b))
    c = 2.0 * half * half + sinh_a * sinh_b * half_squared_chord(u, v)
    # Zero in value: u (or v) is 0 there. It carries the derivative by the space coordinates.
    at_origin = torch.where(is_origin(a, u), sinh_b, torch.where(is_origin(b, v), sinh_a, 0.0))
    return c - at_origin * (u * v).sum(-1)


def _distance_beyond_limit(a: Tensor, u: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """D where sinh a · sinh b would overflow, from ln c; exactly 0 at coincidence, and at an origin
    with the derivative by its space coordinates, for which u (or v) stands there."""
    gap = (a - b).abs()
    radial = gap + 2.0 * torch.log(-torch.expm1(-gap.clamp(min=1e-20))) - math.log(2.0)
    chord = half_squared_chord(u, v)
    apart = chord > 0
    log_chord = torch.where(apart, torch.log(torch.where(apart, chord, 1.0)), -1e30)
    angular = (log_sinh(a) + log_sinh(b)).clamp(min=-1e30) + log_chord
    log_c = torch.logaddexp(radial, angular)
    near = arcosh1p(torch.exp(log_c.clamp(max=40.0)))
    d = torch.where(log_c < 40.0, near, log_c + math.log(2.0))
    at_origin = is_origin(a, u) | is_origin(b, v)
    d = d - torch.where(at_origin, (u * v).sum(-1), 0.0)
    return torch.where((gap > 0) | apart, d, 0.0)


def _split_by_limit(x: PointLike, y: PointLike) -> tuple[Tensor, Tensor, Tensor]:
    """c within the limit (elsewhere of limited radii), D beyond it (elsewhere of 1), where."""
    (a, u), (b, v) = promote(x, y)
    limit = radius_limit(a.dtype)
    beyond = (a > limit) | (b > limit)
    c = cosh_distance_minus_one(a.clamp(max=limit), u, b.clamp(max=limit), v)
    far = _distance_beyond_limit(torch.where(beyond, a, 1.0), u, torch.where(beyond, b, 1.0), v)
    return c, far, beyond


def squared_distance(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Squared geodesic distance of points (…) and (…), in units of r².

    Exact to the resolution of the stored points at every radius, also beyond `radius_limit`;
    coincident points have distance exactly 0 and gradient 0. For all pairs of two sets use
    `pairwise_squared_distance`, which needs no (N, M, n) tensor.

    Args:
        x, y: points (a, u) of shapes (…) and (…, n), broadcast against each other. Half precision
            is computed and returned in float32.
        k: the curvature is −1/k; a positive float or a tensor that broadcasts to (…).

    Raises:
        TypeError, ValueError: an argument is no point, the shapes do not belong together, k ≤ 0.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x, y = (lorentz.exp_map_origin(torch.tensor([r, 0.0])) for r in (12.0, 12.5))
        >>> round(lorentz.squared_distance(x, y).item(), 3)
        0.25
    """
    c, far, beyond = _split_by_limit(x, y)
    return check_curvature(k, c) * torch.where(beyond, far * far, squared_arcosh1p(c))


def distance(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Geodesic distance of points (…) and (…), in units of r; see `squared_distance`.

    The derivative of a distance jumps at coincidence; it is 0 there by choice.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x, y = (lorentz.exp_map_origin(torch.tensor([r, 0.0])) for r in (12.0, 12.5))
        >>> round(lorentz.distance(x, y).item(), 3)
        0.5
    """
    c, far, beyond = _split_by_limit(x, y)
    return square_root(check_curvature(k, c)) * torch.where(beyond, far, arcosh1p(c))


def distance_to_origin(x: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Radius r = √k a of points (…).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.distance_to_origin(lorentz.exp_map_origin(torch.tensor([3.0, 4.0])))
        tensor(5.)
    """
    ((a, _),) = promote(x)
    return square_root(check_curvature(k, a)) * a


def pairwise_cosh_distance_minus_one(x: PointLike, y: PointLike) -> Tensor:
    """c = cosh D − 1 of all pairs: (…, N) and (…, M) points give (…, N, M)."""
    (a, u), (b, v) = promote(x, y)
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError("pairwise distances need sets of points: a of shape (…, N), u (…, N, n)")
    a, b = limit_radius(a), limit_radius(b)
    return pair_c(a, torch.sinh(a), u, b, torch.sinh(b), v)


def pairwise_squared_distance(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Squared distances of all pairs: (…, N) and (…, M) points give (…, N, M).

    Radii are limited to `radius_limit`. Errors are those of `squared_distance`, and a ValueError
    where there is no axis of points.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x, y = (lorentz.exp_map_origin(torch.randn(n, 3)) for n in (5, 7))
        >>> lorentz.pairwise_squared_distance(x, y).shape
        torch.Size([5, 7])
    """
    c = pairwise_cosh_distance_minus_one(x, y)
    return check_curvature(k, c) * squared_arcosh1p(c)


def pairwise_distance(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Distances of all pairs, in units of r; see `pairwise_squared_distance`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x, y = (lorentz.exp_map_origin(torch.randn(n, 3)) for n in (5, 7))
        >>> lorentz.pairwise_distance(x, y).shape
        torch.Size([5, 7])
    """
    c = pairwise_cosh_distance_minus_one(x, y)
    return square_root(check_curvature(k, c)) * arcosh1p(c)


def mlr_logits(x: PointLike, normals: Tensor, shifts: Tensor, *, k: float | Tensor = 1.0) -> Tensor:
    """Signed distances to hyperplanes, scaled by the normals' lengths: (…, N) points → (…, N, C).

    logit = ‖z‖ √k arsinh(sinh(a − s) − cosh s · sinh a · ½‖u − ẑ‖²). Beyond `radius_limit` the
    argument grows as e^a, and is taken in the log: no radius limit.

    Args:
        x: points (…, N), (…, N, n).
        normals: z of shape (C, n).
        shifts: s of shape (C,), the hyperplane's rapidity along ẑ.
        k: the curvature is −1/k.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.mlr_logits(x, normals=torch.randn(2, 3), shifts=torch.zeros(2)).shape
        torch.Size([5, 2])
    """
    ((a, u),) = promote(x)
    limit = radius_limit(a.dtype)
    excess = (a - limit).clamp(min=0.0).unsqueeze(-1)
    a = a.clamp(max=limit).unsqueeze(-1)
    length, direction = norm_and_direction(normals.to(a.dtype))
    shifts = shifts.to(a.dtype).clamp(-limit, limit)
    rapidity = torch.sinh(a - shifts)
    angular = pair_angular(torch.sinh(a.squeeze(-1)), u, torch.cosh(shifts), direction)
    root = k.to(a.dtype).sqrt() if isinstance(k, Tensor) else math.sqrt(k)
    argument = rapidity - angular
    size = torch.where(argument != 0, argument.abs(), 1.0)
    far = torch.sign(argument) * asinh_exp(torch.log(size) + excess)
    return length * root * torch.where(excess > 0, far, torch.asinh(argument))
