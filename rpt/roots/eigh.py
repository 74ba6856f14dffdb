"""Decompositions in float64, and the inverse roots made from them.

A float32 solver errs by the largest eigenvalue's rounding, which is a few per cent of the floor, returns
NaN for some rank-deficient matrices without a word, and tells a cluster of small eigenvalues apart by
noise. Of small matrices float64 takes no longer, of 128×128 ones 1.7 times as long, once in many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class InverseRoot(NamedTuple):
    """A batch of inverse roots.

    Attributes:
        root: (b, n, n).
        condition: largest over smallest floored eigenvalue, (b,).
        failed: True where no decomposition could be had and `root` must not be used, (b,).
    """

    root: Tensor
    condition: Tensor
    failed: Tensor


def decompose(
    solver: Callable[[Tensor], tuple[Tensor, ...]],
    matrix: Tensor,
    shapes: Sequence[tuple[int, ...]],
) -> tuple[tuple[Tensor, ...], Tensor]:
    """A batched decomposition, in float64, of which every matrix that has one gets it.

    A solver that does not converge raises for the whole batch, or returns NaN for one matrix and says
    nothing. After the first the matrices are tried one by one.

    Args:
        solver: such as `torch.linalg.eigh`.
        matrix: (b, n, m); one that is not finite never reaches the solver.
        shapes: of one matrix's results.

    Returns:
        the solver's results, float64; failed (b,) bool, where they must not be used.
    """
    failed = ~_finite(matrix)
    safe = matrix.masked_fill(failed[:, None, None], 0.0).double()
    try:
        parts = tuple(solver(safe))
    except torch.linalg.LinAlgError:
        if len(safe) == 1:
            return tuple(safe.new_zeros(1, *s) for s in shapes), torch.ones_like(failed)
        each = [decompose(solver, single, shapes) for single in safe.split(1)]
        found, lost = zip(*each, strict=True)
        parts = tuple(torch.cat(part) for part in zip(*found, strict=True))
        failed = failed | torch.cat(lost)
    for part in parts:
        failed = failed | ~_finite(part)
    return parts, failed


def _finite(parts: Tensor) -> Tensor:
    """Whether all entries are, (b, ...) -> (b,)."""
    return parts.sum(tuple(range(1, parts.ndim)), dtype=torch.float64).isfinite()


def eigh_shapes(matrix: Tensor) -> list[tuple[int, ...]]:
    """What `torch.linalg.eigh` gives for one of these matrices."""
    n = matrix.shape[-1]
    return [(n,), (n, n)]


def eigenvalue_floor(mean: Tensor, ridge: float, absolute: Tensor | float) -> Tensor:
    """floor = ridge · mean(max(Λ, 0)) + ε²; a zero matrix with ε = 0 gets 1, so its root is I.

    A ridge below the dtype's precision counts as that: rounding leaves eigenvalues of that size.
    """
    floor = max(ridge, torch.finfo(mean.dtype).eps) * mean + absolute
    return torch.where(floor > 0, floor, 1.0)


def inverse_root(
    matrix: Tensor,
    power: float = -0.25,
    *,
    ridge: float = 1e-4,
    absolute: Tensor | float = 0.0,
    sizes: Tensor | None = None,
) -> InverseRoot:
    """V max(Λ, floor)^power Vᵀ, floor = ridge · mean(max(Λ, 0)) + absolute.

    The floor follows the matrix's own scale, so that root(c·A) = c^power · root(A).

    Args:
        matrix: symmetric, (b, n, n) or (n, n), float32 or float64; the lower triangle is read.
        power: the exponent, -1/4 for a two-sided metric.
        ridge: relative floor of the eigenvalues.
        absolute: absolute floor, a float or (b,).
        sizes: true size of each matrix that is padded with zero rows and columns, (b,).

    Example:
        >>> import torch, rpt
        >>> covariance = torch.diag(torch.tensor([4.0, 16.0]))[None]
        >>> rpt.roots.inverse_root(covariance, power=-0.5).root[0].diag()
        tensor([0.5000, 0.2500])
    """
    if matrix.ndim == 2:
        single = inverse_root(matrix.unsqueeze(0), power, ridge=ridge, absolute=absolute)
        return InverseRoot(*(field.squeeze(0) for field in single))
    dtype, size = matrix.dtype, matrix.shape[-1]
    (values, vectors), failed = decompose(torch.linalg.eigh, matrix, eigh_shapes(matrix))
    mean = values.clamp_min(0).sum(-1) / (size if sizes is None else sizes)
    floor = eigenvalue_floor(mean.to(dtype), ridge, absolute)
    floored = torch.maximum(values, floor[:, None])
    vectors = vectors.to(dtype)
    root = (vectors * floored.pow(power).to(dtype).unsqueeze(-2)) @ vectors.mT
    low = floored[:, 0]
    if sizes is not None:
        # The zeros of the padding come first in ascending order.
        low = floored.gather(1, (size - sizes).long()[:, None]).squeeze(1)
    return InverseRoot(root, (floored[:, -1] / low).to(dtype), failed)
