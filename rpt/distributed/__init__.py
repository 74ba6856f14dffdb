"""Several ranks over `torch.distributed`: who owns what, and how gradients and updates travel.

Modes (`ResidualPolarTransport(..., ownership=...)`):

    "owner"       every matrix belongs to one rank, which keeps its state and computes its update
    "replicated"  every rank computes all; only observed ranks are averaged
    "local"       ranks know nothing of each other
    "auto"        "owner" where parameters are DTensors, or the same on all ranks; else "local"

Loaded only when a process group exists and several ranks take part.
"""

from rpt.store.cost import CostModel

from .plan import Item, Plan, make_plan
from .ranks import OwnerRanks, ReplicatedRanks
from .setup import distribute, report

__all__ = [
    "CostModel",
    "Item",
    "OwnerRanks",
    "Plan",
    "ReplicatedRanks",
    "distribute",
    "make_plan",
    "report",
]
