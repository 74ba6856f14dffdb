"""The limit in which nothing of the filter is left: scaled dot-product attention.

Source: RT-Filter paper, appendix D.3 and D.4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .dense import PolarEstimate, PolarInputs
from .logits import masked_softmax
from .masks import Visibility, rows_that_see
from .parameters import FilterScalars

__all__ = ["standard_attention", "standard_scale"]


def standard_attention(
    inputs: PolarInputs, view: Visibility, scale: Tensor, dropout: float, need_weights: bool
) -> PolarEstimate:
    """softmax(scale q·k) v through `F.scaled_dot_product_attention`; a fully masked row is zero.

    Args:
        scale: logit scale per head, (heads,).
    """
    query = inputs.query * scale[:, None, None]
    own = inputs.query_magnitude
    if need_weights:
        allowed, additive = view.allowed(view.lag())
        logits = query @ inputs.key.transpose(-1, -2)
        attention = masked_softmax(logits if additive is None else logits + additive, allowed)
        kept = F.dropout(attention, dropout) if dropout else attention
        return PolarEstimate(kept @ inputs.value, own, None, attention, None)
    aligned = view.index_ordered and query.shape[2] == inputs.key.shape[2]
    unmasked = view.padding is None and view.mask is None
    if unmasked and (aligned or not view.causal):
        direction = F.scaled_dot_product_attention(
            query, inputs.key, inputs.value, dropout_p=dropout, is_causal=view.causal, scale=1.0
        )
        return PolarEstimate(direction, own)
    allowed, additive = view.allowed(view.lag())
    batch, keys = inputs.key.shape[0], inputs.key.shape[2]
    everything = torch.ones(batch, keys, dtype=torch.bool, device=query.device)
    visible = rows_that_see(everything, view).unsqueeze(-1)
    if additive is not None:
        mask = additive.to(query.dtype)
        if allowed is not None:
            mask = mask.masked_fill(~allowed, float("-inf"))
        mask = mask.masked_fill(~visible, 0.0)
    else:
        assert allowed is not None
        # A row that sees nothing may look at everything here; its result is dropped below.
        mask = allowed | ~visible
    direction = F.scaled_dot_product_attention(
        query, inputs.key, inputs.value, attn_mask=mask, dropout_p=dropout, scale=1.0
    )
    return PolarEstimate(direction.masked_fill(~visible, 0.0), own)


def standard_scale(scalars: FilterScalars, length: int) -> Tensor:
    """What multiplies q·k where every correction is off: 2βκ̃/ν, over `length`, (heads,).

    Args:
        length: squared length of queries and keys: 1 on the sphere, d where they are unnormalised.
    """
    variance = scalars.key_tangential + scalars.inflation_tangential + scalars.query_tangential
    return (
        scalars.temperature
        * scalars.sphere_scale
        * 2.0
        / (scalars.nu_tangential * variance * length)
    )
