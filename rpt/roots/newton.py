"""Inverse fourth roots by matrix products alone: what a device can run without asking the host.

A decomposition waits for the host to look at its status, which neither an asynchronous step nor a CUDA
graph can do. The coupled Newton–Schulz iteration

    Y <- Y p(ZY),  Z <- p(ZY) Z        p(T) = a I + b T + c T²,  from Y = B, Z = I

takes B with eigenvalues in (0, 1] to (B^1/2, B^-1/2) (Higham, "Functions of Matrices", 2008, section
6.7); run again on B^1/2 it gives B^-1/4. As in `rpt.polar`, each step's coefficients are minimax for the
interval that the step before left ("The Polar Express", Amsel et al. 2025): 7 and 5 steps where the
classical iteration needs about 20 and 14.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .eigh import InverseRoot, eigenvalue_floor

Steps = tuple[tuple[float, float, float], ...]

# Minimax odd quintics x (a + b x² + c x⁴) ≈ 1 for x in [l, 1], then for what the step before left;
# solved as linear programs in float64. x is the square root of an eigenvalue: the first row, with
# l = 1e-3, reaches down to eigenvalues of 1e-6 of the largest, the second, with l = 0.02, to those of
# its square root, 1e-3, and a little below.
_TO_HALF: Steps = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
    (1.8887, -1.2652, 0.3765),
    (1.875, -1.25, 0.375),
)
_TO_QUARTER: Steps = (
    (7.7110, -22.1138, 16.2487),
    (3.2153, -2.4112, 0.5013),
    (2.2183, -1.5940, 0.4107),
    (1.8842, -1.2602, 0.3760),
    (1.875, -1.25, 0.375),
)


def smallest(size: int, dtype: torch.dtype) -> float:
    """The share of the largest eigenvalue that the floor is at least.

    The coefficients reach down to 1e-6; products of long rows in float32 err by more than that.
    """
    return max(2e-6, 4.0 * torch.finfo(dtype).eps * size**0.5)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products in float32 proper: with TF32's 10 bits the iteration does not converge."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set through the newer interface, which this one refuses to describe
        before = "highest"
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _coupled(matrix: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
    """(B^1/2, B^-1/2) of symmetric matrices with eigenvalues in (0, 1], (b, n, n)."""
    root, inverse = matrix, matrix
    for i, (a, b, c) in enumerate(steps):
        product = torch.bmm(inverse, root) if i else matrix
        polynomial = torch.baddbmm(product, product, product, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        root = torch.bmm(root, polynomial)
        inverse = torch.bmm(polynomial, inverse) if i else polynomial
        # Both commute with the matrix; rounding drives them apart unless they stay symmetric.
        root, inverse = 0.5 * (root + root.mT), 0.5 * (inverse + inverse.mT)
    return root, inverse


def newton_inverse_root(
    matrix: Tensor,
    *,
    ridge: float = 1e-4,
    absolute: Tensor | float = 0.0,
    sizes: Tensor | None = None,
) -> InverseRoot:
    """(A + floor·I)^-1/4, floor = ridge · mean eigenvalue + absolute, without decomposition or host read.

    Where `inverse_root` raises eigenvalues to the floor, this adds it to them: at the floor itself the
    root is 16 % smaller, an eigenvalue ten times the floor's differs by 2 %. The floor is at least
    `smallest` of the largest eigenvalue, which counts where few directions of a long side hold everything.

    Args:
        matrix: symmetric positive semidefinite, (b, n, n), float32 or float64.
        ridge: floor relative to the mean eigenvalue.
        absolute: absolute floor, a float or (b,).
        sizes: true size of each matrix that is padded with zero rows and columns, (b,).

    Returns:
        the roots; an upper bound of the condition; failed where a result is not finite.
    """
    with _full_precision():
        return _inverse_root(matrix, ridge, absolute, sizes)


def _inverse_root(
    matrix: Tensor, ridge: float, absolute: Tensor | float, sizes: Tensor | None
) -> InverseRoot:
    size = matrix.shape[-1]
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)
    floor = eigenvalue_floor(trace / (size if sizes is None else sizes), ridge, absolute)
    # B = A over its trace: squares of squares must stay in float32's range.
    scale = trace + floor
    lifted = matrix / scale[:, None, None]
    # ‖B²‖_F^½ = (Σλ⁴)^¼ is at least the largest eigenvalue, and closer to it than the trace.
    top = torch.linalg.vector_norm(torch.bmm(lifted, lifted).flatten(1), dim=1).sqrt()
    floor = torch.maximum(floor, smallest(size, matrix.dtype) * top * scale)
    lifted.diagonal(dim1=-2, dim2=-1).add_((floor / scale)[:, None])
    # An eigenvalue above the bound by 1e-5 is thrown a little further off in every step, until it is lost.
    bound = 1.01 * top + floor / scale
    half, _ = _coupled(lifted / bound[:, None, None], _TO_HALF)
    _, root = _coupled(half, _TO_QUARTER)
    scale = bound * scale
    root = root * scale.pow(-0.25)[:, None, None]
    failed = ~root.isfinite().all(-1).all(-1)
    return InverseRoot(root, scale / floor, failed)
