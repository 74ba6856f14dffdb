"""What works on the space coordinates: heads, concatenation, activations, pooling of images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .centroid import centroid
from .coordinates import from_unit_space, unit_space
from .distance import cosh_distance_minus_one
from .point import Point, PointLike, is_origin, promote
from .scalar import (
    asinh_exp,
    asinh_of_norm,
    limit_radius,
    log_of_norm,
    log_sinh,
    norm_and_direction,
)


def split_heads(x: PointLike, num_heads: int, log_gain: Tensor | None = None) -> Point:
    """Slice the space coordinates into heads: (…), (…, n) → (…, H), (…, H, n/H).

    ln sinh a_h = ln sinh a + ln‖u_h‖ (+ the gain of the head); each head is a point of its own.
    A round trip through `join_heads` is exact to float error up to a = 85 in float32.

    Args:
        x: points of shapes (…), (…, n).
        num_heads: H, which divides n.
        log_gain: (H,) added to ln sinh a_h.

    Raises:
        ValueError: H does not divide n.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.split_heads(x, num_heads=3).u.shape
        torch.Size([5, 3, 1])
    """
    ((a, u),) = promote(x)
    if num_heads < 1 or u.shape[-1] % num_heads:
        raise ValueError(f"{num_heads} heads do not divide points of dimension {u.shape[-1]}")
    slices = u.unflatten(-1, (num_heads, -1))
    # A zero slice is a head at its origin; sinh a times the slice are its space coordinates.
    sinh_a = torch.sinh(a.clamp(max=80.0)) + is_origin(a, u)
    gain = None if log_gain is None else log_gain.to(a.dtype)
    with torch.no_grad():
        at_zero = (1.0 / (sinh_a + (sinh_a == 0))).unsqueeze(-1).expand(slices.shape[:-1])
        if gain is not None:
            at_zero = at_zero / torch.exp(gain)
    norm, direction = norm_and_direction(slices, at_zero=at_zero)
    # ln sinh 0 = −∞ is a head at the origin, with gradient 0.
    log_radius = log_of_norm(norm) + log_sinh(a).unsqueeze(-1)
    if gain is not None:
        log_radius = log_radius + gain
    return Point(asinh_exp(log_radius) * (norm > 0), direction)


def join_heads(x: PointLike) -> Point:
    """Concatenate the space coordinates of heads: (…, H), (…, H, m) → (…), (…, H·m).

    ln sinh a = ½ logsumexp_h(2 ln sinh a_h), the Lorentz direct concatenation.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.join_heads(lorentz.split_heads(x, 3)).u.allclose(x.u, atol=1e-6)
        True
    """
    ((a, u),) = promote(x)
    if a.dim() == 0 or a.shape[-1] == 0:
        raise ValueError("join_heads needs points of shapes (…, H) and (…, H, m), H ≥ 1")
    outward = a > 0
    log_heads = log_sinh(torch.where(outward, a, 1.0))
    log_heads = torch.where(outward, log_heads, -torch.inf)
    largest = log_heads.detach().amax(-1, keepdim=True)
    some = largest > -torch.inf
    largest = torch.where(some, largest, 0.0)
    # A head at its origin keeps the derivative by its space coordinates (its u is 0).
    shares = torch.exp(torch.where(outward, log_heads, 0.0) - largest)
    total = torch.where(outward, shares * shares, 0.0).sum(-1, keepdim=True)
    length = torch.sqrt(torch.where(some, total, 1.0))
    joined = ((shares / length).unsqueeze(-1) * u).flatten(-2)
    log_radius = (torch.log(length) + largest).squeeze(-1)
    return Point(torch.where(some.squeeze(-1), asinh_exp(log_radius), 0.0), joined)


def homogeneous_activation(x: PointLike, activation: Callable[[Tensor], Tensor]) -> Point:
    """Apply φ with φ(cx) = cφ(x), c > 0, to the space coordinates without forming them.

    The direction becomes that of φ(u), and ln sinh a gains ln‖φ(u)‖; φ(u) = 0 gives the origin.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.homogeneous_activation(x, torch.relu).u.min() >= 0
        tensor(True)
    """
    ((a, u),) = promote(x)
    mapped = activation(u)
    norm, direction = norm_and_direction(mapped)
    somewhere = (norm > 0) & (a > 0)
    log_radius = log_sinh(torch.where(a > 0, a, 1.0)) + torch.log(torch.where(norm > 0, norm, 1.0))
    # An origin passes the gradient of its space coordinates on; elsewhere a zero result has none.
    direction = (somewhere | is_origin(a, u)).to(u.dtype).unsqueeze(-1) * direction
    return Point(torch.where(somewhere, asinh_exp(log_radius), 0.0), direction)


def channels_first(x: Tensor) -> Tensor:
    """(batch, height, width, n) → (batch, n, height, width), as a view."""
    return x.permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    """(batch, n, height, width) → (batch, height, width, n), as a view."""
    return x.permute(0, 2, 3, 1)


def max_pool2d(x: PointLike, kernel_size: int, stride: int | None = None) -> Point:
    """The largest of every space coordinate over windows; time follows (Bdeir et al. 2024).

    Points (batch, height, width), (batch, height, width, n). Radii are limited to twice
    `radius_limit`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> image = lorentz.exp_map_origin(torch.randn(1, 4, 4, 3))
        >>> lorentz.max_pool2d(image, 2).u.shape
        torch.Size([1, 2, 2, 3])
    """
    ((a, u),) = promote(x)
    space = channels_first(unit_space(a, u))
    return from_unit_space(channels_last(functional.max_pool2d(space, kernel_size, stride)))


def centroid_pool2d(x: PointLike, kernel_size: int) -> Point:
    """The centroids of windows that tile the image (batch, height, width), …; else ValueError.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> image = lorentz.exp_map_origin(torch.randn(1, 4, 4, 3))
        >>> lorentz.centroid_pool2d(image, 2).u.shape
        torch.Size([1, 2, 2, 3])
    """
    ((a, u),) = promote(x)
    _, height, width = a.shape
    if height % kernel_size or width % kernel_size:
        raise ValueError(f"windows of {kernel_size} do not tile {height} × {width} points")
    sides = (-1, kernel_size)
    a = a.unflatten(2, sides).unflatten(1, sides).transpose(2, 3).flatten(3)
    u = u.unflatten(2, sides).unflatten(1, sides).transpose(2, 3).flatten(3, 4)
    return centroid((a, u))


def _phases(cell: dict[tuple[int, int], Tensor], weights: tuple[float, float]) -> Tensor:
    """Σ_{i<j} w_i w_j c_ij over the four corners of every cell under one phase's weights."""
    corners = [(r, c) for r in (0, 1) for c in (0, 1)]
    w = [
        (weights[0] if r == 0 else 1 - weights[0]) * (weights[1] if c == 0 else 1 - weights[1])
        for r, c in corners
    ]
    total: Tensor | float = 0.0
    for (i, j), c in cell.items():
        total = total + (w[i] * w[j]) * c
    assert isinstance(total, Tensor)
    return total


