"""From a model to entropy ranks: what to observe, how, and when."""

from .compiled import CompiledObserver
from .explicit import ExplicitObserver
from .hook import HookObserver, Observer
from .protocol import ObservableModel
from .rank import ObserverSettings, entropy_rank
from .recorder import Recorder
from .sites import DerivedSite, DerivedSites, derive_sites

__all__ = [
    "CompiledObserver",
    "DerivedSite",
    "DerivedSites",
    "ExplicitObserver",
    "HookObserver",
    "ObservableModel",
    "Observer",
    "ObserverSettings",
    "Recorder",
    "derive_sites",
    "entropy_rank",
]
