"""Points and tangent vectors in polar form, and the checks every operation makes on them.

A point of the Lorentz model with curvature −1/k is the pair (a, u): a = r/√k ≥ 0 is the geodesic
distance from the origin in curvature units, u is the unit direction of the space coordinates, so
that the ambient point is √k (cosh a, sinh a · u). The origin is a = 0 *with u = 0 stored*.

**Gradients at the origin.** The direction has no derivative there, but the space coordinates
sinh(a)·u have one. At an origin (a = 0 and u = 0) the cotangent of `u` therefore stands for the
cotangent of the space coordinates in units of √k. Every operation here reads and writes gradients
by that rule, so that gradients pass through the origin (a zero-initialised projection learns).

`PointLike` and `TangentLike` are what operations take: any pair of tensors of such shapes.

Example:
    >>> import torch, rpt.geometry.lorentz as lorentz
    >>> x: lorentz.PointLike = (torch.tensor(3.0), torch.tensor([1.0, 0.0]))
    >>> lorentz.tangent_norm(x, (torch.tensor(2.0), torch.zeros(2)))  # a TangentLike
    tensor(2.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor


class Point(NamedTuple):
    """A batch of points: `a` of shape (…), `u` of shape (…, n). A plain pair to autograd.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.distance_to_origin(lorentz.Point(a=torch.tensor(3.0), u=torch.tensor([1.0, 0.0])))
        tensor(3.)
    """

    a: Tensor
    u: Tensor


class Tangent(NamedTuple):
    """A batch of tangent vectors in the polar frame (Polar-ViT paper, Eq. 13).

    `radial` of shape (…) is the component along the outward unit vector, `perpendicular` of shape
    (…, n) is orthogonal to u. At the origin every vector is perpendicular and `radial` is 0.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.Tangent(radial=torch.zeros(5), perpendicular=torch.zeros(5, 3)).perpendicular.shape
        torch.Size([5, 3])
    """

    radial: Tensor
    perpendicular: Tensor


PointLike: TypeAlias = tuple[Tensor, Tensor]

TangentLike: TypeAlias = tuple[Tensor, Tensor]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def promote(*pairs: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs (…), (…, n) in one dtype, float32 at least; TypeError or ValueError for anything else."""
    dtype = torch.float32
    dimension = None
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"expected a point (a, u) or a tangent vector (radial, perpendicular), got "
                f"{type(pair).__name__}; build points with from_ambient or exp_map_origin"
            )
        first, second = pair
        for member in pair:
            if not isinstance(member, Tensor) or not member.is_floating_point():
                raise TypeError(
                    f"points and tangent vectors are pairs of real floating-point tensors, got "
                    f"{getattr(member, 'dtype', type(member).__name__)}"
                )
            dtype = torch.promote_types(dtype, member.dtype)
        if first.shape != second.shape[:-1]:
            raise ValueError(
                f"a pair must have shapes (…) and (…, n), got {tuple(first.shape)} and "
                f"{tuple(second.shape)}"
            )
        if dimension is not None and second.shape[-1] != dimension:
            raise ValueError(
                f"all points must have the same dimension n, got {dimension} and {second.shape[-1]}"
            )
        dimension = second.shape[-1]
    return [(first.to(dtype), second.to(dtype)) for first, second in pairs]


def promote_point(x: PointLike, dimension: int) -> tuple[Tensor, Tensor]:
    """As `promote` for one batch of points, of a given dimension."""
    ((a, u),) = promote(x)
    if u.shape[-1] != dimension:
        raise ValueError(f"expected points of dimension {dimension}, got {u.shape[-1]}")
    return a, u


def promote_vectors(x: Tensor, name: str) -> Tensor:
    """Vectors in float32 at least; TypeError where they are not floating point."""
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_curvature(k: float | Tensor, like: Tensor) -> float | Tensor:
    """k as a positive float, or as a tensor of the dtype of `like`, whose value is not looked at."""
    if isinstance(k, Tensor):
        return k.to(like.dtype) if k.is_floating_point() else k.to(like)
    if not (k > 0 and math.isfinite(k)):
        raise ValueError(f"k (the curvature is −1/k) must be positive and finite, got {k!r}")
    return float(k)


def square_root(k: float | Tensor) -> float | Tensor:
    """√k for either kind."""
    return k.sqrt() if isinstance(k, Tensor) else math.sqrt(k)


def column(k: float | Tensor) -> float | Tensor:
    """Let a tensor k of shape (…) multiply vectors (…, n)."""
    return k.unsqueeze(-1) if isinstance(k, Tensor) and k.dim() > 0 else k


def host_readable(x: Tensor) -> bool:
    """Whether Python may branch on the values of x: in host memory, neither traced nor mapped.
    Whatever branches on it must have one meaning on both sides."""
    return (
        x.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def is_origin(a: Tensor, u: Tensor) -> Tensor:
    """Where a point is the stored origin: a = 0 and u = 0. Shape (…)."""
    without_radius = a == 0
    # Origins are rare, and reading all of u to find none costs as much as what is done with it.
    if host_readable(a) and host_readable(u) and not bool(without_radius.any()):
        return without_radius
    # The largest component: a reduction of booleans takes ten times as long on a CPU.
    return without_radius & (u.detach().abs().amax(-1) == 0)


def radius_limit(dtype: torch.dtype) -> float:
    """The largest a at which sinh a · sinh b of two such points is formed: 43 in float32.

    Operations that form this product take radii beyond the limit as the limit (conversions to
    ambient coordinates allow twice as much). float32 stops resolving distances of √k at a ≈ 17
    (Proposition 2), long before.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.radius_limit(torch.float32), lorentz.radius_limit(torch.float64)
        (43.0, 350.0)
    """
    return 350.0 if dtype == torch.float64 else 43.0


def origin_like(u: Tensor) -> Point:
    """Return origins (0, 0) for directions `u` of shape (…, n).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.origin_like(torch.ones(2))
        Point(a=tensor(0.), u=tensor([0., 0.]))
    """
    zeros = torch.zeros_like(u)
    return Point(zeros[..., 0], zeros)


def without_autocast(device_type: str) -> torch.autocast:
    """A region in which products keep the dtype of their arguments."""
    return torch.autocast(device_type, enabled=False)
