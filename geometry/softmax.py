"""Softmax attention under masks: rows that see nothing are zero, and gradients stay finite.

`softmax_attention` runs through `F.scaled_dot_product_attention`, or in plain operations, which can
be differentiated twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "SECOND_DERIVATIVES",
    "damaged",
    "first_order_only",
    "masked_log_sum_exp",
    "masked_softmax",
    "softmax_attention",
]

SECOND_DERIVATIVES = (
    "this attention path has first derivatives only; build the layer with backend='dense', or set"
    " its `backend` to 'dense', for second ones"
)


def damaged(x: Tensor) -> Tensor:
    """Which vectors of x (…, n) hold NaN or infinity: boolean (…,), in one pass over x."""
    x = x.detach()
    return torch.isnan((x - x).sum(-1))


def _shifted(logits: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """exp(logits − peak), zero where not allowed, and the peak of each row (0 in an empty one)."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    if not logits.shape[-1]:
        return logits, logits.new_zeros((*logits.shape[:-1], 1))
    peak = logits.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    return torch.exp(logits - peak), peak


def masked_softmax(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the last dimension where `allowed`; a row with nothing allowed is zero.

    Logits of −inf count as not allowed. Gradients stay finite in every case.
    """
    unnormalised, _ = _shifted(logits, allowed)
    total = unnormalised.sum(-1, keepdim=True)
    return unnormalised / total.masked_fill(total == 0, 1.0)


def masked_log_sum_exp(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """log Σ_j exp(logits) over allowed keys, (…,): −inf for a fully masked row, gradients
    finite.
    """
    unnormalised, peak = _shifted(logits, allowed)
    total = unnormalised.sum(-1)
    empty = total == 0
    value = torch.log(total.masked_fill(empty, 1.0)) + peak.squeeze(-1)
    return value.masked_fill(empty, float("-inf"))


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    dense: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale q·k + bias) v over allowed keys, and the weights where `dense`.

    Args:
        query, key, value: (…, queries or keys, features).
        allowed: boolean, broadcastable to (…, queries, keys), True where a query may attend.
        bias: floating, likewise, added to the logits; −inf excludes.
        is_causal: query i sees keys up to i, besides; queries and keys are then equally many.
        scale: default 1/√features.
        dense: plain operations, which have second derivatives, instead of the fused ones.
    """
    if is_causal and (dense or allowed is not None or bias is not None):
        shape = (query.shape[-2], key.shape[-2])
        earlier = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        allowed = earlier if allowed is None else allowed & earlier
        is_causal = False
    if dense or not query.shape[-2] or not key.shape[-2]:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        logits = (query * scale) @ key.transpose(-1, -2)
        weights = masked_softmax(logits if bias is None else logits + bias, allowed)
        kept = F.dropout(weights, dropout) if dropout else weights
        return kept @ value, weights
    mask, sees = allowed, None
    if bias is not None:
        mask = bias.to(query.dtype)
        if allowed is not None:
            mask = mask.masked_fill(~allowed, float("-inf"))
        sees = (mask > float("-inf")).any(-1, keepdim=True)
        mask = mask.masked_fill(~sees, 0.0)
    elif allowed is not None:
        # A row that sees nothing may look at everything here; its result is dropped below.
        sees = allowed.any(-1, keepdim=True)
        mask = allowed | ~sees
    query, key, value = first_order_only(query, key, value)
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale
    )
    return (mixed if sees is None else mixed.masked_fill(~sees, 0.0)), None


def first_order_only(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors themselves; a second derivative through them raises an error that says what to do.

    For operations whose own gradient cannot be differentiated, and say so in words of their own.
    """
    # Compiled graphs have no second derivatives at all, and PyTorch says so.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tensors
    return _FirstOrder.apply(*tensors)


class _FirstOrder(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> Any:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _NoSecondOrder.apply(*gradients)


class _NoSecondOrder(_FirstOrder):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(SECOND_DERIVATIVES)
