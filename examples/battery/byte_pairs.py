"""Byte-pair encoding of a one-dimensional array of codes, vectorised over the text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["apply_merges", "learn_merges"]

Codes = NDArray[np.int64]


def learn_merges(codes: Codes, base: int, merges: int) -> list[tuple[int, int]]:
    """The `merges` most frequent adjacent pairs, one after the other; pair k becomes base + k."""
    learned: list[tuple[int, int]] = []
    for k in range(merges):
        size = base + k
        counts = np.bincount(codes[:-1] * size + codes[1:], minlength=1)
        pair = divmod(int(counts.argmax()), size)
        learned.append(pair)
        codes = _merge(codes, pair, size)
    return learned


def apply_merges(codes: Codes, base: int, merges: list[tuple[int, int]]) -> Codes:
    """Encode with merges learned elsewhere."""
    for k, pair in enumerate(merges):
        codes = _merge(codes, pair, base + k)
    return codes


def _merge(codes: Codes, pair: tuple[int, int], new: int) -> Codes:
    starts = np.flatnonzero((codes[:-1] == pair[0]) & (codes[1:] == pair[1]))
    if pair[0] == pair[1] and len(starts):
        # In a run of overlapping matches only every second one is a pair of its own.
        fresh = np.flatnonzero(np.diff(starts, prepend=-2) != 1)
        place = np.arange(len(starts)) - np.repeat(fresh, np.diff(fresh, append=len(starts)))
        starts = starts[place % 2 == 0]
    merged = codes.copy()
    merged[starts] = new
    return np.delete(merged, starts + 1)
