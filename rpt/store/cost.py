"""What a step of one parameter costs: for choosing who shares a stack, and for sharing work over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..roots import RootBackend


@dataclass(frozen=True)
class CostModel:
    """What a step of one parameter costs, in units of one multiply-add of a matrix product.

    The defaults were measured in float32 on one CPU core (`examples/bench/distributed.py --costs`).
    They are constants rather than measured at start-up so that the same script gives the same plan,
    and with it the same rounding, on every run.

    Attributes:
        eigh, eigh_entry: one eigendecomposition of an n×n block costs `eigh` · n³ + `eigh_entry` · n².
        element: everything elementwise in the rule, per entry.
        call: fixed cost of a matrix; a vector, many of which share one call, costs a thirtieth.
        staleness: steps between two refreshes of a root.

    Example:
        >>> from rpt.distributed import CostModel
        >>> CostModel().matrix(256, 1024) > CostModel().vector(256 * 1024)
        True
    """

    eigh: float = 11.0
    eigh_entry: float = 0.0
    element: float = 700.0
    call: float = 5e5
    staleness: float = 10.0

    def matrix(
        self, rows: int, cols: int, backend: RootBackend | None = None, polar_steps: int = 5
    ) -> float:
        """Cost of one step of a (rows, cols) matrix.

        Args:
            backend: its metric; None for none.
            polar_steps: Newton–Schulz steps; 0 for a matrix that has no polar share.
        """
        rows, cols = min(rows, cols), max(rows, cols)
        cost = self.call + self.element * rows * cols + _polar(rows, cols, polar_steps)
        if backend is None:
            return cost
        # Read off the state's shapes, so that a user's own backend is counted too.
        device = torch.device("meta")
        for key, value in backend.create(1, rows, cols, dtype=torch.float32, device=device).items():
            other = cols if key.startswith("left") else rows
            if value.ndim >= 3 and value.shape[-1] == value.shape[-2] and key.endswith("_root"):
                size = value.shape[-1]
                cost += value.numel() // size**2 * self.factor(size, other)
            elif key.endswith("_basis"):
                cost += 4.0 * value.numel() * other
        return cost

    def factor(self, size: int, other: int) -> float:
        """A factor's products with a gradient, and its share of a decomposition."""
        root = self.eigh * size**3 + self.eigh_entry * size**2
        return 2.0 * size * size * other + root / self.staleness

    def vector(self, length: int) -> float:
        """Cost of one step of a vector."""
        return self.call / 30 + self.element * length


def _polar(rows: int, cols: int, steps: int) -> float:
    """Products of the polar factor of a matrix, rows <= cols."""
    if not steps:
        return 0.0
    if cols >= 2 * rows:  # on the Gram side: the long matrix is touched twice
        return 2.0 * rows * rows * cols + (4.0 * steps - 3.0) * rows**3
    return steps * (2.0 * rows * rows * cols + rows**3)


# Stacks of small matrices with this package's default options: an eigendecomposition was measured at
# 9 n³ + 1080 n² operations, once in some 30 steps, and there are some 25 passes over memory.
_SMALL = CostModel(eigh=4.5, eigh_entry=540.0, element=150.0, call=0.0, staleness=30.0)
# What a stack costs whatever it holds: one to one and a half milliseconds, in operations at the 30 Gflop/s
# that a step reaches with small matrices on one CPU core. A GPU does far more arithmetic in the time that it
# takes to issue a stack's operations: all that is merged here is worth merging there.
OVERHEAD = 4.5e7


# Asked for every pair of shapes, most of which lead to the same few layouts.
@lru_cache(maxsize=10_000)
def matrix_work(rows: int, cols: int) -> float:
    """What a step costs for one (rows, cols) matrix beside its stack, in floating-point operations.

    With a whole factor for either side.
    """
    sides = _SMALL.factor(rows, cols) + _SMALL.factor(cols, rows)
    return 2.0 * (_SMALL.matrix(rows, cols, polar_steps=3) + sides)
