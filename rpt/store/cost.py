"""What a step of one parameter costs: for choosing who shares a stack, and for sharing work over ranks."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["OVERHEAD", "matrix_work"]

# Costs are in floating-point operations at the 30 Gflop/s that a step reaches with small matrices on one
# CPU core; a stack costs one to one and a half milliseconds there. A GPU does far more arithmetic in the
# time that it takes to issue a stack's operations: all that is merged here is worth merging there.
OVERHEAD = 4.5e7
# Per entry: some 25 passes over memory in every step.
_PASSES = 300.0


# Asked for every pair of shapes, most of which lead to the same few layouts.
@lru_cache(maxsize=10_000)
def matrix_work(rows: int, cols: int) -> float:
    """What a step costs for one (rows, cols) matrix, in floating-point operations.

    Both covariances and both roots' application, three Newton–Schulz steps, passes over memory, and
    the decompositions' share: measured at 9 n³ + 1100 n² for a side of n, once in some 30 steps.
    """
    short, long = sorted((rows, cols))
    metric = 4.0 * short * long * (short + long)
    if long >= 2 * short:  # the polar factor stays on the Gram side
        polar = 4.0 * short**2 * long + 18.0 * short**3
    else:
        polar = 12.0 * short**2 * long + 6.0 * short**3
    roots = sum(0.3 * side**3 + 36.0 * side**2 for side in (short, long))
    return metric + polar + roots + _PASSES * short * long
