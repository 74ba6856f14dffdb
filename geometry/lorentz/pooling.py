"""Pooling, upsampling and concatenation of images of points."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .centroid import centroid
from .conv import channels_first, channels_last
from .convert import from_unit_space, unit_space
from .distance import cosh_distance_minus_one
from .point import Point, PointLike, promote, radius_limit
from .scalar import asinh_of_norm, norm_and_direction

__all__ = [
    "CentroidPool2d",
    "PolarMaxPool2d",
    "centroid_pool2d",
    "concatenate",
    "max_pool2d",
    "upsample2x",
]


def max_pool2d(x: PointLike, kernel_size: int, stride: int | None = None) -> Point:
    """The largest of every space coordinate over windows; time follows (Bdeir et al. 2024).

    Points (batch, height, width), (batch, height, width, n). Radii are limited to twice
    `radius_limit`.
    """
    ((a, u),) = promote(x)
    space = channels_first(unit_space(a, u))
    return from_unit_space(channels_last(functional.max_pool2d(space, kernel_size, stride)))


def centroid_pool2d(x: PointLike, kernel_size: int) -> Point:
    """The centroids of windows that tile the image."""
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
    """
    ((a, u),) = promote(x)
    a = a.clamp(max=radius_limit(a.dtype))
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
    """
    spaces = [unit_space(*promote(point)[0]) for point in points]
    return from_unit_space(torch.cat(spaces, -1))


class PolarMaxPool2d(nn.Module):
    """`max_pool2d` as a module."""

    def __init__(self, kernel_size: int = 2) -> None:
        super().__init__()
        self.kernel_size = kernel_size

    def forward(self, x: PointLike) -> Point:
        """Points of an image to points of a smaller one."""
        return max_pool2d(x, self.kernel_size)


class CentroidPool2d(nn.Module):
    """`centroid_pool2d` as a module."""

    def __init__(self, kernel_size: int = 2) -> None:
        super().__init__()
        self.kernel_size = kernel_size

    def forward(self, x: PointLike) -> Point:
        """Points of an image to points of a smaller one."""
        return centroid_pool2d(x, self.kernel_size)
