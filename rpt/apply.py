"""W <- decay · W - rate · u: how an update reaches a weight, and how the weight is rounded.

`SingleProcess` is what the optimizer asks where there are no ranks: everything is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .ownership import Agreement, Live, Outcome, StepSize
from .rule.update import Step

__all__ = ["SingleProcess", "apply_updates", "largest_entries", "round_into", "step_size"]


def step_size(group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> StepSize:
    """(1 - lr·g·weight_decay, lr·g): numbers, or 0-d tensors where the rate or the gain is one."""
    rate = group["lr"]
    if group["gain_rate"]:
        rate = rate * group["gain"]
    if isinstance(rate, Tensor):
        rate = rate.reshape(()).to(device=device, dtype=dtype, non_blocking=True)
    return StepSize(1.0 - rate * group["weight_decay"], rate, group["rounding"])


def apply_updates(parameters: Sequence[Tensor], updates: Sequence[Tensor], size: StepSize) -> None:
    """W <- decay · W - rate · u in the update's dtype, then rounded to the parameter's."""
    if not parameters:
        return
    decay, rate = size.decay, size.rate
    if isinstance(rate, Tensor):
        updates = torch._foreach_mul(list(updates), rate)
        rate = 1.0
    low = [
        i for i, (p, u) in enumerate(zip(parameters, updates, strict=True)) if p.dtype != u.dtype
    ]
    if not low:
        _decay_and_add(list(parameters), list(updates), decay, rate)
        return
    # Allocated before anything is written: running out of memory then changes no weight.
    wide = [parameters[i].to(updates[i].dtype) for i in low]
    if len(low) < len(parameters):
        same = [i for i in range(len(parameters)) if i not in set(low)]
        some = [decay[i] for i in same] if isinstance(decay, list) else decay
        _decay_and_add([parameters[i] for i in same], [updates[i] for i in same], some, rate)
    if isinstance(decay, list):
        decay = [decay[i] for i in low]
    _decay_and_add(wide, [updates[i] for i in low], decay, rate)
    for i, value in zip(low, wide, strict=True):
        round_into(parameters[i], value, updates[i], size.rounding)


def _decay_and_add(
    parameters: list[Tensor],
    updates: list[Tensor],
    decay: float | Tensor | list[Tensor],
    rate: float,
) -> None:
    if isinstance(decay, (Tensor, list)) or decay != 1.0:
        torch._foreach_mul_(parameters, decay)
    torch._foreach_add_(parameters, updates, alpha=-rate)


def largest_entries(gradients: Sequence[Tensor]) -> Tensor:
    """Largest absolute entry of each gradient, (k,), float64 if any is; NaN or inf stay what they are."""
    if not gradients:
        return torch.zeros(0)
    device = gradients[0].device
    wide = any(gradient.dtype == torch.float64 for gradient in gradients)
    dtype = torch.float64 if wide else torch.float32
    if device.type != "cpu":
        norms = torch._foreach_norm(list(gradients), float("inf"))
        return torch.stack([norm.to(device, dtype) for norm in norms])
    # On a CPU an infinity norm takes ten times as long as both extremes do.
    lows, highs = zip(*(torch.aminmax(gradient) for gradient in gradients), strict=True)
    low = torch.stack([value.to(device, dtype) for value in lows])
    return torch.maximum(-low, torch.stack([value.to(device, dtype) for value in highs]))


def round_into(parameter: Tensor, value: Tensor, update: Tensor, rounding: str) -> None:
    """Write a float32 (or float64) `value` to `parameter`, rounding to its dtype.

    "nearest" loses every step smaller than half the spacing of bfloat16 numbers, 0.2 % of a weight.
    "stochastic" rounds up or down with the probabilities that make it right on average (Gupta et al.
    2015). Its randomness is a hash of the bits of the update and of the value: no generator to keep in a
    checkpoint, the same on every rank that holds the weight, the same in a resumed run.

    Args:
        parameter: any floating dtype; other than bfloat16 it is rounded to nearest.
        value: the new weight, of the same shape.
        update: what it was changed by, of the same shape and `value`'s dtype.
        rounding: one of `ROUNDINGS`.
    """
    if rounding == "stochastic" and parameter.dtype == torch.bfloat16:
        value = _dither(value.float(), update.float())
    parameter.copy_(value)


def _dither(value: Tensor, update: Tensor) -> Tensor:
    """Round to a multiple of bfloat16's spacing, up with the probability of what is cut off."""
    bits = value.contiguous().view(torch.int32)
    # 2³²/φ (Knuth's multiplicative hash), then a mixing constant of MurmurHash3.
    noise = update.contiguous().view(torch.int32) * -1640531527
    noise = noise ^ (noise >> 15) ^ bits
    noise = noise * -2048144789
    noise = (noise ^ (noise >> 13)) & 0xFFFF
    rounded = ((bits + noise) & -65536).view(torch.float32)
    # Next to the largest number a carry would make an infinity, and in a NaN another number.
    return torch.where(value.abs() < 3.3e38, rounded, value)


class SingleProcess:
    """Everything is here."""

    def agree(self, live: Sequence[Live], observed: Committed) -> Agreement:
        peaks = largest_entries([gradient for *_, gradient in live])
        # One host synchronisation: which parameters take part is the host's decision.
        return Agreement(list(live), peaks.tolist(), observed)

    def refuse(self, error: Exception) -> None:
        pass

    def owns(self, parameter: Tensor) -> bool:
        return True

    def portions(self, live: Sequence[Live]) -> Iterator[list[Live]]:
        yield list(live)

    def deliver(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        size: StepSize,
        step: Step,
    ) -> None:
        apply_updates(parameters, updates, size)

    def fail(self, error: Exception) -> None:
        pass

    def finish(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        return outcomes

    def whole_state(self, state: Mapping[Tensor, Any]) -> Mapping[Tensor, Any]:
        return state

    def adopt_state(self, state: Mapping[Tensor, Any]) -> None:
        pass
