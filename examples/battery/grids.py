"""Learning rates: one set of multiples around every optimizer's documented default."""

from __future__ import annotations

from .peers import PEERS

__all__ = ["MULTIPLES", "grid"]

MULTIPLES: dict[str, tuple[float, ...]] = {
    "quick": (1, 3),
    "dev": (0.3, 1, 3, 10),
    "full": (0.1, 0.3, 1, 3, 10, 30),
}


def grid(optimizer: str, suite: str) -> list[float]:
    """As many rates for every optimizer, its default among them."""
    return [float(f"{PEERS[optimizer].rate * m:.3g}") for m in MULTIPLES[suite]]
