"""Who may see whom: causality in time, padding, boolean and additive masks, and damaged tokens.

No (queries × keys) tensor is made here except a slice of one; a mask that the caller passes is the
caller's own. The convention of masks is that of `geometry.masks`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..softmax import damaged

__all__ = ["Visibility", "quarantine", "rows_that_see", "slice_ends"]


class Visibility(NamedTuple):
    """What decides whether query i may see key j.

    query_times, key_times: (1 or batch, tokens), relative to one origin; a key is visible where it
        is not later than the query (equal times see one another).
    padding: (batch, keys), True where the key is padding; or None.
    mask: boolean (True: may attend) or additive floating, (1 or batch, 1 or heads, queries, keys),
        as in `F.scaled_dot_product_attention`; or None.
    """

    query_times: Tensor
    key_times: Tensor
    causal: bool
    padding: Tensor | None = None
    mask: Tensor | None = None

    def lag(self, start: int = 0, stop: int | None = None, keys: int | None = None) -> Tensor:
        """t_i − t_j for queries start…stop and the first `keys` keys, (1 or batch, 1, q, k)."""
        queries = self.query_times[:, start:stop]
        return (queries.unsqueeze(-1) - self.key_times[:, :keys].unsqueeze(-2)).unsqueeze(1)

    def allowed(
        self, lag: Tensor, start: int = 0, stop: int | None = None, keys: int | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Boolean visibility, broadcastable to (batch, heads, q, k), and additive part; or None."""
        allowed = lag >= 0 if self.causal else None
        if self.padding is not None:
            allowed = _both(allowed, ~self.padding[:, None, None, :keys])
        additive = None
        if self.mask is not None:
            part = self.mask[:, :, start:stop, :keys]
            if part.dtype == torch.bool:
                allowed = _both(allowed, part)
            else:
                additive = part
        return allowed, additive


def _both(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first & second


def rows_that_see(keys: Tensor, view: Visibility) -> Tensor:
    """Queries that see one of the marked keys (batch, keys): boolean (batch, 1 or heads, queries)."""
    marked = keys if view.padding is None else keys & ~view.padding
    if view.mask is not None:
        allowed = view.mask if view.mask.dtype == torch.bool else view.mask > float("-inf")
        if view.causal:
            allowed = allowed & (view.lag() >= 0)
        return (allowed & marked[:, None, None, :]).any(-1)
    queries = view.query_times.shape[1]
    if not view.causal or not keys.shape[1]:
        return marked.any(-1)[:, None, None].expand(-1, 1, queries)
    times = view.key_times.expand_as(marked)
    earliest = times.masked_fill(~marked, float("inf")).amin(-1, keepdim=True)
    return (view.query_times >= earliest).unsqueeze(1)


def slice_ends(
    sizes: tuple[int, int, int],
    causal: bool,
    ahead: int | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
) -> tuple[list[int], list[int]]:
    """For each slice of queries: beyond how many keys none is in sight, and up to how many all are.

    Args:
        sizes: queries, keys, and queries in a slice.
        ahead: keys before query 0 on the default grid, or None at given times.
    """
    queries, keys, length = sizes
    stops = [min(start + length, queries) for start in range(0, queries, length)]
    if not causal or (ahead is None and torch.compiler.is_compiling()):
        return [keys] * len(stops), [keys if not causal else 0] * len(stops)
    if ahead is not None:
        starts = range(0, queries, length)
        return (
            [min(keys, ahead + stop) for stop in stops],
            [min(keys, ahead + start + 1) for start in starts],
        )
    assert query_times is not None
    assert key_times is not None
    slices = query_times.split(length, 1)
    least = key_times.flip(1).cummin(1).values.flip(1)
    most = key_times.cummax(1).values
    # One host synchronisation for all slices, which spares about half of the work.
    ends = torch.stack([(least <= t.amax(1, keepdim=True)).any(0).sum() for t in slices])
    whole = torch.stack([(most <= t.amin(1, keepdim=True)).all(0).sum() for t in slices])
    return ends.tolist(), whole.tolist()


def quarantine(view: Visibility, *tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Replace keys that are not finite by zeros; say which queries see one, (batch, 1 or heads, q).

    So they cannot reach queries that do not see them, in value or gradient; the caller sets the
    others to NaN. Tensors are features (batch, heads, keys, 2d) or magnitudes (batch, heads, keys).
    """
    marks = [damaged(t if t.dim() == 4 else t.unsqueeze(-1)) for t in tensors]
    bad = torch.stack(marks).any(0).any(1)
    clean = [
        t.masked_fill(bad[:, None, :, None] if t.dim() == 4 else bad[:, None], 0.0) for t in tensors
    ]
    return clean, rows_that_see(bad, view)
