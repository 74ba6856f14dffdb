"""Residual Polar Transport: a matrix optimizer for PyTorch that takes AdamW's learning rate."""

import os as _os

# A source checkout used without installing it keeps `observers/` and `geometry/` beside this folder.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if not _os.path.isdir(_os.path.join(_os.path.dirname(_os.path.abspath(__file__)), "geometry")) and (
    _os.path.isfile(_os.path.join(_root, "geometry", "__init__.py"))
):
    __path__.append(_root)

__version__ = "0.1.0"
