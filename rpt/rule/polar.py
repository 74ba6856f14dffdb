"""The polar share of a step: Newton–Schulz polar factor, matched in norm, mixed by the polar weight.

Pure functions over a batch of matrices (b, rows, cols). Source: the RPT guide, "Transport remains the
default update", operation 4. Two schedules of coefficients are offered: Muon's quintic, which the guide
uses, and one that starts from a tighter bound of the largest singular value, chooses each step's
coefficients for what the step before left (as in "The Polar Express", Amsel et al. 2025), and so needs
about two steps less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .scalars import Numbers, Scalars

__all__ = ["Schedule", "polar_factor", "polar_schedule", "polar_share", "working_dtype"]

Coefficients = tuple[float, float, float]

# Steep at zero rather than convergent: singular values land between about 0.7 and 1.2.
_QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)

# Minimax odd quintics for singular values in [l, 1] and then in [1-e, 1+e], e the error before;
# l = 0.1, 0.05 and 0.01 leave e = 0.06, 0.007 and 0.013. Solved as linear programs in float64.
_TIGHT: dict[int, tuple[Coefficients, ...]] = {
    2: ((5.6037, -13.8837, 9.7334), (2.1306, -1.5116, 0.4020)),
    3: ((6.7524, -18.3510, 13.2633), (2.5379, -1.8747, 0.4413), (1.9270, -1.3066, 0.3807)),
    4: (
        (8.0934, -23.6206, 17.4463),
        (3.6366, -2.7219, 0.5365),
        (2.6613, -1.9772, 0.4526),
        (1.9562, -1.3375, 0.3839),
    ),
}
# The limit of the minimax quintic as its interval closes on 1.
_FINAL: Coefficients = (1.875, -1.25, 0.375)
# How far rounding to bfloat16 may lift the largest singular value: the first steps throw what lies above
# one far off.
_MARGIN = 1.01


@dataclass(frozen=True)
class Schedule:
    """Coefficients of the Newton–Schulz steps, and what the matrix is divided by before them.

    Attributes:
        steps: one (a, b, c) per step X <- a X + (b A + c A²) X, A = X Xᵀ.
        tight: divide by ‖(X Xᵀ)²‖_F^¼, which exceeds the largest singular value by at most the
            eighth root of the rank, instead of by ‖X‖_F.
    """

    steps: tuple[Coefficients, ...]
    tight: bool


@cache
def polar_schedule(name: str, steps: int) -> Schedule:
    """The schedule called "quintic" or "tight" with a number of steps (tight takes at least 2).

    Raises:
        ValueError: an unknown name, or a tight schedule of one step.
    """
    if name == "quintic":
        return Schedule((_QUINTIC,) * steps, tight=False)
    if name != "tight":
        raise ValueError(f"polar_schedule={name!r} must be 'quintic' or 'tight'")
    if steps < 2:
        raise ValueError("polar_schedule='tight' needs polar_steps of at least 2")
    chosen = _TIGHT[min(steps, 4)]
    return Schedule(chosen + (_FINAL,) * (steps - len(chosen)), tight=True)


def working_dtype(name: str, like: Tensor) -> torch.dtype:
    """The dtype of the Newton–Schulz products that the option `polar_dtype` asks for.

    Args:
        name: "auto", "float32" or "bfloat16".
        like: what is to be shaped; a float64 tensor is never lowered.
    """
    if like.dtype == torch.float64:
        return torch.float64
    if name == "auto":
        return torch.bfloat16 if _has_bfloat16(like.device) else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


@cache
def _has_bfloat16(device: torch.device) -> bool:
    """Whether its products in bfloat16 are several times as fast: CUDA from compute capability 8 on."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= 8


