"""Observation inside compiled graphs."""

from __future__ import annotations

from .hook import HookObserver

__all__ = ["CompiledObserver"]


class CompiledObserver(HookObserver):
    """Taps each layer through one opaque operator, compiled or not.

    Attach before the first compiled call: `torch.compile` does not look for hooks again. No graph
    break, also with `fullgraph=True`; between measurements each tap costs one operator call that
    returns at once, and never a recompilation. Run eagerly it gives the hook strategy's ranks but
    keeps the layer's whole input until the backward, where `HookObserver` keeps a thin sketch.
    """

    through_operator = True
