"""The memory-linear path on any device: slices of queries, recomputed in the backward pass.

Each slice sees all its keys at once, so its softmax needs no running rescaling; a slice holds
(batch, heads, slice, keys) numbers, and slices are sized so that this stays near a fixed budget.
Nothing of size queries × keys is stored in forward or backward. `slabs.py` is faster, with gradients
in closed form, for the common settings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..visibility import Visibility, slice_ends

__all__ = ["map_query_slices"]

SLAB_ELEMENTS = 2**18


def map_query_slices(
    function: Callable[[int, int, int], tuple[Tensor, ...]],
    rows: int,
    queries: int,
    keys: int,
    view: Visibility,
    ahead: int | None,
    *,
    random: bool = False,
) -> tuple[Tensor, ...]:
    """Apply `function(start, stop, keys)` to slices of queries and concatenate along dimension 2.

    Args:
        function: returns tensors whose dimension 2 is the query; must use its captured tensors only
            through differentiable operations.
        rows: batch · heads; slices are sized so that rows · slice · keys stays near SLAB_ELEMENTS.
        view, ahead: what the queries see; keys out of sight of a whole slice are left out.
        random: whether the function draws random numbers that backward must draw again.
    """
    length = max(8, SLAB_ELEMENTS // max(1, rows * keys))
    pieces: list[tuple[Tensor, ...]] = []
    sizes = (queries, keys, length)
    ends, _ = slice_ends(sizes, view.causal, ahead, view.query_times, view.key_times)
    for start, visible in zip(range(0, queries, length), ends, strict=True):
        stop = min(start + length, queries)
        if torch.is_grad_enabled():
            piece = checkpoint(
                function, start, stop, visible, use_reentrant=False, preserve_rng_state=random
            )
        else:
            piece = function(start, stop, visible)
        pieces.append(piece)
    return tuple(torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
