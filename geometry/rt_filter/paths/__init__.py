"""Which path computes an estimate: dense, sliced, closed form, or FlexAttention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..logits import PolarSettings
from ..parameters import FilterScalars
from ..visibility import Visibility
from .dense import PolarEstimate, PolarInputs, polar_estimate
from .slabs import slab_estimate, tables_at_times
from .sliced import map_query_slices

__all__ = ["PolarEstimate", "PolarInputs", "Request", "estimate"]


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
    tables = request.ahead is not None or (
        tables_at_times(settings)
        and not (view.query_times.requires_grad or view.key_times.requires_grad)
    )
    learned_mask = view.mask is not None and view.mask.requires_grad
    if tables and not (settings.exact or request.precision or learned_mask):
        return slab_estimate(inputs, view, scalars, settings, request.ahead, request.dropout)

    batch, heads, queries, _ = inputs.query.shape

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

    return PolarEstimate(
        *map_query_slices(
            piece,
            batch * heads,
            queries,
            inputs.key.shape[2],
            view,
            request.ahead,
            random=request.dropout > 0,
        )
    )
