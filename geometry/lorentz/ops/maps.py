"""Exponential and logarithmic maps and parallel transport in polar form (Eq. 16–19, App. B.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from .coordinates import cosines, perpendicular_part
from .distance import cosh_distance_minus_one
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
from .scalar import (
    asinh_of_norm,
    cosh_of_root,
    limit_radius,
    log_cosh,
    norm_and_direction,
    sinh_ratio,
    sinhc_of_root,
)


def exp_map_origin(v: Tensor, *, k: float | Tensor = 1.0) -> Point:
    """exp_o(v) of tangent vectors v (…, n) at the origin: r = ‖v‖, u = v/‖v‖, at every length.

    The zero vector gives the origin, where the Jacobian of the space coordinates is the identity.
    Half precision is computed and returned in float32.

    Raises:
        TypeError, ValueError: v is not floating point, or k is not positive.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        Point(a=tensor(3.), u=tensor([1., 0.]))
    """
    v = promote_vectors(v, "tangent vectors")
    return Point(*norm_and_direction(v / column(square_root(check_curvature(k, v)))))


def log_map_origin(x: PointLike, *, k: float | Tensor = 1.0) -> Tensor:
    """log_o(x) = r u of shape (…, n); the inverse of `exp_map_origin`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> lorentz.log_map_origin(x)
        tensor([3., 0.])
    """
    ((a, u),) = promote(x)
    return column(square_root(check_curvature(k, a))) * _unit_log_origin(a, u)


def _unit_log_origin(a: Tensor, u: Tensor) -> Tensor:
    return torch.where(is_origin(a, u), 1.0, a).unsqueeze(-1) * u


def exp_map(x: PointLike, tangent: TangentLike, *, k: float | Tensor = 1.0) -> Point:
    """exp_x(ξ): the point at the end of the geodesic from x along ξ (Eq. 16–18).

    Args:
        x: points (…), (…, n).
        tangent: (ξ_r, ξ_⊥) of shapes (…), (…, n) in the polar frame; at the origin all of it is
            ξ_⊥. Steps longer than twice `radius_limit` (in units of √k) are shortened to it.
        k: the curvature is −1/k.

    The radius is updated by an increment in log space and e^a is never formed; inward steps use
    Eq. 18, where nothing large cancels.

    Raises:
        TypeError, ValueError: x is no point, the tangent does not belong to it, or k ≤ 0.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> lorentz.exp_map(x, lorentz.Tangent(torch.tensor(1.0), torch.zeros(2))).a
        tensor(4.)
    """
    (a, u), (radial, perpendicular) = promote(x, tangent)
    root = square_root(check_curvature(k, a))
    step_r, step_p = radial / root, perpendicular / column(root)
    limit = 2.0 * radius_limit(a.dtype) - 2.0
    length = (step_r.detach().square() + step_p.detach().square().sum(-1)).sqrt()
    shrink = limit / length.clamp(min=limit)
    origin = is_origin(a, u)
    step_r, step_p = torch.where(origin, 0.0, step_r * shrink), step_p * shrink[..., None]

    p_squared = (step_p * step_p).sum(-1)
    squared = step_r * step_r + p_squared
    chi, one_minus_chi = torch.tanh(a), 2.0 * torch.sigmoid(-2.0 * a)
    sinhc = sinhc_of_root(squared)
    # Outward and short steps: Eq. 16 as it stands.
    direct = (step_r >= 0) | (squared < 0.1)
    time_direct = cosh_of_root(squared) + sinhc * step_r * chi
    along_direct = cosh_of_root(squared) * chi + sinhc * step_r
    # Long inward steps: Eq. 18, with ψ = 1 − |ω_r|/ω.
    omega = torch.sqrt(torch.where(direct, 1.0, squared))
    psi = p_squared / (omega * (omega + step_r.abs()))
    sinh_omega, falling = torch.sinh(omega), torch.exp(-omega)
    time_inward = falling + sinh_omega * (one_minus_chi + chi * psi)
    along_inward = chi * falling + sinh_omega * (psi - one_minus_chi)
    time = torch.where(direct, time_direct, time_inward)
    along = torch.where(direct, along_direct, along_inward)
    across = sinhc / torch.cosh(a.clamp(max=limit))

    space = along.unsqueeze(-1) * u + across.unsqueeze(-1) * step_p
    norm, direction = norm_and_direction(space, at_zero=torch.exp(-log_cosh(a)))
    # Near the origin the increment's rounding would swamp the radius: arsinh of the space norm.
    log_norm = torch.log(torch.where(norm > 0, norm, 1e-30)) + log_cosh(a)
    small = log_norm < 0
    sinh_small = torch.where(small, norm * torch.cosh(a.clamp(max=limit)), 0.0)
    increment = torch.log(time + norm) - torch.log1p(chi)
    new_a = torch.where(small, asinh_of_norm(sinh_small), (a + increment).clamp(min=0.0))
    at_origin_a, at_origin_u = norm_and_direction(perpendicular / column(root))
    return Point(
        torch.where(origin, at_origin_a, new_a),
        torch.where(origin.unsqueeze(-1), at_origin_u, direction),
    )


def log_map(x: PointLike, y: PointLike, *, k: float | Tensor = 1.0) -> Tangent:
    """log_x(y) in the polar frame at x (Eq. 19); the inverse of `exp_map`.

    Radii are limited to `radius_limit`, except from the origin, where every radius is exact.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> round(lorentz.log_map(x, lorentz.gyro_scale(2.0, x)).radial.item(), 3)
        3.0
    """
    (a, u), (b, v) = promote(x, y)
    root = square_root(check_curvature(k, a))
    x_origin, y_origin = is_origin(a, u), is_origin(b, v)
    from_origin = _unit_log_origin(b, v)
    a, b = limit_radius(a), limit_radius(b)
    ratio = sinh_ratio(cosh_distance_minus_one(a, u, b, v))
    chord = cosines(u, v)[0]
    sinh_b = torch.sinh(b)
    # Zero in value: carries the derivative by the space coordinates of y at the origin.
    v_origin = torch.where(y_origin.unsqueeze(-1), v, 0.0)
    along_origin = (v_origin * u).sum(-1)
    outward = torch.sinh(a - b) + torch.cosh(a) * (sinh_b * chord - along_origin)
    perpendicular = (
        sinh_b.unsqueeze(-1) * perpendicular_part(u, v) + v_origin - along_origin.unsqueeze(-1) * u
    )
    radial = torch.where(x_origin, 0.0, -ratio * outward)
    perpendicular = torch.where(
        x_origin.unsqueeze(-1), from_origin, ratio.unsqueeze(-1) * perpendicular
    )
    return Tangent(root * radial, column(root) * perpendicular)


def parallel_transport(
    x: PointLike, y: PointLike, tangent: TangentLike, *, k: float | Tensor = 1.0
) -> Tangent:
    """Carry a tangent vector along the geodesic from x to y, frame to frame.

    In the plane of u and v the components turn by the unit number
    (e^{−iθ} − τ)/(1 − τe^{−iθ}), τ = tanh(a/2) tanh(b/2); the rest stays. With h = 1 − cos θ,
    C = cosh((a+b)/2) and N = cosh²(D/2) this number is
    1 − h C²/N − i sin θ · C cosh((a−b)/2)/N, in which nothing cancels and θ = 0 is no exception.
    At antipodal directions the plane is undetermined; the result is the limit for a tangent vector
    perpendicular to it. Radii are limited to `radius_limit`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))
        >>> outward = lorentz.Tangent(torch.tensor(1.0), torch.zeros(2))
        >>> moved = lorentz.parallel_transport(x, lorentz.gyro_scale(2.0, x), outward)
        >>> round(moved.radial.item(), 3)
        1.0
    """
    (a, u), (b, v), (radial, perpendicular) = promote(x, y, tangent)
    check_curvature(k, a)
    x_origin, y_origin = is_origin(a, u), is_origin(b, v)
    a, b = limit_radius(a), limit_radius(b)
    h, h_behind = cosines(u, v)
    half_n = torch.sinh(0.5 * (a - b))
    cosh_squared = 1.0 + half_n * half_n + 0.5 * torch.sinh(a) * torch.sinh(b) * h
    big = torch.cosh(0.5 * (a + b))
    turn = big * (big / cosh_squared)
    slide = big * (torch.cosh(0.5 * (a - b)) / cosh_squared)
    p = perpendicular_part(u, v)
    q = -perpendicular_part(v, u)
    along = (p * perpendicular).sum(-1)
    behind = torch.where(h_behind > 0, along / torch.where(h_behind > 0, h_behind, 1.0), 0.0)
    new_radial = radial - h * turn * radial + slide * along
    new_perpendicular = (
        perpendicular
        - behind.unsqueeze(-1) * (u + v)
        - (turn * behind + slide * radial).unsqueeze(-1) * q
    )
    # From or to the origin the geodesic is radial and the transport leaves the vector as it is.
    from_radial = (v * perpendicular).sum(-1)
    from_perpendicular = perpendicular - from_radial.unsqueeze(-1) * v
    to_perpendicular = perpendicular + radial.unsqueeze(-1) * u
    new_radial = torch.where(x_origin, from_radial, new_radial)
    new_radial = torch.where(y_origin, 0.0, new_radial)
    new_perpendicular = torch.where(x_origin.unsqueeze(-1), from_perpendicular, new_perpendicular)
    new_perpendicular = torch.where(
        y_origin.unsqueeze(-1),
        torch.where(x_origin.unsqueeze(-1), perpendicular, to_perpendicular),
        new_perpendicular,
    )
    return Tangent(new_radial, new_perpendicular)
