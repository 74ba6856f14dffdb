"""The model protocol: a model names the matrices that first read each nonlinear representation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torch import nn

__all__ = ["ObservableModel", "declared_sites"]


@runtime_checkable
class ObservableModel(Protocol):
    """A module that declares its observation boundaries.

    Duck-typed: a model needs the method, not an import of this package.

    Example:
        >>> from torch import nn
        >>> from rpt.observers import ObservableModel
        >>> class Block(nn.Sequential):
        ...     def optimizer_observation_modules(self):
        ...         return [self[2]]
        >>> isinstance(Block(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), ObservableModel)
        True
    """

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """Return the modules whose weight matrix first reads a new nonlinear representation."""
        ...


def declared_sites(model: nn.Module) -> list[nn.Module] | None:
    """Collect what `model` and every module inside it declare.

    Returns:
        The union in module order without repeats, or None where nothing in the model declares.
        An empty list means: the model declares that it has no site.
    """
    found: dict[int, nn.Module] = {}
    declared = False
    for module in model.modules():
        method = getattr(module, "optimizer_observation_modules", None)
        if callable(method):
            declared = True
            found.update((id(site), site) for site in method())
    return list(found.values()) if declared else None
