"""Polar form, space and ambient coordinates, for points (Eq. 2) and tangent vectors (Eq. 13–15)."""

from __future__ import annotations

import torch
from torch import Tensor

from .distance import half_squared_chord
from .point import (
    Point,
    PointLike,
    Tangent,
    TangentLike,
    check_curvature,
    column,
    is_origin,
    promote,
    promote_vectors,
    radius_limit,
    square_root,
)
from .scalar import asinh_of_norm, norm_and_direction


def _ambient_radius(a: Tensor) -> Tensor:
    """Radii up to which sinh a is a number, with no derivative beyond."""
    return a.clamp(max=2.0 * radius_limit(a.dtype))


def unit_space(a: Tensor, u: Tensor) -> Tensor:
    """sinh(a) u, the space coordinates in units of √k; reads gradients at the origin."""
    a = _ambient_radius(a)
    return (torch.sinh(a) + is_origin(a, u)).unsqueeze(-1) * u


def klein(a: Tensor, u: Tensor) -> Tensor:
    """χ = tanh(a) u, the Klein vector; reads gradients at the origin."""
    return (torch.tanh(a) + is_origin(a, u)).unsqueeze(-1) * u


def klein_row(a: Tensor, u: Tensor) -> Tensor:
    """(1, χ) of shape (…, 1 + n): ambient coordinates over the time coordinate."""
    return torch.cat([torch.ones_like(a).unsqueeze(-1), klein(a, u)], -1)


def from_unit_space(s: Tensor) -> Point:
    """The point whose space coordinates are √k·s, s of shape (…, n)."""
    norm, direction = norm_and_direction(s)
    return Point(asinh_of_norm(norm), direction)


