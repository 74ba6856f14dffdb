"""The polar share of a step: Newton–Schulz polar factor, matched in norm, mixed by the polar weight.

Pure functions over a batch of matrices (b, rows, cols). Source: the RPT guide, "Transport remains
the default update", operation 4; the quintic coefficients are those of Muon.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["QUINTIC", "polar_factor", "polar_share"]

Coefficients = tuple[float, float, float]

# Steep at zero rather than convergent: singular values land between about 0.7 and 1.2.
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)


def polar_factor(matrix: Tensor, schedule: Sequence[Coefficients]) -> Tensor:
    """Approximate the polar factor U Vᵀ of each matrix U S Vᵀ.

    Each step is X <- a X + (b A + c A²) X with A = X Xᵀ, on the side with fewer rows.

    Args:
        matrix: (b, rows, cols), float32 or float64.
        schedule: one (a, b, c) per step.

    Returns:
        (b, rows, cols), singular values near one, the zero matrix for a zero matrix.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for a, b, c in schedule:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def polar_share(
    update: Tensor, weight: Tensor, schedule: Sequence[Coefficients], transport_eps: float
) -> Tensor:
    """Mix each update with its norm-matched polar factor and restore the update's own length.

    O <- O ‖u‖/‖O‖, B = (1-α) u + α O, u <- B ‖u‖/‖B‖: α decides how a step is spread over singular
    directions, not how long it is.

    Args:
        update: u, (b, rows, cols).
        weight: α in [0, 1], (b,).
        schedule: Newton–Schulz coefficients, one triple per step.
        transport_eps: updates no longer than this are left alone.

    Returns:
        (b, rows, cols). Rows with α = 0 come back unchanged, bit for bit.
    """
    weight = weight.to(update.dtype).view(-1, 1, 1)
    length = torch.linalg.matrix_norm(update, keepdim=True)
    factor = polar_factor(update, schedule)
    factor = factor * (length / _positive(torch.linalg.matrix_norm(factor, keepdim=True)))
    blend = torch.lerp(update, factor, weight)
    blend = blend * (length / _positive(torch.linalg.matrix_norm(blend, keepdim=True)))
    return torch.where((weight > 0) & (length > transport_eps), blend, update)


def _positive(length: Tensor) -> Tensor:
    return torch.where(length > 0, length, 1.0)
