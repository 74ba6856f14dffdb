"""Observation inside compiled graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .hook import HookObserver
from .selection import Site
from .staging import ObservationStage

__all__ = ["CompiledObserver"]


class CompiledObserver(HookObserver):
    """Taps each layer through one opaque operator, compiled or not.

    Attach before the first compiled call: graphs compiled earlier do not look for hooks again. No
    graph break, also with `fullgraph=True`; between measurements each tap costs two operator calls
    that return at once, and never a recompilation. Run eagerly it gives the hook strategy's ranks
    but keeps the layer's whole input until the backward, where `HookObserver` keeps a thin sketch.

    Attaching sets `torch._dynamo.config.skip_nnmodule_hook_guards` to False, the documented switch
    that makes graphs compiled from then on depend on a module's hooks. Without it two models of one
    class, only one of them observed, would run each other's graphs.

    Example:
        >>> import rpt, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> rpt.RPT(model.parameters()).attach_model(model, strategy="compiled")
        ['0', '1']
    """

    through_operator = True

    def attach(self, sites: Sequence[Site], stage: ObservationStage) -> None:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        super().attach(sites, stage)
