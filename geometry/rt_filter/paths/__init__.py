"""Which path computes an estimate: dense, sliced, or closed form."""

from __future__ import annotations

from torch import Tensor

from ..logits import PolarSettings
from ..parameters import FilterScalars
from ..visibility import Visibility
from .dense import PolarEstimate, PolarInputs, polar_estimate
from .slabs import slab_estimate
from .sliced import map_query_slices

__all__ = ["PolarEstimate", "PolarInputs", "estimate"]


def estimate(
    inputs: PolarInputs,
    view: Visibility,
    scalars: FilterScalars,
    settings: PolarSettings,
    *,
    dense: bool,
    ahead: int | None,
    dropout: float,
    precision: bool,
    weights: bool,
) -> PolarEstimate:
    """`polar_estimate`, by the path that the arguments call for.

    Args:
        dense: the reference path.
        ahead: keys before query 0 where tokens stand on the grid 0, 1, 2, …; None at other times.
    """
    if dense:
        return polar_estimate(
            inputs, view, scalars, settings, dropout=dropout, precision=precision, weights=weights
        )
    learned_times = view.query_times.requires_grad or view.key_times.requires_grad
    learned_mask = view.mask is not None and view.mask.requires_grad
    noise = settings.decay and settings.process
    if not (noise or settings.exact or precision or learned_times or learned_mask):
        return slab_estimate(inputs, view, scalars, settings, ahead, dropout)

    def piece(start: int, stop: int, keys: int) -> tuple[Tensor, ...]:
        part = polar_estimate(
            inputs,
            view,
            scalars,
            settings,
            start=start,
            stop=stop,
            keys=keys,
            dropout=dropout,
            precision=precision,
        )
        return tuple(t for t in part if t is not None)

    return PolarEstimate(*map_query_slices(piece, inputs.query, inputs.key, view, ahead))
