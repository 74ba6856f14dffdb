"""Learning rates: one set of multiples around every optimizer's documented default."""

from __future__ import annotations

from .peers import PEERS

__all__ = ["MULTIPLES", "beyond", "grid", "rate_at"]

LADDER = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

MULTIPLES: dict[str, tuple[float, ...]] = {
    "quick": (1, 3),
    "dev": (0.3, 1, 3, 10),
    "large": (1, 3, 10),
    "other": (0.3, 1, 3, 10),
    "full": (0.1, 0.3, 1, 3, 10, 30),
}


def grid(optimizer: str, suite: str) -> list[float]:
    """As many rates for every optimizer, its default among them."""
    return [rate_at(optimizer, m) for m in MULTIPLES[suite]]


def beyond(optimizer: str, suite: str, best: float) -> list[float]:
    """The next rate outside the grid where the best of the grid is at its end, else nothing."""
    rates = grid(optimizer, suite)
    low, high = (LADDER.index(MULTIPLES[suite][end]) for end in (0, -1))
    if best == rates[-1]:
        return [rate_at(optimizer, LADDER[high + 1])]
    if best == rates[0]:
        return [rate_at(optimizer, LADDER[low - 1])]
    return []


def rate_at(optimizer: str, multiple: float) -> float:
    """A multiple of the documented default, to three digits."""
    return float(f"{PEERS[optimizer].rate * multiple:.3g}")
