"""Which path computes an estimate: dense, sliced, closed form, or FlexAttention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunked import map_query_slices, slice_length
from .dense import PolarEstimate, PolarInputs, polar_estimate
from .kernel import MASKED, kernel_estimate
from .logits import PolarSettings
from .masks import Visibility, rows_that_see
from .parameters import FilterScalars

__all__ = ["Request", "estimate"]


class Request(NamedTuple):
    """What is wanted besides the estimate.

    ahead: keys before query 0 where tokens stand on the grid 0, 1, 2, …; None for other times.
    """

    backend: str
    dense: bool
    ahead: int | None
    dropout: float = 0.0
    precision: bool = False
    weights: bool = False


def estimate(
    inputs: PolarInputs,
    view: Visibility,
    scalars: FilterScalars,
    settings: PolarSettings,
    request: Request,
) -> PolarEstimate:
    """`polar_estimate`, by the path that `request` and the settings call for."""
    if request.dense:
        return polar_estimate(
            inputs,
            view,
            scalars,
            settings,
            dropout=request.dropout,
            precision=request.precision,
            weights=request.weights,
        )
    if request.backend == "flex":
        from .flex import flex_estimate

        return flex_estimate(inputs, view, scalars, settings, request.dropout, request.precision)
    learned_mask = view.mask is not None and view.mask.requires_grad
    plain = not (settings.exact or request.precision or learned_mask)
    if request.ahead is not None and plain:
        return _closed_form(inputs, view, scalars, settings, request.ahead, request.dropout)
    return _sliced(inputs, view, scalars, settings, request)


def _sliced(
    inputs: PolarInputs,
    view: Visibility,
    scalars: FilterScalars,
    settings: PolarSettings,
    request: Request,
) -> PolarEstimate:
    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]

    def piece(start: int, stop: int, visible: int) -> tuple[Tensor, ...]:
        part = polar_estimate(
            inputs,
            view,
            scalars,
            settings,
            start=start,
            stop=stop,
            keys=visible,
            dropout=request.dropout,
            precision=request.precision,
        )
        found = (part.direction, part.magnitude, part.log_precision)
        return tuple(t for t in found if t is not None)

    ordered = request.ahead is not None and view.causal
    return PolarEstimate(
        *map_query_slices(
            piece,
            queries,
            keys,
            slice_length(batch, heads, keys),
            first_visible_end=(request.ahead or 0) + 1 if ordered else None,
            random=request.dropout > 0,
        )
    )


def _closed_form(
    inputs: PolarInputs,
    view: Visibility,
    scalars: FilterScalars,
    settings: PolarSettings,
    ahead: int,
    dropout: float,
) -> PolarEstimate:
    """`kernel_estimate` with the masks as an additive bias, and fully masked rows at zero."""
    dtype, bias = inputs.query.dtype, None
    if view.padding is not None:
        bias = torch.zeros_like(view.padding, dtype=dtype)
        bias = bias.masked_fill(view.padding, MASKED)[:, None, None]
    if view.mask is not None:
        mask = view.mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, MASKED)
        else:
            mask = mask.to(dtype).clamp_min(MASKED)
        bias = mask if bias is None else bias + mask
    estimate = kernel_estimate(
        inputs,
        scalars,
        settings,
        causal=view.causal,
        ahead=ahead,
        bias=bias,
        dropout=dropout,
    )
    if bias is None:
        return estimate
    batch, keys = inputs.key.shape[0], inputs.key.shape[2]
    everything = torch.ones(batch, keys, dtype=torch.bool, device=inputs.key.device)
    visible = rows_that_see(everything, view)
    return PolarEstimate(
        estimate.direction.masked_fill(~visible[..., None], 0.0),
        torch.where(visible, estimate.magnitude, inputs.query_magnitude),
    )
