"""Horospherical shifts and half-space coordinates (Polar-ViT paper, Eq. 10, 11, App. C).

Half-space coordinates toward the ideal point e₀ + e_axis are ν = x₀ − x_axis > 0 and
w = x_⊥/ν, x_⊥ being the other space coordinates. A shift is w ← w + t, and ν does not change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .distance import half_squared_chord, pair_c
from .point import Point, PointLike, check_curvature, is_origin, promote, square_root
from .scalar import (
    asinh_of_norm,
    half_squared_norm,
    limit_radius,
    norm_and_direction,
    squared_arcosh1p,
)


class HalfSpace(NamedTuple):
    """Half-space coordinates: ln(ν/√k) of shape (…), w = x_⊥/ν of shape (…, n − 1).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.HalfSpace(log_nu=torch.tensor(0.0), w=torch.tensor([0.0, 0.0])).w.shape
        torch.Size([2])
    """

    log_nu: Tensor
    w: Tensor


def _check_axis(axis: int, dimension: int) -> int:
    if not -dimension <= axis < dimension:
        raise ValueError(f"axis {axis} is out of range for points of dimension {dimension}")
    return axis % dimension


def _others(x: Tensor, axis: int) -> Tensor:
    return x[..., 1:] if axis == 0 else torch.cat([x[..., :axis], x[..., axis + 1 :]], -1)


def to_half_space(x: PointLike, *, axis: int = 0) -> HalfSpace:
    """Half-space coordinates of points toward the ideal point of space axis `axis`.

    ν = √k (e^−a + sinh a (1 − u_axis)) is a sum of non-negative terms, and 1 − u_axis comes from
    the other components where it is small. w carries no unit. Radii are limited to `radius_limit`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([0.5, 1.0]))
        >>> lorentz.to_half_space(x).log_nu.shape
        torch.Size([])
    """
    ((a, u),) = promote(x)
    axis = _check_axis(axis, u.shape[-1])
    a = limit_radius(a)
    return HalfSpace(*_ToHalfSpace.apply(a, u, is_origin(a, u).to(a.dtype), axis))


class _ToHalfSpace(torch.autograd.Function):
    """Closed-form backward: a third of the passes over the vectors that the composed one takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, u: Tensor, at_origin: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        main, others = u[..., axis], _others(u, axis)
        gap, _ = _gap(main, others)
        # At the origin main is 0: the last term only carries the derivative by space coordinates.
        nu = torch.exp(-a) + torch.sinh(a) * gap - at_origin * main
        return torch.log(nu), ((torch.sinh(a) + at_origin) / nu).unsqueeze(-1) * others

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3], output[0])
        ctx.axis = inputs[3]

    @staticmethod
    def backward(ctx: Any, by_log_nu: Tensor, by_w: Tensor) -> tuple[Tensor | None, ...]:
        a, u, at_origin, log_nu = ctx.saved_tensors
        main, others = u[..., ctx.axis], _others(u, ctx.axis)
        gap, slope = _gap(main, others)
        falling = torch.exp(-log_nu)
        sinh, cosh = torch.sinh(a), torch.cosh(a)
        stretch = (sinh + at_origin) * falling
        by_stretch = (by_w * others).sum(-1)
        by_nu = falling * (by_log_nu - by_stretch * stretch)
        by_a = by_nu * (cosh * gap - torch.exp(-a)) + by_stretch * cosh * falling
        by_gap = by_nu * sinh
        by_main = -by_gap * torch.where(main > 0, 0.5 * slope * gap, 1.0) - by_nu * at_origin
        by_others = torch.addcmul(
            stretch.unsqueeze(-1) * by_w, (by_gap * slope).unsqueeze(-1), others
        )
        axis = ctx.axis
        parts = [by_others[..., :axis], by_main.unsqueeze(-1), by_others[..., axis:]]
        return by_a, torch.cat(parts, -1), None, None