def to_space(x: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Return the space coordinates √k sinh(a) u, of shape (…, n).

    a is limited to twice `radius_limit` (86 in float32), so that the result stays finite.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.to_space(x).shape
        torch.Size([5, 3])
    """
    ((a, u),) = promote(x)
    return column(square_root(check_curvature(k, a))) * unit_space(a, u)


def from_space(space: Tensor, *, k: float | Tensor = 1.0) -> Point:
    """Return the points with space coordinates (…, n); the zero vector is the origin.

    Raises:
        TypeError, ValueError: they are not floating point, or k is not positive.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.from_space(torch.zeros(2))
        Point(a=tensor(0.), u=tensor([0., 0.]))
    """
    space = promote_vectors(space, "space coordinates")
    return from_unit_space(space / column(square_root(check_curvature(k, space))))


def to_ambient(x: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Return ambient coordinates (…, 1 + n), time first: √k (cosh a, sinh a · u).

    a is limited to twice `radius_limit` (86 in float32), so that the result stays finite.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.to_ambient(x).shape
        torch.Size([5, 4])
    """
    ((a, u),) = promote(x)
    ambient = torch.cat([torch.cosh(_ambient_radius(a)).unsqueeze(-1), unit_space(a, u)], -1)
    return column(square_root(check_curvature(k, a))) * ambient


def from_ambient(ambient: Tensor, *, k: float | Tensor = 1.0) -> Point:
    """Return the points with ambient coordinates (…, 1 + n), time first.

    Only the space coordinates are read (r = √k arsinh(‖x‖/√k)): the time coordinate follows from
    them and carries no more than their rounding error.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.from_ambient(lorentz.to_ambient(x)).u.allclose(x.u)
        True
    """
    if ambient.dim() == 0 or ambient.shape[-1] < 2:
        raise ValueError(f"ambient coordinates have shape (…, 1 + n), got {tuple(ambient.shape)}")
    return from_space(ambient[..., 1:], k=k)


def to_poincare(x: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """Coordinates √k tanh(a/2) u in the Poincaré ball of radius √k, of shape (…, n).

    They stay inside the ball, whose numbers tell radii apart up to a ≈ 16 in float32, 36 in float64.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> (lorentz.to_poincare(x).norm(dim=-1) < 1).all()
        tensor(True)
    """
    ((a, u),) = promote(x)
    inside = 1.0 - 4.0 * torch.finfo(a.dtype).eps
    length = torch.tanh(0.5 * a).clamp(max=inside) + 0.5 * is_origin(a, u)
    return column(square_root(check_curvature(k, a))) * length.unsqueeze(-1) * u


def from_poincare(p: Tensor, *, k: float | Tensor = 1.0) -> Point:
    """The points with coordinates (…, n) in the Poincaré ball of radius √k: a = 2 artanh(‖p‖/√k).

    Coordinates on the boundary or beyond it are taken as just inside.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.from_poincare(lorentz.to_poincare(x)).u.allclose(x.u)
        True
    """
    p = promote_vectors(p, "coordinates")
    # At the origin the space coordinates are twice those of the ball.
    length, direction = norm_and_direction(
        p / column(square_root(check_curvature(k, p))), at_zero=0.5
    )
    inside = 1.0 - 4.0 * torch.finfo(p.dtype).eps
    return Point(2.0 * torch.atanh(length.clamp(max=inside)), direction)


def _without_component(x: Tensor, u: Tensor) -> Tensor:
    return x - (x * u).sum(-1, keepdim=True) * u


def perpendicular_part(u: Tensor, v: Tensor) -> Tensor:
    """v − (u·v) u for unit vectors (or zero vectors): the part across u of v − u, or of v + u."""
    # Stored directions have length 1 up to rounding only: u·e as −½‖e‖² would leave that rounding
    # in the result, 3 % of it at an angle of 1e-6.
    behind = ((u * v).sum(-1) < 0).unsqueeze(-1)
    return _without_component(v + torch.where(behind, 1.0, -1.0) * u, u)


def inner(x: PointLike, first: TangentLike, second: TangentLike) -> Tensor:
    """Riemannian inner product ξ_r ζ_r + ξ_⊥ · ζ_⊥ of shape (…) (Eq. 14): a plain sum.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x, outward = lorentz.exp_map_origin(torch.eye(2)), (torch.ones(2), torch.zeros(2, 2))
        >>> lorentz.inner(x, outward, outward)
        tensor([1., 1.])
    """
    _, first, second = promote(x, first, second)
    return first[0] * second[0] + (first[1] * second[1]).sum(-1)


def tangent_norm(x: PointLike, tangent: TangentLike) -> Tensor:
    """Length of tangent vectors (…); the zero vector has length 0 and gradient 0.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x, outward = lorentz.exp_map_origin(torch.eye(2)), (torch.ones(2), torch.zeros(2, 2))
        >>> lorentz.tangent_norm(x, outward)
        tensor([1., 1.])
    """
    squared = inner(x, tangent, tangent)
    nonzero = squared > 0
    return torch.where(nonzero, torch.sqrt(torch.where(nonzero, squared, 1.0)), 0.0)


def tangent_from_ambient(x: PointLike, ambient: Tensor) -> Tangent:
    """Frame components (…), (…, n) of tangent vectors with ambient coordinates (…, 1 + n) (Eq. 13).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x, outward = lorentz.exp_map_origin(torch.eye(2)), (torch.ones(2), torch.zeros(2, 2))
        >>> ambient = lorentz.tangent_to_ambient(x, outward)
        >>> lorentz.tangent_from_ambient(x, ambient).radial.allclose(torch.ones(2))
        True
    """
    ((a, u),) = promote(x)
    space = ambient[..., 1:].to(u.dtype)
    along = (space * u).sum(-1)
    return Tangent(along / torch.cosh(_ambient_radius(a)), space - along.unsqueeze(-1) * u)


def tangent_to_ambient(x: PointLike, tangent: TangentLike) -> Tensor:
    """Ambient coordinates (…, 1 + n) of ξ_r (sinh a, cosh a u) + (0, ξ_⊥).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x, outward = lorentz.exp_map_origin(torch.eye(2)), (torch.ones(2), torch.zeros(2, 2))
        >>> lorentz.tangent_to_ambient(x, outward).shape
        torch.Size([2, 3])
    """
    (a, u), (radial, perpendicular) = promote(x, tangent)
    a = _ambient_radius(a)
    time = radial * torch.sinh(a)
    space = (radial * torch.cosh(a)).unsqueeze(-1) * u + perpendicular
    return torch.cat([time.unsqueeze(-1), space], -1)


def gradient_from_ambient(x: PointLike, gradient: Tensor) -> Tangent:
    """Riemannian gradient from the Euclidean gradient (…, 1 + n) by ambient coordinates (Eq. 15).

    Projects the Minkowski-raised gradient onto the tangent space; no division, no cancellation.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.gradient_from_ambient(x, torch.randn(5, 4)).perpendicular.shape
        torch.Size([5, 3])
    """
    ((a, u),) = promote(x)
    gradient = gradient.to(u.dtype)
    along = (gradient[..., 1:] * u).sum(-1)
    origin = is_origin(a, u)
    a = _ambient_radius(a)
    radial = gradient[..., 0] * torch.sinh(a) + along * torch.cosh(a)
    return Tangent(torch.where(origin, 0.0, radial), _without_component(gradient[..., 1:], u))


def gradient_from_polar(
    x: PointLike, by_a: Tensor, by_u: Tensor, *, k: float | Tensor = 1.0
) -> Tangent:
    """Riemannian gradient from the gradients by a (…) and u (…, n) that autograd leaves.

    ξ_r = ∂a/√k and ξ_⊥ = (∂u − (∂u·u) u)/(√k sinh a). At the origin ∂u stands for the gradient by
    the space coordinates (in units of √k), so ξ_⊥ = ∂u/√k there.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.gradient_from_polar(x, by_a=torch.ones(5), by_u=torch.zeros(5, 3)).radial
        tensor([1., 1., 1., 1., 1.])
    """
    (a, u), (by_a, by_u) = promote(x, (by_a, by_u))
    root = square_root(check_curvature(k, a))
    origin = is_origin(a, u)
    # a = 0 with u ≠ 0 is no stored origin: its direction means nothing and gets no gradient.
    scale = torch.where(origin, 1.0, torch.sinh(_ambient_radius(a)))
    perpendicular = (
        _without_component(by_u, u) / torch.where(scale > 0, scale, torch.inf)[..., None]
    )
    return Tangent(torch.where(origin, 0.0, by_a) / root, perpendicular / column(root))


def cosines(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """1 − cos θ and 1 + cos θ of directions (…, n), each from the small difference."""
    apart, behind = half_squared_chord(u, v), half_squared_chord(u, -v)
    # At coincidence the derivative of the chord is 0 whatever arrives: also an overflow.
    return torch.where(apart > 0, apart, 0.0), torch.where(behind > 0, behind, 0.0)
