"""The metric behind one small seam: full, blocked, low-rank, automatic, or the user's own."""

from .base import Damping, Refresh, RootBackend
from .check import BackendError, check_backend
from .eigh import inverse_root
from .kronecker import (
    AutoRoots,
    BlockedRoots,
    FullRoots,
    KroneckerRoots,
    LowRankRoots,
    NoRoots,
    resolve_roots,
)

__all__ = [
    "AutoRoots",
    "BackendError",
    "BlockedRoots",
    "Damping",
    "FullRoots",
    "KroneckerRoots",
    "LowRankRoots",
    "NoRoots",
    "Refresh",
    "RootBackend",
    "check_backend",
    "inverse_root",
    "resolve_roots",
]
