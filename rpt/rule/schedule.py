"""Whose roots are due, and the units in which gradients are counted: decisions from counters alone.

Everything is (k, 1), arrays or tensors (`rpt.rule.scalars`), and every row is decided by itself: what a
parameter's step is never depends on its neighbours.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .scalars import Numbers, Scalars

# How many times the largest gradient entry that its roots have seen makes a gradient too large for them.
OUTGROWN = 4.0

# In matrices with no side longer than this a decomposition costs little beside its call: all refresh at
# the same ages, so that one call serves all that share a stack.
_SMALL = 64
_GOLDEN = 0.6180339887498949


def share_of_age(shapes: Scalars, numbers: Numbers) -> Scalars:
    """The share of the longest age that the roots of (rows, cols) matrices may reach, (k, 2) -> (k, 1).

    From a half to one, by the shape alone: matrices of one shape fall due together, and are decomposed
    in one call; those of different shapes do not, unless all are small.
    """
    first, second = shapes[:, :1], shapes[:, 1:]
    # Multiples of the golden ratio are spread evenly in [0, 1). Orientation does not matter.
    label = first + second + numbers.where(first < second, first, second)
    spread = 0.5 + 0.5 * (label * _GOLDEN % 1.0)
    small = (first <= _SMALL) & (second <= _SMALL)
    return numbers.where(small, 0.75, spread)


def overdue(
    step: Scalars,
    last: Scalars,
    share: Scalars,
    outgrown: Scalars,
    longest: int,
    by_age: bool,
    numbers: Numbers,
) -> Scalars:
    """The age of each matrix's roots over the age that they may reach: due from one on.

    With a drift threshold that is `max_root_staleness`, exactly as published. Without one, age decides
    alone: a share of 1 + step/3 while the covariance is young, of `max_root_staleness` later, so that a
    256×256 matrix is refreshed at steps 1, 3, 6, 10, 15, 22, …; and at once where the gradient has outgrown
    its roots, which would pass it on at a length that drowns the momentum for hundreds of steps.

    Args:
        step: the number of this step, of the matrix's own.
        last: that of the last refresh, 0 for none.
        share: what `share_of_age` says.
        outgrown: whether its gradients have become much larger than those its roots were made of.
        longest: `max_root_staleness`.
        by_age: whether there is no drift threshold.
    """
    age = step - last
    if by_age:
        limit = -(-numbers.at_most(1.0 + step / 3.0, longest) * share // 1.0)
        return numbers.where((last == 0) | outgrown, np.inf, age / limit)
    return numbers.where(last == 0, np.inf, age / longest)


def most_overdue(ages: Tensor, able: Tensor, longest: int) -> Tensor:
    """What a recorded graph refreshes: as many in each step as reach every matrix in turn.

    Args:
        ages: what `overdue` returned, (k, 1).
        able: whether anything can be made of its statistics in this step, bool (k, 1): those that are
            not come last, or a matrix that never has a gradient would take every turn.
        longest: `max_root_staleness`.

    Returns:
        indices, int64, ascending.
    """
    # 0.75 is what `share_of_age` comes to on average.
    count = -int(-len(ages) // max(1.0, 0.75 * longest))
    if count == len(ages):
        return torch.arange(count, device=ages.device)
    return torch.where(able, ages, -torch.inf).view(-1).topk(count).indices.sort().values


def next_unit(unit: Scalars, peak: Scalars, numbers: Numbers) -> Scalars:
    """The power of two that a float32 gradient is divided by, fixed at its first non-zero value.

    Covariances are squares of the gradient: in these units float32 holds them for gradients from 1e-30
    to 1e30, and scaling every gradient by a power of two changes no bit of the step.

    Args:
        unit: the unit so far, 0 for none.
        peak: largest absolute entry of the gradient.
    """
    if numbers.on_host and (unit > 0).all():
        return unit
    frexp = np.frexp if numbers.on_host else torch.frexp
    # Of a number m·2^e, 2^e = (m·2^e)/m exactly.
    mantissa, _ = frexp(peak)
    power = peak / numbers.where(peak > 0, mantissa, 1.0)
    power = numbers.at_most(numbers.at_least(power, 2.0**-126), 2.0**126)
    return numbers.where((unit > 0) | (peak == 0), unit, power)


def divisor(unit: Scalars, peak: Scalars, numbers: Numbers) -> Scalars:
    """What to divide a gradient by: its unit, or more where its square would still overflow."""
    floor = np.maximum if numbers.on_host else torch.maximum
    return floor(numbers.where(unit > 0, unit, 1.0), peak * 2.0**-50)
