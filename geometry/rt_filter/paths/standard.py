"""The limit in which nothing of the filter is left: scaled dot-product attention.

Source: RT-Filter paper, appendix D.3 and D.4.
"""

from __future__ import annotations

from ...softmax import softmax_attention
from ..parameters import FilterScalars
from ..visibility import Visibility
from .dense import PolarEstimate, PolarInputs

__all__ = ["standard_attention"]


def standard_attention(
    inputs: PolarInputs,
    view: Visibility,
    scalars: FilterScalars,
    ahead: int | None,
    length: int,
    dropout: float,
    dense: bool,
) -> PolarEstimate:
    """softmax(2βκ̃/ν q·k) v; a fully masked row is zero.

    Args:
        ahead: as in `stream.TokenStream`.
        length: squared length of queries and keys: 1 on the sphere, d where they are unnormalised.
        dense: plain operations, with weights and second derivatives.
    """
    variance = scalars.key_tangential + scalars.inflation_tangential + scalars.query_tangential
    scale = 2.0 * scalars.temperature * scalars.sphere_scale
    scale = scale / (scalars.nu_tangential * variance * length)
    aligned = ahead == 0 and inputs.query.shape[2] == inputs.key.shape[2]
    allowed, additive, causal = None, None, view.causal and aligned
    if view.padding is not None or view.mask is not None or causal != view.causal:
        allowed, additive = view.allowed(view.lag())
        causal = False
    direction, weights = softmax_attention(
        inputs.query * scale[:, None, None],
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
