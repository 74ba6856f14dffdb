"""The memory-linear path for everything: slices of queries, recomputed in the backward pass.

Each slice sees all its keys at once, so its softmax needs no running rescaling, and nothing of size
queries × keys is stored. `slabs.py` is faster, for the common settings.
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
    query: Tensor,
    key: Tensor,
    view: Visibility,
    ahead: int | None,
) -> tuple[Tensor, ...]:
    """Apply `function(start, stop, keys)` to slices of queries and concatenate along dimension 2.

    Args:
        function: returns tensors whose dimension 2 is the query.
        query, key: (batch, heads, tokens, features), for their sizes: batch · heads · slice · keys
            stays near SLAB_ELEMENTS.
        view, ahead: what the queries see; keys out of sight of a whole slice are left out.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    length = max(8, SLAB_ELEMENTS // max(1, batch * heads * keys))
    sizes = (queries, keys, length)
    ends, _ = slice_ends(sizes, view.causal, ahead, view.query_times, view.key_times)
    pieces: list[tuple[Tensor, ...]] = []
    for start, visible in zip(range(0, queries, length), ends, strict=True):
        arguments = (start, min(start + length, queries), visible)
        if torch.is_grad_enabled():
            pieces.append(checkpoint(function, *arguments, use_reentrant=False))
        else:
            pieces.append(function(*arguments))
    return tuple(torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
