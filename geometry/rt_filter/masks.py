"""Who may see whom: causality in time, padding, boolean and additive masks, and damaged keys.

No (queries × keys) tensor is made here except a slice of one; a mask that the caller passes is the
caller's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Visibility", "check_attention_mask", "check_padding_mask", "rows_that_see"]


class Visibility(NamedTuple):
    """What decides whether query i may see key j.

    query_times, key_times: (1 or batch, tokens), relative to one origin; a key is visible where it
        is not later than the query (equal times see one another).
    index_ordered: whether times are 0, 1, 2, … for both, so that order of time is order of index.
    padding: (batch, keys), True where the key is padding; or None.
    mask: boolean (True: may attend) or additive floating, (1 or batch, 1 or heads, queries, keys),
        as in `F.scaled_dot_product_attention`; or None.
    """

    query_times: Tensor
    key_times: Tensor
    causal: bool
    index_ordered: bool
    padding: Tensor | None = None
    mask: Tensor | None = None

    def lag(self, start: int = 0, stop: int | None = None, keys: int | None = None) -> Tensor:
        """t_i − t_j for queries start…stop and the first `keys` keys, (1 or batch, 1, q, k)."""
        queries = self.query_times[:, start:stop]
        return (queries.unsqueeze(-1) - self.key_times[:, :keys].unsqueeze(-2)).unsqueeze(1)

    def allowed(
        self, lag: Tensor, start: int = 0, stop: int | None = None, keys: int | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Boolean visibility (broadcastable to (batch, heads, q, k)) and additive part; None:
        all, 0.
        """
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


def check_padding_mask(mask: Tensor, batch: int, tokens: int) -> Tensor:
    """A boolean (batch, tokens) mask, True where padded. Raises TypeError or ValueError
    otherwise.
    """
    if mask.dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask must be boolean (True where a token is padding), got {mask.dtype}"
        )
    if mask.shape != (batch, tokens):
        raise ValueError(
            f"key_padding_mask must have shape ({batch}, {tokens}), got {tuple(mask.shape)}"
        )
    return mask


def check_attention_mask(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Bring (q, k), (batch, q, k) or (1 or batch, 1 or heads, q, k) to four dimensions."""
    full = mask
    if full.dim() == 2:
        full = full[None, None]
    elif full.dim() == 3:
        full = full.unsqueeze(1)
    fits = full.dim() == 4 and full.shape[2:] == (queries, keys)
    if not fits or full.shape[0] not in (1, batch) or full.shape[1] not in (1, heads):
        raise ValueError(
            f"attn_mask must have shape ({queries}, {keys}), ({batch}, {queries}, {keys}) or"
            f" (1 or {batch}, 1 or {heads}, {queries}, {keys}), got {tuple(mask.shape)}"
        )
    if full.dtype != torch.bool and not full.is_floating_point():
        raise TypeError(
            "attn_mask must be boolean (True: may attend) or floating (added to the logits),"
            f" got {mask.dtype}"
        )
    return full


def rows_that_see(keys: Tensor, view: Visibility) -> Tensor:
    """Queries that see at least one of the marked keys: boolean (batch, 1 or heads, queries).

    Two uses. Keys that are not finite enter the sums as zeros, so that they cannot reach queries
    that do not see them; the queries that do are set to NaN by this mask, as plain arithmetic would
    have done. And with every key marked: the rows that are not fully masked.

    Args:
        keys: boolean (batch, keys).
    """
    marked = keys if view.padding is None else keys & ~view.padding
    if view.mask is not None:
        allowed = view.mask if view.mask.dtype == torch.bool else view.mask > float("-inf")
        if view.causal:
            allowed = allowed & (view.lag() >= 0)
        return (allowed & marked[:, None, None, :]).any(-1)
    if not view.causal:
        return marked.any(-1)[:, None, None].expand(-1, 1, view.query_times.shape[1])
    times = view.key_times.expand_as(marked)
    earliest = times.masked_fill(~marked, float("inf")).amin(-1, keepdim=True)
    return (view.query_times >= earliest).unsqueeze(1)
