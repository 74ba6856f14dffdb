"""Residual Polar Transport: a matrix optimizer for PyTorch that takes AdamW's learning rate."""

import os as _os

# A source checkout used without installation keeps `observers/` and `geometry/` beside this folder.
_here = _os.path.dirname(_os.path.abspath(__file__))
_checkout = _os.path.dirname(_here)
if not _os.path.isdir(_os.path.join(_here, "geometry")) and _os.path.isfile(
    _os.path.join(_checkout, "geometry", "__init__.py")
):
    __path__.append(_checkout)

from .optimizer import ResidualPolarTransport  # noqa: E402

__version__ = "0.1.0"
__all__ = ["ResidualPolarTransport"]
