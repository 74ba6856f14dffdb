"""The limit in which nothing of the filter is left: scaled dot-product attention.

Source: RT-Filter paper, appendix D.3 and D.4.
"""

from __future__ import annotations

from torch import Tensor

from ...softmax import softmax_attention
from ..parameters import FilterScalars
from ..visibility import Visibility
from .dense import PolarEstimate, PolarInputs

__all__ = ["standard_attention", "standard_scale"]


def standard_attention(
    inputs: PolarInputs, view: Visibility, scale: Tensor, dropout: float, dense: bool
) -> PolarEstimate:
    """softmax(scale q·k) v; a fully masked row is zero.

    Args:
        scale: logit scale per head, (heads,).
        dense: plain operations, with weights and second derivatives.
    """
    query = inputs.query * scale[:, None, None]
    aligned = view.index_ordered and query.shape[2] == inputs.key.shape[2]
    allowed, additive, causal = None, None, view.causal and aligned
    if view.padding is not None or view.mask is not None or causal != view.causal:
        allowed, additive = view.allowed(view.lag())
        causal = False
    direction, weights = softmax_attention(
        query,
        inputs.key,
        inputs.value,
        allowed,
        additive,
        is_causal=causal,
        scale=1.0,
        dropout=dropout,
        dense=dense,
    )
    return PolarEstimate(direction, inputs.query_magnitude, None, weights, None)


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
