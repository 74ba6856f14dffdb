"""Warnings that point to the line of the user's that led to them."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

import rpt

__all__ = ["warn"]

_HERE = Path(__file__).parent
_INSIDE = tuple(
    f"{folder}{os.sep}"
    for folder in (
        _HERE,
        _HERE.with_name("geometry"),
        Path(rpt.__file__).parent,
        Path(torch.__file__).parent,
    )
) + (contextlib.__file__,)


def warn(message: str) -> None:
    """Warn as of the innermost line outside this package and torch."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