def _gap(main: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """1 − u_axis of unit vectors, from the others where it is small, and its derivative by half
    their squared norm."""
    ahead = main > 0
    slope = torch.where(ahead, 2.0 / (1.0 + main), 0.0)
    return torch.where(ahead, slope * half_squared_norm(others), 1.0 - main), slope


def from_half_space(coordinates: tuple[Tensor, Tensor], *, axis: int = 0) -> Point:
    """The points with the given half-space coordinates; the inverse of `to_half_space`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([0.5, 1.0]))
        >>> lorentz.from_half_space(lorentz.to_half_space(x)).u.allclose(x.u)
        True
    """
    log_nu, w = coordinates
    axis = _check_axis(axis, w.shape[-1] + 1)
    # x₀ + x_axis = (k + ‖x_⊥‖²)/ν = 1/ν + ν‖w‖² in units of √k, formed without a large square.
    nu = torch.exp(log_nu)
    scaled = torch.exp(0.5 * log_nu).unsqueeze(-1) * w
    opposite = torch.exp(-log_nu) + (scaled * scaled).sum(-1)
    main = 0.5 * (opposite - nu)
    space = torch.exp(log_nu).unsqueeze(-1) * w
    s = torch.cat([space[..., :axis], main.unsqueeze(-1), space[..., axis:]], -1)
    norm, direction = norm_and_direction(s)
    # Where radii are large x₀ is the better conditioned of the two: it has no difference in it.
    time = 0.5 * (opposite + nu)
    large = time > 2.0
    safe = torch.where(large, time, 2.0)
    from_time = torch.log(safe) + torch.log1p(torch.sqrt(1.0 - 1.0 / (safe * safe)))
    from_norm = asinh_of_norm(torch.where(large, 0.0, norm))
    return Point(torch.where(large, from_time, from_norm), direction)


def horospherical_shift(
    x: PointLike,
    t: float | Tensor,
    *,
    k: float | Tensor = 1.0,
    axis: int = 0,
    shift_axis: int = 1,
) -> Point:
    """Φ(t) x: slide each horosphere around the ideal point of `axis` along `shift_axis` (Eq. 10).

    Args:
        x: points of shapes (…), (…, n), n ≥ 2.
        t: a number or a tensor that broadcasts to (…); shifts along one axis add up.
        k: has no influence on the result in polar form; radii are limited to `radius_limit`.
        axis: space axis of the fixed ideal point (the paper's e₁ is axis 0).
        shift_axis: the space axis shifted along, another than `axis`.

    An isometry; the query-key distance grows as the logarithm of the shift (Eq. 11).

    Raises:
        TypeError, ValueError: x is no point, an axis does not exist, or the two are one.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([0.5, 1.0]))
        >>> round(lorentz.distance(x, lorentz.horospherical_shift(x, 2.0)).item(), 3)
        1.876
    """
    ((a, u),) = promote(x)
    check_curvature(k, a)
    axis = _check_axis(axis, u.shape[-1])
    shift_axis = _check_axis(shift_axis, u.shape[-1])
    if axis == shift_axis:
        raise ValueError(f"axis and shift_axis must differ, both are {axis}")
    log_nu, w = to_half_space((a, u), axis=axis)
    unit = torch.zeros(w.shape[-1], dtype=w.dtype, device=w.device)
    unit[shift_axis - (shift_axis > axis)] = 1.0
    t = torch.as_tensor(t, dtype=w.dtype, device=w.device)
    shift = t.unsqueeze(-1) * unit
    return from_half_space(
        (log_nu.expand(torch.broadcast_shapes(log_nu.shape, t.shape)), w + shift), axis=axis
    )


def horospherical_distance(
    x: PointLike, t: float | Tensor, *, k: float | Tensor = 1.0, axis: int = 0
) -> Tensor:
    """d(x, Φ(t) x) = 2√k arsinh(|t| ν/2√k) of shape (…) (Eq. 11).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([0.5, 1.0]))
        >>> round(lorentz.horospherical_distance(x, 2.0).item(), 3)
        1.876
    """
    log_nu, _ = to_half_space(x, axis=axis)
    root = square_root(check_curvature(k, log_nu))
    t = torch.as_tensor(t, dtype=log_nu.dtype, device=log_nu.device)
    return 2.0 * root * torch.asinh(0.5 * t.abs() * torch.exp(log_nu))


def half_space_squared_distance(
    x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], *, k: float | Tensor = 1.0
) -> Tensor:
    """Squared distance from half-space coordinates: (…) from (…) and (…).

    c = νν′‖Δw‖²/2k + (ν−ν′)²/(2νν′), whose second term is 2 sinh²(½ ln(ν/ν′)).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([0.5, 1.0]))
        >>> lorentz.half_space_squared_distance(*(lorentz.to_half_space(p) for p in (x, x)))
        tensor(0.)
    """
    half = torch.sinh(0.5 * (x[0] - y[0]))
    c = 2.0 * half * half + torch.exp(x[0] + y[0]) * half_squared_chord(x[1], y[1])
    return check_curvature(k, c) * squared_arcosh1p(c)


def pairwise_half_space_squared_distance(
    x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], *, k: float | Tensor = 1.0
) -> Tensor:
    """Squared distances of all pairs from half-space coordinates: (…, N), (…, M) → (…, N, M).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(4, 3))
        >>> h = lorentz.to_half_space(x)
        >>> lorentz.pairwise_half_space_squared_distance(h, h).shape
        torch.Size([4, 4])
    """
    c = pair_c(x[0], torch.exp(x[0]), x[1], y[0], torch.exp(y[0]), y[1])
    return check_curvature(k, c) * squared_arcosh1p(c)