def upsample2x(x: PointLike) -> Point:
    """Twice the height and width; each new point is the Lorentz centroid of its (up to four)
    nearest, with the weights of bilinear interpolation (`align_corners=False`).

    With Σw = 1 the squared normaliser of the centroid is 1 + 2 Σ_{i<j} w_i w_j c_ij, c_ij =
    cosh D_ij − 1: a sum of non-negative terms, and the c of neighbours do not depend on the
    weights, so they are computed once, on the small image.

    Points (batch, height, width), (batch, height, width, n) → (batch, 2·height, 2·width), ….
    Radii are limited to `radius_limit`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> image = lorentz.exp_map_origin(torch.randn(1, 4, 4, 3))
        >>> lorentz.upsample2x(image).u.shape
        torch.Size([1, 8, 8, 3])
    """
    ((a, u),) = promote(x)
    a = limit_radius(a)
    space = functional.interpolate(
        channels_first(unit_space(a, u)), scale_factor=2, mode="bilinear", align_corners=False
    )
    norm, direction = norm_and_direction(channels_last(space))
    # Borders repeat: a cell between a point and itself.
    padded_a = functional.pad(a.unsqueeze(1), (1, 1, 1, 1), mode="replicate").squeeze(1)
    padded_u = channels_last(functional.pad(channels_first(u), (1, 1, 1, 1), mode="replicate"))

    def corner(row: int, column: int) -> tuple[Tensor, Tensor]:
        rows = slice(row, row + a.shape[1] + 1)
        columns = slice(column, column + a.shape[2] + 1)
        return padded_a[:, rows, columns], padded_u[:, rows, columns]

    across = cosh_distance_minus_one(
        padded_a[:, :, :-1], padded_u[:, :, :-1], padded_a[:, :, 1:], padded_u[:, :, 1:]
    )
    down = cosh_distance_minus_one(
        padded_a[:, :-1], padded_u[:, :-1], padded_a[:, 1:], padded_u[:, 1:]
    )
    cell = {
        (0, 1): across[:, :-1],
        (2, 3): across[:, 1:],
        (0, 2): down[:, :, :-1],
        (1, 3): down[:, :, 1:],
        (0, 3): cosh_distance_minus_one(*corner(0, 0), *corner(1, 1)),
        (1, 2): cosh_distance_minus_one(*corner(0, 1), *corner(1, 0)),
    }
    rows = [
        torch.stack([_phases(cell, (top, left)) for left in (0.75, 0.25)], -1)
        for top in (0.75, 0.25)
    ]
    spread = torch.stack(rows, 2).flatten(3).flatten(1, 2)[:, 1:-1, 1:-1]
    return Point(asinh_of_norm(norm / torch.sqrt(1.0 + 2.0 * spread)), direction)


def concatenate(*points: PointLike) -> Point:
    """Lorentz direct concatenation: space coordinates side by side, (…, n), (…, m) → (…, n + m).

    Radii are limited to twice `radius_limit`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(5, 3))
        >>> lorentz.concatenate(x, x).u.shape
        torch.Size([5, 6])
    """
    spaces = [unit_space(*promote(point)[0]) for point in points]
    return from_unit_space(torch.cat(spaces, -1))
