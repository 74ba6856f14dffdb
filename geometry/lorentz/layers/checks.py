"""Refusing options that make no sense, by name, when a layer is built."""

from __future__ import annotations

import math
import operator
from typing import SupportsIndex


def check_sizes(**sizes: object) -> None:
    """Raise ValueError unless every value is a whole number of at least 1, Python's or NumPy's."""
    for name, value in sizes.items():
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            whole = operator.index(value)
        else:
            whole = 0
        if whole < 1:
            raise ValueError(f"{name} must be a positive whole number, got {value!r}")


def check_number(
    name: str, value: float, *, low: float = -math.inf, high: float = math.inf
) -> float:
    """Return a finite number in [low, high] as a float, or raise ValueError."""
    number = float(value)
    if not (math.isfinite(number) and low <= number <= high):
        bounds = "" if low == -math.inf and high == math.inf else f" in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a finite number{bounds}, got {value!r}")
    return number
