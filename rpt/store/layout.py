"""Which shape of stack each matrix and vector of a parameter group lives in: a choice by cost.

A step issues the same hundred operations for a stack whatever it holds. In a network of small
tensors that is most of its time, so that matrices of different shapes are better padded with zeros and
stepped together; in a large one arithmetic is, and every shape keeps a stack of its own.

Pure functions of the shapes alone: neither order nor ranks nor gradients have a say, so that every
process of a run chooses alike.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Mapping
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cost import OVERHEAD, matrix_work

Shape = tuple[int, int]

# A matrix this costly is never padded: one stack less could not be noticed beside it. 256 x 256 costs
# four times as much, so that large networks are stepped as if nothing was ever merged.
LARGEST = 1.2e8
# Per entry: some 25 passes over memory in every step, and the copies in and out of a padded stack, which
# for a tall matrix are transposed.
_PASSES = 300.0
_COPIES = 100.0
# A vector's step per padded entry.
_VECTOR = 200.0


class Form(NamedTuple):
    """What a parameter is to the rule: one matrix or vector, or a stack of them.

    Attributes:
        rows, cols: of each; (1, length) of a vector.
        matrix: whether it has the metric and the polar share of matrices.
        lead: the dimensions that count them, () for one.
    """

    rows: int
    cols: int
    matrix: bool
    lead: tuple[int, ...] = ()

    @property
    def pieces(self) -> int:
        """How many there are."""
        return math.prod(self.lead)


def form_of(parameter: Tensor, group: Mapping[str, Any]) -> Form:
    """What a parameter is in its group.

    Two or more dimensions are a matrix (shape[0], numel/shape[0]), with `stacked` matrices of the last
    two; fewer are a vector. With `thin_as_vector` a matrix of one row or one column is a vector: its
    covariance sees one rank-one sample a step, and whitening by it amplifies whatever was absent of
    late.
    """
    shape = parameter.shape
    if len(shape) < 2:
        return Form(1, parameter.numel(), False)
    lead: tuple[int, ...] = ()
    rows, cols = shape[0], parameter.numel() // max(shape[0], 1)
    if len(shape) > 2 and group["stacked"]:
        lead, rows, cols = tuple(shape[:-2]), shape[-2], shape[-1]
    if min(rows, cols) == 1 and group["thin_as_vector"]:
        return Form(1, rows * cols, False, lead)
    return Form(rows, cols, True, lead)


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """float64 for float64 parameters, float32 for every other floating type."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def is_fake(parameter: Tensor) -> bool:
    """Whether it is a tracer's fake tensor."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(parameter, fakes.FakeTensor)


def vector_length_class(length: int) -> int:
    """The padded length of a vector: the next power of two, and at least 64."""
    return max(64, 1 << (length - 1).bit_length())


def matrix_layouts(
    counts: Mapping[Shape, int], pads: Callable[[int, int], bool]
) -> dict[Shape, Shape]:
    """The (rows, cols) of the stack for each shape of matrix.

    Args:
        counts: how many matrices there are of each (rows, cols), tall ones included.
        pads: whether smaller matrices may share a stack of (rows, cols), rows <= cols, with zeros
            around them (`RootBackend.pads`).

    Returns:
        for each shape its own where it shares with no other, else a wide one that holds it lying.
    """

    def shareable(layout: Shape) -> bool:
        return matrix_work(*layout) <= LARGEST and pads(*layout)

    candidates = {
        shape: count for shape, count in counts.items() if shareable((min(shape), max(shape)))
    }
    merged = _merge(candidates, lambda shape: matrix_work(*shape), _COPIES, shareable)
    return {shape: merged.get(shape, shape) for shape in counts}


def vector_layouts(counts: Mapping[Shape, int]) -> dict[Shape, Shape]:
    """(1, padded length) of the stack for vectors of each (1, length class), of which there are `counts`."""
    return _merge(counts, lambda shape: _VECTOR * shape[1], 0.0, lambda _: True)


def host_layout(
    length: int, count: int, hosts: Mapping[Shape, int], padded: Container[Shape]
) -> Shape | None:
    """The stack of matrices in which `count` vectors cost less than in a stack of their own, if any.

    Args:
        length: what the vectors are padded to otherwise.
        count: how many there are.
        hosts: how many matrices live in stacks of each (rows, cols).
        padded: those stacks that hold several shapes.
    """

    def price(layout: Shape) -> float:
        entries = layout[0] * layout[1]
        # Vectors make a stack's rows differ in shape, which a stack of one shape has not paid for yet.
        copies = 0.0 if layout in padded else _COPIES * entries * hosts[layout]
        return copies + count * (_VECTOR * (entries - length) + _COPIES * entries)

    fits = sorted(layout for layout in hosts if layout[0] * layout[1] >= length)
    best = min(fits, key=price, default=None)
    return best if best is not None and price(best) < OVERHEAD else None


def _merge(
    counts: Mapping[Shape, int],
    work: Callable[[Shape], float],
    copies: float,
    shareable: Callable[[Shape], bool],
) -> dict[Shape, Shape]:
    """Merge the two stacks that save the most until no two save anything; the stack of each shape.

    The cost of a stack: OVERHEAD + count · (work + copies · entries), without copies for a stack of
    one shape.
    """
    home = {shape: shape for shape in counts}
    count = dict(counts)
    cost = {shape: OVERHEAD + members * work(shape) for shape, members in counts.items()}
    gains: dict[tuple[Shape, Shape], tuple[float, tuple[Shape, Shape]]] = {}

    def joint(a: Shape, b: Shape) -> tuple[Shape, float]:
        layout = (max(min(a), min(b)), max(max(a), max(b)))
        each = work(layout) + copies * layout[0] * layout[1]
        return layout, OVERHEAD + (count[a] + count[b]) * each

    def propose(a: Shape, b: Shape) -> None:
        layout, together = joint(a, b)
        saved = cost[a] + cost[b] - together
        if saved > 0 and shareable(layout):
            pair = (min(a, b), max(a, b))
            gains[pair] = (-saved, pair)

    for a, b in combinations(counts, 2):
        propose(a, b)
    while gains:
        _, (a, b) = min(gains.values())
        layout, together = joint(a, b)
        if layout in cost and layout not in (a, b):
            del gains[a, b]  # either joins that one for less
            continue
        members = count[a] + count[b]
        for old in (a, b):
            del cost[old], count[old]
        cost[layout], count[layout] = together, members
        home = {shape: layout if stack in (a, b) else stack for shape, stack in home.items()}
        gains = {pair: gain for pair, gain in gains.items() if a not in pair and b not in pair}
        for other in cost:
            if other != layout:
                propose(layout, other)
    return home
