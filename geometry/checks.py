"""Arguments checked and named in one way: choices, numbers, counts, and names of one release ago."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["check_choice", "check_count", "check_number", "renamed"]

Function = TypeVar("Function", bound=Callable[..., Any])


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse an option that is none of its choices, with a ValueError that lists them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is not an integer of at least `least`, with a ValueError."""
    # Not isinstance(int): sizes may be NumPy integers, and symbolic ones under torch.compile.
    if isinstance(value, (bool, float)) or not hasattr(value, "__index__") or value < least:  # type: ignore[operator]
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_number(
    name: str,
    value: float,
    least: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a number that is not finite, under `least`, or not `above` and `below` the bounds
    given, with a ValueError.
    """
    wanted = [
        f"{words} {bound}"
        for words, bound in (("at least", least), ("above", above), ("below", below))
        if bound is not None
    ]
    if (
        isinstance(value, (bool, str))
        or not hasattr(value, "__float__")
        or not math.isfinite(value)
        or (least is not None and value < least)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    ):
        raise ValueError(
            f"{name} must be a number, {', '.join(['finite', *wanted])}, got {value!r}"
        )


def renamed(**names: str) -> Callable[[Function], Function]:
    """Accept keywords by their names of one release ago (`renamed(old="new")`), with a warning.

    Raises:
        TypeError: from the wrapped function's call, where both names are given.
    """

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in names.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"{old} is the old name of {new}: pass {new} alone")
                    warnings.warn(
                        f"{old} is now called {new}; the old name will go in the next release",
                        DeprecationWarning,
                        stacklevel=2,
                    )
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return wrap