def polar_factor(
    matrix: Tensor, schedule: Schedule, numbers: Numbers, length: Scalars | None = None
) -> Tensor:
    """Approximate the polar factor U Vᵀ of each matrix U S Vᵀ.

    All steps are polynomials in the Gram matrix of the shorter side, which is formed once: a matrix
    twice as long as wide or longer is touched only to form it and to apply the product. Not so in
    bfloat16, whose rounding would make small eigenvalues of that Gram matrix negative.

    Args:
        matrix: (b, rows, cols), float32, float64 or bfloat16.
        schedule: coefficients and start.
        length: Frobenius norms where they are known, (b, 1, 1).

    Returns:
        (b, rows, cols), singular values near one, the zero matrix for a zero matrix.
    """
    x, (short, long) = matrix, sorted(matrix.shape[-2:])
    tall = matrix.shape[-2] > short
    low = matrix.dtype == torch.bfloat16
    wide = torch.float32 if low else matrix.dtype
    gram_side = long >= 2 * short and not low
    read, tensor, at_least = numbers.read, numbers.tensor, numbers.at_least

    length = read(_lengths(x, wide)) if length is None else length
    gram = _symmetric(x.mT, x) if tall else _symmetric(x, x.mT)
    if schedule.tight:
        # ‖A²‖_F^¼ = (Σσ⁸)^⅛: with A² at hand for the first step, it costs one norm. Of a matrix much
        # shorter than one the eighth powers are zero in float32: A is divided by its trace first.
        shrink = 1.0 / at_least(length * length, 1e-30)
        gram.mul_(tensor(shrink))
        square = _symmetric(gram, gram)
        # Of a trace of one the norm is at least n^-3/2: less is what underflowed.
        scale = at_least(read(_lengths(square, wide)), 1e-10) ** -0.5
        scale = scale / _MARGIN**2 if low else scale
        start = (scale * shrink) ** 0.5
    else:
        square = _symmetric(gram, gram)
        start = 1.0 / at_least(length, 1e-7)
        scale = start * start
    inverse = tensor(start)
    gram = gram.mul_(tensor(scale))
    factor: Tensor | None = None
    for i, (a, b, c) in enumerate(schedule.steps):
        if i:
            polynomial = _symmetric(gram, gram, gram, b, c)
        else:
            polynomial = (gram * b).addcmul_(square, tensor(c * scale * scale))
        last = i == len(schedule.steps) - 1
        if gram_side:
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = polynomial if factor is None else _symmetric(polynomial, factor)
            if not last:
                gram = _symmetric(_symmetric(polynomial, gram), polynomial)
        else:
            x = torch.baddbmm(x, *((x, polynomial) if tall else (polynomial, x)), beta=a)
            if i == 0:
                x.mul_(inverse)
            if not last:
                gram = _symmetric(x.mT, x) if tall else _symmetric(x, x.mT)
    if factor is not None:
        factor.mul_(inverse)
        x = torch.bmm(x, factor) if tall else torch.bmm(factor, x)
    return x


def polar_share(
    update: Tensor,
    weight: Scalars,
    schedule: Schedule,
    transport_eps: float,
    numbers: Numbers,
    length: Scalars | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Mix each update with its norm-matched polar factor and restore the update's own length.

    O <- O ‖u‖/‖O‖, B = (1-α) u + α O, u <- B ‖u‖/‖B‖: α decides how a step is spread over singular
    directions, not how long it is.

    Args:
        update: u, (b, rows, cols).
        weight: α in [0, 1], (b, 1).
        schedule: of the polar factor.
        transport_eps: updates no longer than this are left alone.
        numbers: how the numbers are kept; on the host they decide what is computed.
        length: ‖u‖ where it is known, (b, 1, 1).
        out: where the result goes; it may be `update`.
        dtype: of the products of the polar factor, None for the update's own. Lengths are taken and
            matched in the update's.

    Returns:
        (b, rows, cols). Rows with α = 0 come back unchanged, bit for bit.
    """
    where, tensor = numbers.where, numbers.tensor
    length = numbers.read(_lengths(update)) if length is None else length
    # Where nothing is to be shaped the coefficients become 1, 0 and 1: unchanged, bit for bit.
    alpha = weight[:, :, None] * (length > transport_eps)
    dtype = dtype or update.dtype
    factor = polar_factor(update.to(dtype), schedule, numbers, length).to(update.dtype)
    out = factor if out is None else out
    size = numbers.read(_lengths(factor))
    match = tensor(alpha * length * ((size > 0) / where(size > 0, size, 1.0)))
    # Reading the host's own memory costs nothing, and the weight is 1 until something is observed.
    if numbers.on_host and (alpha == 1.0).all():
        return torch.mul(factor, match, out=out)
    blend = factor.mul_(match).addcmul_(update, tensor(1.0 - alpha))
    size = numbers.read(_lengths(blend))
    restore = where(alpha == 0, 1.0, length * ((size > 0) / where(size > 0, size, 1.0)))
    return torch.mul(blend, tensor(restore), out=out)


# The k-th of so many rows of blocks is computed up to the diagonal: 1/4 + 2/4 + 3/4 + 1 of four.
_BLOCKS = 4


def _blocks_pay(size: int, device: torch.device) -> bool:
    """On a CPU, where `_symmetric` takes 0.8 of a product's time at 256 and 0.7 at 1024.

    A device counts calls, and only large products fill it.
    """
    return device.type == "cpu" and size >= 256


def _symmetric(
    a: Tensor, b: Tensor, base: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """beta · base + alpha · A B where that is known to be symmetric: all products but those with X itself.

    In blocks it takes 5/8 of the operations. (b, n, k), (b, k, n), (b, n, n) -> (b, n, n).
    """
    size = a.shape[-2]
    if not _blocks_pay(size, a.device):
        return torch.bmm(a, b) if base is None else base.baddbmm(a, b, beta=beta, alpha=alpha)
    out = a.new_empty(len(a), size, size)
    rows = -(-size // _BLOCKS)
    for start in range(0, size, rows):
        end = min(start + rows, size)
        part = out[:, start:end, :end]
        if base is not None:
            part.copy_(base[:, start:end, :end])
        part.baddbmm_(a[:, start:end], b[:, :, :end], beta=beta, alpha=alpha)
        out[:, :start, start:end] = part[:, :, :start].mT
    return out


def _lengths(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Frobenius norms, (b, 1, 1)."""
    return torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True, dtype=dtype)
