"""Observation by hand: for fused or functional matrices that no hook can see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from .rank import ranks, statistics
from .selection import Site
from .staging import ObservationStage

__all__ = ["ExplicitObserver"]


class ExplicitObserver:
    """Installs nothing; the caller hands over activations and cotangents.

    Example:
        >>> import torch
        >>> from rpt.observers import ExplicitObserver
        >>> from rpt.observers.staging import ObservationStage
        >>> observer = ExplicitObserver(ObservationStage())
        >>> observer.observe(torch.randn(64, 8), torch.randn(64, 4)).shape
        torch.Size([])
    """

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
            ValueError: For rows that do not match, or widths that do not fit a named matrix.
            RuntimeError: Before any stage is known.
        """
        if self._stage is None:
            raise RuntimeError("attach the observer, or construct it with a stage, first")
        targets: list[Tensor | None] = [None]
        if parameters is not None:
            targets = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        settings = self._stage.settings
        measured = statistics(activations, cotangents, settings)
        for parameter in targets:
            if parameter is not None:
                _check_widths(activations.shape[-1], cotangents.shape[-1], parameter)
        rank = ranks([measured], settings)[0]
        for parameter in targets:
            self._stage.add_rank(rank, parameter)
        return rank


def _check_widths(read: int, written: int, parameter: Tensor) -> None:
    """Refuse an observation that cannot be the parameter's; vectors have none to be judged by."""
    if parameter.ndim < 2:
        return
    rows = parameter.shape[0]
    # The matrix view, or each matrix of a stack; layers of weight (in, out) exist, too.
    fitting = [{rows, parameter.numel() // max(rows, 1)}]
    if parameter.ndim == 3:
        fitting.append(set(parameter.shape[1:]))
    if {read, written} not in fitting:
        raise ValueError(
            f"activations of width {read} and residuals of width {written} are not what a weight "
            f"{tuple(parameter.shape)} reads and writes: pass its own input and its output's "
            "cotangent, or parameters=None for all that have no observation"
        )
