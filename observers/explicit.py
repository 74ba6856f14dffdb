"""Observation by hand: for fused or functional matrices that no hook can see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from .rank import ranks, statistics
from .selection import Site
from .staging import ObservationStage

__all__ = ["ExplicitObserver"]


class ExplicitObserver:
    """Installs nothing; the caller hands over activations and cotangents."""

    def __init__(self, stage: ObservationStage | None = None) -> None:
        self._stage = stage
        self._parameters: list[Tensor] = []

    def attach(self, sites: Sequence[Site], stage: ObservationStage) -> None:
        self._parameters, self._stage = [site.parameter for site in sites], stage

    def detach(self) -> None:
        self._parameters = []

    def clear(self) -> None:
        if self._stage is not None:
            for parameter in self._parameters:
                self._stage.drop(parameter)

    def schedule(self, due: Callable[[Tensor], bool]) -> None:
        """Nothing to do: the caller decides when to measure."""

    def observe(
        self,
        activations: Tensor,
        cotangents: Tensor,
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Measure one relation, stage its rank, and return it.

        Args:
            activations: What the matrix read, (…, n).
            cotangents: The loss's gradient with respect to what it wrote, (…, m).
            parameters: Whom it concerns: one parameter, several, or None for every parameter
                without an observation of its own.

        Raises:
            ValueError: For shapes that do not match.
            RuntimeError: Before any stage is known.
        """
        if self._stage is None:
            raise RuntimeError("attach the observer, or construct it with a stage, first")
        settings = self._stage.settings
        rank = ranks([statistics(activations, cotangents, settings)], settings)[0]
        if parameters is None:
            self._stage.add_rank(rank)
        else:
            targets = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            for parameter in targets:
                self._stage.add_rank(rank, parameter)
        return rank
