"""The reference path: one slab of queries against keys, in plain differentiable operations.

Called on all queries at once it is the dense oracle (it makes queries × keys tensors and supports
double backward); `sliced.py` calls it on slices.

Source: RT-Filter paper, Algorithm 1 steps 3–6, extensions G.1 and G.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...softmax import masked_log_sum_exp, masked_softmax
from ..logits import PolarSettings, directional_logits, lag_tables, radial_logits
from ..model import multiply_by_i
from ..parameters import FilterScalars
from ..visibility import Visibility

__all__ = ["PolarEstimate", "PolarInputs", "polar_estimate"]


class PolarInputs(NamedTuple):
    """Rotated unit directions and magnitudes of queries and keys.

    query: (batch, heads, queries, 2d), key and value: (batch, heads, keys, 2d), unit length;
    query_magnitude (batch, heads, queries), key_magnitude (batch, heads, keys).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_magnitude: Tensor
    key_magnitude: Tensor


class PolarEstimate(NamedTuple):
    """What attention estimates for each query.

    direction: consensus v̄ in the rotated frame, (batch, heads, queries, 2d), length at most 1.
    magnitude: m̄, (batch, heads, queries); equal to the query's own m where nothing is visible or
        the radial estimate is off, so that the radial correction is zero there.
    log_precision: log λ_ū = log Σ_j w κ (G.3), or None where not asked for.
    directional_weights, radial_weights: A_T, A_R, (batch, heads, queries, keys), or None.
    """

    direction: Tensor
    magnitude: Tensor
    log_precision: Tensor | None = None
    directional_weights: Tensor | None = None
    radial_weights: Tensor | None = None


def polar_estimate(
    inputs: PolarInputs,
    view: Visibility,
    scalars: FilterScalars,
    settings: PolarSettings,
    *,
    start: int = 0,
    stop: int | None = None,
    keys: int | None = None,
    dropout: float = 0.0,
    precision: bool = False,
    weights: bool = False,
) -> PolarEstimate:
    """Directional and radial estimates for queries start…stop against the first `keys` keys.

    Dropout acts on directional weights; the radial mean, whose weights sum to one, is left alone.
    """
    query, own = inputs.query[:, :, start:stop], inputs.query_magnitude[:, :, start:stop, None]
    key, value = inputs.key[:, :, :keys], inputs.value[:, :, :keys]
    magnitude = inputs.key_magnitude[:, :, None, :keys]
    per_head = scalars.reshaped(1, 1)
    lag = view.lag(start, stop, keys)
    allowed, additive = view.allowed(lag, start, stop, keys)
    tables = lag_tables(lag.to(query.dtype), per_head, settings)

    cosine = query @ key.transpose(-1, -2)
    if settings.exact:
        turned = query @ multiply_by_i(key).transpose(-1, -2)
        gap = (1.0 - cosine * cosine - turned * turned).clamp_min(0.0)
    else:
        gap = (1.0 - cosine).clamp_min(0.0)
        cosine = 1.0 - gap
    plain = directional_logits(gap, magnitude, tables, per_head, settings)
    logits = per_head.temperature * plain
    if additive is not None:
        logits = logits + additive
    attention = masked_softmax(logits, allowed)
    kept = F.dropout(attention, dropout) if dropout else attention
    if settings.exact:
        direction = (kept * cosine) @ value + (kept * turned) @ multiply_by_i(value)
    else:
        direction = kept @ value

    radial, mean = None, own.squeeze(-1)
    if settings.radial != "off":
        projected = cosine * (magnitude * tables.decay)
        if settings.radial == "shared":
            radial = attention
        else:
            radial_scores = radial_logits(projected, own, tables, per_head, settings)
            if settings.radial == "joint":
                precision_only = settings._replace(weights="none")
                influence = plain - directional_logits(
                    gap, magnitude, tables, per_head, precision_only
                )
                radial_scores = radial_scores + influence
            if additive is not None:
                radial_scores = radial_scores + additive
            radial = masked_softmax(radial_scores, allowed)
        visible = radial.detach().sum(-1) > 0
        mean = torch.where(visible, (radial * projected).sum(-1), mean)
    log_precision = None
    if precision:
        log_precision = masked_log_sum_exp(plain if additive is None else plain + additive, allowed)
    return PolarEstimate(
        direction,
        mean,
        log_precision,
        attention if weights else None,
        radial if weights else None,
    )
