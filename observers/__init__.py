"""From a model to entropy ranks: what to observe, how, and when."""

from .compiled import CompiledObserver
from .explicit import ExplicitObserver
from .hook import HookObserver, Observer
from .protocol import ObservableModel
from .rank import ObserverSettings, entropy_rank

__all__ = [
    "CompiledObserver",
    "ExplicitObserver",
    "HookObserver",
    "ObservableModel",
    "Observer",
    "ObserverSettings",
    "entropy_rank",
]
