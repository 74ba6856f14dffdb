"""Keys and values of earlier tokens, for decoding step by step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...masks import additive_mask
from ..ops.point import Point
from .scores import ScoreCoordinates


class CachedTokens(NamedTuple):
    """Encoded tokens of one attention layer, M of them."""

    key: ScoreCoordinates  # (batch, H, M), …
    value: Point  # (batch, H, M), …
    padding: Tensor | None  # (batch, M) as `key_padding_mask`
    damaged: Tensor | None  # (batch, M): was not finite and is held as the origin


class PolarCache:
    """Encoded keys and values of the tokens seen so far, for decoding step by step.

    Every call of an attention layer with `cache=` adds its new tokens at its end; a call that
    raises (as a ValueError for another batch) leaves the cache as it was. One cache per layer.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> layer, cache = lorentz.PolarMultiheadAttention(8, 2, is_causal=True), lorentz.PolarCache()
        >>> out = layer(lorentz.exp_map_origin(torch.randn(1, 3, 8)), cache=cache)
        >>> cache.length
        3
    """

    def __init__(self) -> None:
        self.held: CachedTokens | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self.held is None else self.held.value.a.shape[-1]

    def joined(self, new: CachedTokens) -> CachedTokens:
        """The tokens held and new ones; changes nothing. A padding mask may cover all tokens."""
        old = self.held
        if old is None:
            return new
        batch, expected = new.value.a.shape[0], old.value.a.shape[0]
        if batch != expected:
            raise ValueError(f"the cache holds a batch of {expected}, got {batch}")
        counts = self.length, new.value.a.shape[-1]
        whole = new.padding is not None and new.padding.shape[-1] == sum(counts)
        return CachedTokens(
            ScoreCoordinates(
                torch.cat([old.key.level, new.key.level], -1),
                torch.cat([old.key.scale, new.key.scale], -1),
                torch.cat([old.key.vector, new.key.vector], -2),
            ),
            Point(
                torch.cat([old.value.a, new.value.a], -1), torch.cat([old.value.u, new.value.u], -2)
            ),
            new.padding if whole else _join(old.padding, new.padding, batch, counts),
            _join(old.damaged, new.damaged, batch, counts),
        )

    def reorder(self, index: Tensor) -> None:
        """Select sequences, (batch,) long, in place: for beam search."""
        if self.held is None:
            return

        def pick(x: Tensor) -> Tensor:
            return x.index_select(0, index)

        key, value, padding, damaged = self.held
        self.held = CachedTokens(
            ScoreCoordinates(*map(pick, key)),
            Point(*map(pick, value)),
            None if padding is None else pick(padding),
            None if damaged is None else pick(damaged),
        )


def _join(
    old: Tensor | None, new: Tensor | None, batch: int, counts: tuple[int, int]
) -> Tensor | None:
    """Two masks side by side, None standing for no token marked; boolean if both are."""
    known = new if old is None else old
    if known is None:
        return None
    nothing = torch.zeros(1, 1, dtype=torch.bool, device=known.device)
    old = nothing.expand(batch, counts[0]) if old is None else old
    new = nothing.expand(batch, counts[1]) if new is None else new
    if old.dtype != new.dtype:
        # A boolean padding mask marks what to leave out: −inf among masks that are added.
        dtype = old.dtype if old.is_floating_point() else new.dtype
        old, new = (
            additive_mask(~mask if mask.dtype == torch.bool else mask, dtype) for mask in (old, new)
        )
    return torch.cat([old, new], -1)
