"""How long a step is, in units of the learning rate: what makes AdamW's rate carry over.

Pure functions over a stack of `b` parameters; per-parameter numbers are (b, 1), arrays or tensors
(`rpt.scalars`). Source: the specification, section 8a.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .scalars import Scalars, as_tensor, at_least, at_most, choose

__all__ = [
    "UNKNOWN",
    "next_energy",
    "noise_ratio",
    "relative_limit",
    "rescale",
    "signal",
    "step_rms",
]

# The energy of a state that was saved without one.
UNKNOWN = -1.0
# Bounds of s: a step is never silenced by a few opposing requests, nor let loose by agreeing ones.
LOWEST, HIGHEST = 0.02, 4.0
# A matrix of zeros moves as one of torch's default initialisation would, whose RMS is 0.58/√fan_in.
_FLOOR = 0.5


def next_energy(energy: Scalars, length: Scalars, beta1: float, correction: Scalars) -> Scalars:
    """e <- β1 e + (1-β1) ‖P‖², the running energy of the live requests, (b, 1).

    Args:
        energy: e; `UNKNOWN` starts it at the present request.
        length: ‖P‖.
        correction: 1 - β1^t.
    """
    square = length * length
    moved = energy * beta1 + square * (1.0 - beta1)
    return choose(energy < 0, square * correction, moved)


def noise_ratio(beta1: float, correction: Scalars) -> Scalars:
    """r₀: what ‖m̂‖/√ê is when successive requests are independent noise, (b, 1).

    √((1-β1)/(1+β1) · (1+β1^t)/(1-β1^t)): 1 at the first step, √((1-β1)/(1+β1)) at last.

    Args:
        correction: 1 - β1^t.
    """
    return ((1.0 - beta1) / (1.0 + beta1) * (2.0 - correction) / correction) ** 0.5


def signal(momentum: Scalars, energy: Scalars, beta1: float, correction: Scalars) -> Scalars:
    """s = clip(r/r₀), r = ‖m̂‖/√ê: 1 in pure noise, more where requests agree, less where they oppose.

    AdamW's own law, whose update is |m̂|/√v̂, read per parameter instead of per entry.

    Args:
        momentum: ‖m‖ after accumulation, (b, 1).
        energy: e, (b, 1); 0 only where every request so far was zero, and s is then 1.
        correction: 1 - β1^t, (b, 1).
    """
    root = (energy * correction) ** 0.5
    ratio = choose(root > 0, momentum / choose(root > 0, root, 1.0), 1.0)
    return at_most(at_least(ratio / noise_ratio(beta1, correction), LOWEST), HIGHEST)


def relative_limit(
    norms: Tensor, parameters: Sequence[Tensor], share: float, rate: float | Tensor
) -> Tensor:
    """The RMS at which lr·RMS(u) is `share` of max(RMS(W), ½/√fan_in), (b,); inf at a rate of 0.

    Args:
        norms: ‖W‖ of each whole matrix, (b,).
        parameters: the matrices; fan_in is numel/shape[0].
        share: τ, `max_relative_step`.
        rate: the learning rate, times the gain.
    """
    sizes = norms.new_tensor([p.numel() ** -0.5 for p in parameters])
    floors = norms.new_tensor([_FLOOR * (p.shape[0] / p.numel()) ** 0.5 for p in parameters])
    return torch.maximum(norms * sizes, floors) * share / rate


def step_rms(rms: float | None, strength: Scalars, own: Scalars, limit: Scalars | None) -> Scalars:
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
    return choose(target > limit, limit, target)


def rescale(update: Tensor, length: Scalars, rms: Scalars, size: Scalars) -> Tensor:
    """Give every row the root mean square `rms` over its `size` true entries; a zero row stays zero.

    Args:
        update: u, (b, n), changed in place.
        length: ‖u‖, (b, 1).
        rms: the target, (b, 1).
        size: number of entries behind each row without padding, (b, 1).
    """
    return update.mul_(as_tensor(rms * size**0.5 / choose(length > 0, length, math.inf)))
