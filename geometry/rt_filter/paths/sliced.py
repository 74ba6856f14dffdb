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

from ..visibility import Visibility

__all__ = ["map_query_slices", "visible_end"]

SLAB_ELEMENTS = 2**18


def visible_end(view: Visibility, ahead: int | None) -> int | None:
    """How many keys query 0 sees, where each next query sees one more; None: any number."""
    return ahead + 1 if ahead is not None and view.causal else None


def map_query_slices(
    function: Callable[[int, int, int], tuple[Tensor, ...]],
    rows: int,
    queries: int,
    keys: int,
    *,
    first_visible_end: int | None = None,
    random: bool = False,
) -> tuple[Tensor, ...]:
    """Apply `function(start, stop, keys)` to slices of queries and concatenate along dimension 2.

    Args:
        function: returns tensors whose dimension 2 is the query; must use its captured tensors only
            through differentiable operations.
        rows: batch · heads; slices are sized so that rows · slice · keys stays near SLAB_ELEMENTS.
        first_visible_end: with tokens in causal order, how many keys query 0 can see; later keys
            are then left out of a slice altogether.
        random: whether the function draws random numbers that backward must draw again.
    """
    length = max(8, SLAB_ELEMENTS // max(1, rows * keys))
    pieces: list[tuple[Tensor, ...]] = []
    for start in range(0, max(queries, 1), length):
        stop = min(start + length, queries)
        visible = keys if first_visible_end is None else min(keys, first_visible_end + stop - 1)
        if torch.is_grad_enabled():
            piece = checkpoint(
                function, start, stop, visible, use_reentrant=False, preserve_rng_state=random
            )
        else:
            piece = function(start, stop, visible)
        pieces.append(piece)
    return tuple(torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
