"""Cache for decoding: rotated keys and values, magnitudes, absolute times.

One `FilterCache` serves all layers of a model. During a forward pass every layer stages its new
tokens; the length moves once, when the forward commits. An exception before that leaves the cache
as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_count

__all__ = ["FilterCache"]


class FilterCache:
    """Keys seen so far, for one or several attention layers.

    Attributes:
        length: committed tokens.
        times: absolute times of the committed tokens, float64, (1 or batch, length), or None.
        padding: (batch, length) boolean, True where a token is padding, or None.
        regular: whether tokens came without times, and stand at 0, 1, 2, ….

    Raises:
        ValueError: fewer than one layer.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import FilterCache, PolarAttention
        >>> cache, layer = FilterCache(), PolarAttention(16, 2)
        >>> _ = layer(torch.randn(3, 5, 16), cache=cache)
        >>> layer(torch.randn(3, 1, 16), cache=cache).shape, cache.length
        (torch.Size([3, 1, 16]), 6)
    """

    def __init__(self, num_layers: int = 1) -> None:
        check_count("num_layers", num_layers)
        self.length = 0
        self.times: Tensor | None = None
        self.padding: Tensor | None = None
        self._layers: list[tuple[Tensor, ...] | None] = [None] * num_layers
        self._staged: dict[int, tuple[Tensor, ...]] = {}
        self._next: tuple[Tensor, Tensor | None, bool] | None = None
        self.regular = True

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: what is committed, as constants without a gradient."""
        layers = [t and tuple(part.detach() for part in t) for t in self._layers]
        return {**self.__dict__, "_layers": layers, "_staged": {}, "_next": None}

    def open(self, batch: int, num_layers: int | None = None) -> None:
        """Forget what an earlier call left behind, and check that this one fits.

        Raises:
            ValueError: the cache holds another batch, or serves another number of layers.
        """
        self.discard()
        if num_layers is not None and num_layers != self.num_layers:
            raise ValueError(
                f"the cache has {self.num_layers} layers, the model {num_layers}; use new_cache()"
            )
        held = next((t[0].shape[0] for t in self._layers if t is not None), batch)
        if held != batch:
            raise ValueError(f"the cache holds a batch of {held}, got {batch}")

    def extend_times(self, times: Tensor) -> Tensor:
        """Committed times followed by new ones, (1 or batch, length + tokens)."""
        if self.times is None:
            return times
        rows = max(self.times.shape[0], times.shape[0])
        return torch.cat((self.times.expand(rows, -1), times.expand(rows, -1)), dim=1)

    def extend_padding(self, padding: Tensor | None, batch: int, tokens: int) -> Tensor | None:
        """Padding of committed and new tokens, (batch, length + tokens), or None; the one given is
        that of the new tokens, or already of all."""
        if padding is None and self.padding is None:
            return None
        if padding is not None and padding.shape[1] != tokens:
            return padding
        known = padding if padding is not None else self.padding
        assert known is not None
        old = known.new_zeros(batch, self.length) if self.padding is None else self.padding
        new = padding if padding is not None else known.new_zeros(batch, tokens)
        return torch.cat((old, new), dim=1)

    def committed(self, layer: int) -> tuple[Tensor, ...] | None:
        """The committed tensors of a layer, or None while it is empty."""
        return self._layers[layer]

    def stage(
        self,
        layer: int,
        tensors: tuple[Tensor, ...],
        tokens: tuple[Tensor, Tensor | None, bool],
    ) -> tuple[Tensor, ...]:
        """Committed tensors of a layer joined with new ones along dimension 2, not yet committed.

        Args:
            tokens: times and padding of committed and new tokens, and whether times are the grid.
        """
        old = self._layers[layer]
        if old is not None:
            tensors = tuple(torch.cat(pair, dim=2) for pair in zip(old, tensors, strict=True))
        self._staged[layer], self._next = tensors, tokens
        return tensors

    def commit(self) -> None:
        """Make the staged tokens of all layers part of the cache: once per forward pass.

        Raises:
            RuntimeError: nothing, or not every layer, was staged.
        """
        if self._next is None or len(self._staged) != len(self._layers):
            raise RuntimeError(
                f"commit() needs one forward pass through all {len(self._layers)} layers;"
                f" {len(self._staged)} staged tokens"
            )
        self.times, self.padding, self.regular = self._next
        self.length = self.times.shape[1]
        for layer, tensors in self._staged.items():
            self._layers[layer] = tensors
        self.discard()

    def discard(self) -> None:
        """Forget what was staged and not committed."""
        self._staged, self._next = {}, None

    def reorder(self, index: Tensor) -> None:
        """Select sequences, (batch,) long: for beam search."""
        self.discard()
        for layer, tensors in enumerate(self._layers):
            if tensors is not None:
                self._layers[layer] = tuple(t.index_select(0, index) for t in tensors)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, index)
        if self.times is not None and self.times.shape[0] > 1:
            self.times = self.times.index_select(0, index)
