"""How long a step is, in units of the learning rate: what makes AdamW's rate carry over.

Pure functions over a stack of `b` parameters; per-parameter numbers are (b, 1), arrays or tensors as
`numbers` says (`rpt.rule.scalars`). Source: the specification, section 8a.
"""

from __future__ import annotations

import math

from torch import Tensor

from .scalars import Numbers, Scalars

# Bounds of s: a step is never silenced by a few opposing requests, nor let loose by agreeing ones.
LOWEST, HIGHEST = 0.02, 4.0
# A matrix of zeros moves as one of torch's default initialisation would, whose RMS is 0.58/√fan_in.
_FLOOR = 0.5


def next_energy(
    energy: Scalars, length: Scalars, beta1: float, correction: Scalars, numbers: Numbers
) -> Scalars:
    """e <- β1 e + (1-β1) ‖P‖², the running energy of the live requests, (b, 1).

    Args:
        energy: e; a negative one, of a state saved without it, starts at the present request.
        length: ‖P‖.
        beta1: momentum coefficient.
        correction: 1 - β1^t.
    """
    square = length * length
    moved = energy * beta1 + square * (1.0 - beta1)
    return numbers.where(energy < 0, square * correction, moved)


def noise_ratio(beta1: float, correction: Scalars) -> Scalars:
    """r₀: what ‖m̂‖/√ê is when successive requests are independent noise, (b, 1).

    √((1-β1)/(1+β1) · (1+β1^t)/(1-β1^t)): 1 at the first step, √((1-β1)/(1+β1)) at last.

    Args:
        correction: 1 - β1^t.
    """
    return ((1.0 - beta1) / (1.0 + beta1) * (2.0 - correction) / correction) ** 0.5


def signal(
    momentum: Scalars, energy: Scalars, beta1: float, correction: Scalars, numbers: Numbers
) -> Scalars:
    """s = clip(r/r₀), r = ‖m̂‖/√ê: 1 in pure noise, more where requests agree, less where they oppose.

    AdamW's own law, whose update is |m̂|/√v̂, read per parameter instead of per entry.

    Args:
        momentum: ‖m‖ after accumulation, (b, 1).
        energy: e, (b, 1); 0 only where every request so far was zero, and s is then 1.
        beta1: momentum coefficient.
        correction: 1 - β1^t, (b, 1).
    """
    root = (energy * correction) ** 0.5
    some = root > 0
    ratio = numbers.where(some, momentum / numbers.where(some, root, 1.0), 1.0)
    ratio = ratio / noise_ratio(beta1, correction)
    return numbers.at_most(numbers.at_least(ratio, LOWEST), HIGHEST)


def relative_limit(
    norms: Scalars,
    sizes: Scalars,
    fan_in: Scalars,
    share: float,
    rate: float | Tensor,
    numbers: Numbers,
) -> Scalars:
    """The RMS at which lr·RMS(u) is `share` of max(RMS(W), ½/√fan_in), (b, 1); inf at a rate of 0.

    Args:
        norms: ‖W‖ of each whole matrix, (b, 1).
        sizes: its number of entries, (b, 1).
        fan_in: its number of columns, (b, 1).
        share: τ, `max_relative_step`.
        rate: the learning rate, times the gain.
    """
    own, floor = norms / sizes**0.5, _FLOOR / fan_in**0.5
    if isinstance(rate, Tensor):
        rate = numbers.read(rate)
    elif not rate:
        return own + math.inf
    return numbers.where(own > floor, own, floor) * share / rate


def tempered(limit: Scalars, strength: Scalars, numbers: Numbers) -> Scalars:
    """The limit times min(s, 1), (b, 1).

    A step that is cut is one at a high rate. Where requests oppose each other besides, the signal must
    still shorten it: without that a rate that is too high swings at the limit for ever.
    """
    return limit * numbers.at_most(strength, 1.0)


def step_rms(
    rms: float | None, strength: Scalars, own: Scalars, limit: Scalars | None, numbers: Numbers
) -> Scalars:
    """The root mean square that each update is to have, (b, 1).

    Args:
        rms: κ, `update_rms`; None: the update's own.
        strength: s.
        own: the update's own RMS.
        limit: the largest allowed; None for none.
    """
    target = own if rms is None else rms * strength
    if limit is None:
        return target
    return numbers.where(target > limit, limit, target)


def rescale(
    update: Tensor, length: Scalars, rms: Scalars, size: Scalars, numbers: Numbers
) -> Tensor:
    """Give every row the root mean square `rms` over its `size` true entries; a zero row stays zero.

    Args:
        update: u, (b, n), changed in place.
        length: ‖u‖, (b, 1).
        rms: the target, (b, 1).
        size: number of entries behind each row without padding, (b, 1).
    """
    factor = rms * size**0.5 / numbers.where(length > 0, length, math.inf)
    return update.mul_(numbers.tensor(factor))


def next_gain(
    gain: Tensor, coherence: Tensor, *, rate: float, target: float, low: float, high: float
) -> Tensor:
    """g <- clip(exp(ln g + rate (q̄ - target)), low, high), the published rule's controller of length.

    Args:
        gain: g, 0-d float64.
        coherence: q̄, the mean frame coherence of the group's parameters that had one, 0-d.
        rate: `gain_rate`.
        target: `target_coherence`.
        low: `min_gain`.
        high: `max_gain`.
    """
    return (gain.log() + rate * (coherence.to(gain) - target)).exp().clamp(low, high)
