"""The seam between the optimizer and a metric: what a root backend does for a batch of matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

State = dict[str, Tensor]


class Damping(NamedTuple):
    """How small an eigenvalue may count.

    Attributes:
        ridge: floor relative to the mean eigenvalue (`matrix_ridge`).
        absolute: absolute floor in the units of the covariance (ε²), (b,).
        shapes: true (rows, cols) of matrices padded with zeros to the stack's shape, (b, 2); None for
            no padding. Only a backend whose `pads` says yes ever sees it.
        products: whether only matrix products may be used: decompositions wait for the host.

    Example:
        >>> import torch, rpt
        >>> damping = rpt.roots.Damping(ridge=1e-4, absolute=torch.zeros(2))  # for two matrices
        >>> damping.shapes is None, damping.products
        (True, False)
    """

    ridge: float
    absolute: Tensor
    shapes: Tensor | None = None
    products: bool = False


class Refresh(NamedTuple):
    """What a refresh did, for telemetry.

    Attributes:
        condition: largest over smallest floored eigenvalue, the geometric mean of the two sides, (b,).
        failed: True where the previous root was kept because none could be computed, (b,).

    Example:
        >>> import torch, rpt
        >>> done = rpt.roots.Refresh(condition=torch.ones(2), failed=torch.tensor([False, True]))
        >>> done.failed.sum().item()
        1
    """

    condition: Tensor
    failed: Tensor


class RootBackend(ABC):
    """A metric over a batch of `b` same-shaped matrices (b, rows, cols), rows <= cols.

    The optimizer presents every matrix wide: a tall weight is transposed first. State is a flat dict
    of tensors whose first dimension is the batch: it is saved and loaded with `weights_only=True`, and
    one matrix's slice of it is that parameter's state. A backend instance holds settings only, never
    state, so one instance serves any number of parameters.

    Subclass it, give an instance to `ResidualPolarTransport(..., roots=instance)`, and let
    `rpt.roots.check_backend(instance)` say what is wrong with it. `create`, `accumulate`, `refresh` and
    `apply` are enough; the rest is offered, and each may be overridden alone.

    Attributes:
        any_strides: whether `accumulate` and `apply` take a gradient of any strides. Where not, a matrix
            that is kept tall is copied first, so that `view` works on it as on any fresh tensor.
        capturable: whether `refresh` follows `Damping.products`, and nothing here ever reads a value on
            the host.

    Example:
        >>> import rpt
        >>> class ByAge(rpt.roots.FullRoots):
        ...     def drift(self, state, shape, correction):
        ...         return correction * 0  # "none": refreshed by age alone
        >>> isinstance(ByAge(), rpt.roots.RootBackend), rpt.roots.check_backend(ByAge())
        (True, None)
    """

    any_strides: bool = False
    capturable: bool = False

    @abstractmethod
    def create(
        self, batch: int, rows: int, cols: int, *, dtype: torch.dtype, device: torch.device
    ) -> State:
        """Fresh state: zero statistics, and roots under which `apply` returns the gradient itself."""

    @abstractmethod
    def accumulate(
        self, state: State, gradient: Tensor, beta2: float, shapes: Tensor | None = None
    ) -> None:
        """Add one gradient (b, rows, cols) to the running statistics, in place.

        `shapes` is given where zeros pad the matrices: the true (rows, cols) of each, (b, 2). A backend
        that never pads may leave the argument out.
        """

    @abstractmethod
    def refresh(
        self, state: State, shape: tuple[int, int], correction: Tensor, damping: Damping
    ) -> Refresh:
        """Recompute the roots from statistics divided by `correction` (1-β2^t, (b,)), in place.

        `shape` is (rows, cols) of the batch's matrices, always wide: rows <= cols.
        A matrix whose root cannot be computed keeps the one it has and is reported as failed.
        """

    @abstractmethod
    def apply(self, state: State, gradient: Tensor) -> Tensor:
        """The live request P for a gradient, (b, rows, cols) -> (b, rows, cols)."""

    def drift(self, state: State, shape: tuple[int, int], correction: Tensor) -> Tensor:
        """Relative change of the statistics since the last refresh, (b,), without host sync.

        The default says "none": roots are then refreshed by age alone.
        """
        return torch.zeros_like(correction)

    def pads(self, rows: int, cols: int) -> bool:
        """Whether smaller matrices may share a (rows, cols) stack, padded with zeros.

        A backend that says yes gets the true shapes, (b, 2), as `Damping.shapes` at a refresh and as the
        argument `shapes` of `accumulate`, and implements `crop`. Gradients are zero in the padding, and
        requests must be.
        """
        return False

    def crop(self, key: str, value: Tensor, rows: int, cols: int) -> Tensor:
        """The part of one matrix's state entry that an unpadded (rows, cols) matrix would have, a view."""
        return value

    def without_drift(self) -> RootBackend:
        """The same backend for an optimizer that refreshes by age alone and asks for no drift."""
        return self

    def state_bytes(self, rows: int, cols: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of state for one (rows, cols) matrix, computed without allocating it."""
        rows, cols = min(rows, cols), max(rows, cols)
        state = self.create(1, rows, cols, dtype=dtype, device=torch.device("meta"))
        return sum(value.numel() * value.element_size() for value in state.values())

    def describe(self) -> str:
        """The backend as text, stored in checkpoints; built-in ones are rebuilt from it."""
        return f"{type(self).__module__}.{type(self).__qualname__}"
