"""Decompositions that survive what LAPACK does in float32, and the inverse roots made from them."""

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
    """A batched decomposition of which every matrix that has one gets it.

    A solver that does not converge raises for the whole batch, or returns NaN for one matrix and says
    nothing. Both lead to the same: what has no finite result is tried alone, then in float64.

    Args:
        solver: such as `torch.linalg.eigh`.
        matrix: (b, n, m), float32 or float64; one that is not finite never reaches the solver.
        shapes: of one matrix's results.

    Returns:
        the solver's results; failed (b,) bool, where they are zeros.
    """
    failed = ~matrix.isfinite().flatten(1).all(1)
    safe = matrix.masked_fill(failed[:, None, None], 0.0)
    try:
        parts = tuple(solver(safe))
        solved = torch.stack([part.isfinite().flatten(1).all(1) for part in parts]).all(0)
    except torch.linalg.LinAlgError:
        parts = tuple(safe.new_zeros(len(safe), *shape) for shape in shapes)
        solved = torch.zeros_like(failed)
    # A host read: a decomposition has just waited for the device.
    for i in (~solved).nonzero().flatten().tolist():
        single = safe[i : i + 1]
        if len(safe) == 1 and single.dtype == torch.float64:
            failed[i] = True
            again = tuple(torch.zeros_like(part) for part in parts)
        else:
            wider = single if len(safe) > 1 else single.double()
            again, lost = decompose(solver, wider, shapes)
            failed[i] |= lost[0]
        for part, value in zip(parts, again, strict=True):
            part[i] = value[0]
    return parts, failed


def eigh_shapes(matrix: Tensor) -> list[tuple[int, ...]]:
    """What `torch.linalg.eigh` gives for one of these matrices."""
    n = matrix.shape[-1]
    return [(n,), (n, n)]


def resolve_cluster(
    values: Tensor,
    vectors: Tensor,
    matrix: Tensor,
    floor: Tensor,
    sizes: Tensor | None = None,
) -> Tensor:
    """Eigenvalues of a batch, sharpened where the lower half of them is one value within rounding.

    A solver errs by eps times the largest eigenvalue. Where at least half of all eigenvalues lie
    within that of each other (few directions above a damped rest), this error is all that tells them
    apart; Rayleigh quotients are exact to second order in the vectors' error. Ordinary spectra are
    spread wider, or lie under the floor, and pay for one comparison.

    Args:
        values: (b, n), ascending. vectors, matrix: (b, n, n).
        floor: below it nothing matters, (b,).
        sizes: true size of each matrix, (b,), where zeros pad it: they come first in `values`.
    """
    size = values.shape[-1]
    low, middle = values[:, 0], values[:, size // 2]
    if sizes is not None:
        low = _pick(values, size - sizes)
        middle = _pick(values, size - sizes + torch.div(sizes, 2, rounding_mode="floor"))
    width = middle - low
    noise = values[:, -1] * torch.finfo(values.dtype).eps
    clustered = (width < 64 * noise) & (middle > floor) & (middle > 16 * noise)
    # A host read: a decomposition has just waited for the device.
    if not clustered.any():
        return values
    quotients = (vectors * (matrix @ vectors)).sum(-2)
    return torch.where(clustered[:, None], quotients, values)


def _pick(values: Tensor, column: Tensor) -> Tensor:
    """One value of each row, (b, n), (b,) -> (b,)."""
    return values.gather(1, column.long()[:, None]).squeeze(1)


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
    """V max(Λ, floor)^power Vᵀ of the symmetrised matrix, floor = ridge · mean(max(Λ, 0)) + absolute.

    The floor follows the matrix's own scale, so that root(c·A) = c^power · root(A).

    Args:
        matrix: (b, n, n) or (n, n), float32 or float64.
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
    matrix = 0.5 * (matrix + matrix.mT)
    (values, vectors), failed = decompose(torch.linalg.eigh, matrix, eigh_shapes(matrix))
    size = matrix.shape[-1]
    mean = values.clamp_min(0).sum(-1) / (size if sizes is None else sizes)
    floor = eigenvalue_floor(mean, ridge, absolute)
    if values.dtype != torch.float64:
        values = resolve_cluster(values, vectors, matrix, floor, sizes)
    floored = torch.maximum(values, floor[:, None])
    root = (vectors * floored.pow(power).unsqueeze(-2)) @ vectors.mT
    low = floored[:, 0]
    if sizes is not None:
        # The zeros of the padding come first in ascending order.
        low = _pick(floored, size - sizes)
    return InverseRoot(root, floored[:, -1] / low, failed)
