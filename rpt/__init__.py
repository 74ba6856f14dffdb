"""Residual Polar Transport: a matrix optimizer for PyTorch that takes AdamW's learning rate."""

import importlib as _importlib
import importlib.util as _util
import os as _os
import sys as _sys

_here = _os.path.dirname(_os.path.abspath(__file__))


class _Siblings:
    """Finds `rpt.observers` and `rpt.geometry` beside this folder, in a checkout that is not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        package, _, folder = name.partition(".")
        if package != __name__ or folder not in ("observers", "geometry"):
            return None
        place = _os.path.join(_os.path.dirname(_here), folder)
        start = _os.path.join(place, "__init__.py")
        if not _os.path.isfile(start):
            return None
        return _util.spec_from_file_location(name, start, submodule_search_locations=[place])


if not _os.path.isdir(_os.path.join(_here, "geometry")):
    _sys.meta_path.append(_Siblings)  # type: ignore[arg-type]

from .optimizer import ResidualPolarTransport  # noqa: E402

RPT = ResidualPolarTransport

__version__ = "0.1.0"
__all__ = ["RPT", "ResidualPolarTransport"]

# Imported when they are asked for: `import rpt` is an optimizer's import.
_PARTS = ("distributed", "geometry", "observers", "roots")


def __getattr__(name: str) -> object:
    if name in _PARTS:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PARTS, "__doc__", "__version__"])
