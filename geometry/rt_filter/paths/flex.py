"""The same estimate through FlexAttention, for CUDA (its backward does not run on a CPU).

Three fused attentions: the directional one; and, for m̄ = Q̃·Σ_j A_R E m_j K̃_j, one whose logits
carry an extra log E, rescaled by the two normalisers. Magnitudes, times and parameters enter as
captured tensors, so no queries × keys tensor is made.

Source: RT-Filter paper, Algorithm 1. Tested against `dense.py`: values on any device; gradients
need a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..logits import PolarSettings, directional_logits, lag_tables, radial_logits
from ..parameters import FilterScalars
from ..visibility import Visibility, visible_rows
from .dense import PolarEstimate, PolarInputs

__all__ = ["flex_estimate"]

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_estimate(
    inputs: PolarInputs,
    view: Visibility,
    scalars: FilterScalars,
    settings: PolarSettings,
    dropout: float = 0.0,
    precision: bool = False,
) -> PolarEstimate:
    """`dense.polar_estimate` for the chordal settings.

    Raises:
        ValueError: for what FlexAttention cannot express here: the exact estimate, dropout, shared
            radial weights, the Bayesian gain, an additive mask.
        RuntimeError: gradients wanted on a CPU.
    """
    additive = view.mask is not None and view.mask.dtype != torch.bool
    if settings.exact or dropout or precision or additive or settings.radial == "shared":
        raise ValueError(
            "backend='flex' serves chordal attention with own or no radial weights, without"
            " dropout, Bayesian gain or additive masks; use backend='auto'"
        )
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *scalars))
    if inputs.query.device.type != "cuda" and wants_gradient:
        raise RuntimeError("FlexAttention has no backward on this device; use backend='auto'")
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = torch.compile(flex_attention) if inputs.query.is_cuda else flex_attention
    query_times, key_times = (
        (t - view.key_times[:, :1]).to(inputs.query.dtype).expand(inputs.query.shape[0], -1)
        for t in (view.query_times, view.key_times)
    )
    own, magnitude = inputs.query_magnitude, inputs.key_magnitude

    def at(head: Tensor) -> FilterScalars:
        return FilterScalars(*(s[head] for s in scalars))

    def hidden(batch: Tensor, head: Tensor, i: Tensor, j: Tensor, lag: Tensor) -> Tensor:
        allowed = lag >= 0 if view.causal else lag == lag
        if view.padding is not None:
            allowed = allowed & ~view.padding[batch, j]
        if view.mask is not None:
            row = batch if view.mask.shape[0] > 1 else batch * 0
            which = head if view.mask.shape[1] > 1 else head * 0
            allowed = allowed & view.mask[row, which, i, j]
        return ~allowed

    def directional(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        lag, numbers = query_times[b, i] - key_times[b, j], at(h)
        tables = lag_tables(lag, numbers, settings)
        gap = (1.0 - score).clamp_min(0.0)
        logit = directional_logits(gap, magnitude[b, h, j], tables, numbers, settings)
        logit = numbers.temperature * logit
        return torch.where(hidden(b, h, i, j, lag), -float("inf"), logit)

    def radial(extra: bool) -> Score:
        def score_of(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            lag, numbers = query_times[b, i] - key_times[b, j], at(h)
            tables = lag_tables(lag, numbers, settings)
            cosine = 1.0 - (1.0 - score).clamp_min(0.0)
            projected = cosine * magnitude[b, h, j] * tables.decay
            logit = radial_logits(projected, own[b, h, i], tables, numbers, settings)
            if extra:
                logit = logit - numbers.decay * lag.abs()
            return torch.where(hidden(b, h, i, j, lag), -float("inf"), logit)

        return score_of

    direction = run(inputs.query, inputs.key, inputs.value, score_mod=directional, scale=1.0)
    mean = own
    if settings.radial == "own":
        weighted = magnitude.unsqueeze(-1) * inputs.key
        _, plain = _with_normaliser(run, inputs, weighted, radial(False))
        pulled, decayed = _with_normaliser(run, inputs, weighted, radial(settings.decay))
        mean = (inputs.query * pulled).sum(-1) * torch.exp(decayed - plain)
    if view.padding is not None or view.mask is not None:
        visible = visible_rows(view, own.shape[0])
        direction = direction.masked_fill(~visible[..., None], 0.0)
        mean = torch.where(visible, mean, own)
    return PolarEstimate(direction, mean)


def _with_normaliser(
    run: Any, inputs: PolarInputs, values: Tensor, score: Score
) -> tuple[Tensor, Tensor]:
    """Attention output and log normaliser, under either of PyTorch's two ways to ask for it."""
    from torch.nn.attention import flex_attention as module

    request = getattr(module, "AuxRequest", None)
    if request is None:
        return run(inputs.query, inputs.key, values, score_mod=score, scale=1.0, return_lse=True)
    out, auxiliary = run(
        inputs.query,
        inputs.key,
        values,
        score_mod=score,
        scale=1.0,
        return_aux=request(lse=True),
    )
    return out, auxiliary.lse
