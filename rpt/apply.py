"""W <- decay · W - rate · u: how an update reaches a weight, and how the weight is rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StepSize(NamedTuple):
    """How an update reaches a weight: W <- decay · W - rate · u, then rounding to the weight's dtype.

    Attributes:
        decay: 1 - lr·g·weight_decay: one for all, or a list of 0-d tensors, one for each.
        rate: lr·g.
        rounding: "nearest" or "stochastic".
    """

    decay: float | Tensor | list[Tensor]
    rate: float | Tensor
    rounding: str


# Of so many entries copies cost less than calls.
_FEW = 1 << 18


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
    decay, rate = size.decay, size.rate
    if isinstance(rate, Tensor):
        updates, rate = torch._foreach_mul(list(updates), rate), 1.0
    same: list[int] = []
    low: list[int] = []
    for i, parameter in enumerate(parameters):
        (same if parameter.dtype == updates[i].dtype else low).append(i)
    # Allocated before anything is written: running out of memory then changes no weight.
    wide = {i: parameters[i].to(updates[i].dtype) for i in low} if low else {}
    for some in (same, low):
        if some:
            _decay_and_add(
                [wide.get(i, parameters[i]) for i in some],
                [updates[i] for i in some],
                [decay[i] for i in some] if isinstance(decay, list) else decay,
                rate,
            )
    for i, value in wide.items():
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
        return torch.zeros(0, device="cpu")
    device, dtype = gradients[0].device, torch.float32
    extremes = []
    for gradient in gradients:
        if gradient.dtype == torch.float64:
            dtype = torch.float64
    if device.type != "cpu":
        norms = torch._foreach_norm(list(gradients), float("inf"))
        return torch.stack([norm.to(device, dtype) for norm in norms])
    if sum(map(Tensor.numel, gradients)) < _FEW:
        largest = torch._foreach_max(torch._foreach_abs(list(gradients)))
        return torch.stack([each.to(device, dtype) for each in largest])
    # On a CPU an infinity norm takes ten times as long as both extremes do, which need no copies.
    for gradient in gradients:
        low, high = torch.aminmax(gradient)
        extremes += [low.to(device, dtype), high.to(device, dtype)]
    return torch.stack(extremes).view(-1, 2).abs().amax(1)


def weight_norms(parameters: Sequence[Tensor]) -> Tensor:
    """‖W‖ of each, (k,), in float32 or the parameters' float64: half precision would overflow."""
    dtype = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(list(parameters), 2, dtype=dtype))


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
        rounding: "nearest" or "stochastic".
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
