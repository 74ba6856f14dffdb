"""Who owns what: every matrix to one rank, balanced by cost; and the order in which updates travel.

Plain Python over shapes: every rank works out the same plan from the same shapes, and a plan for a
thousand ranks can be looked at on a laptop (`examples/bench/distributed.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..roots import RootBackend

__all__ = ["CostModel", "Item", "Plan", "make_plan"]


@dataclass(frozen=True)
class CostModel:
    """What a step of one parameter costs, in units of one multiply-add of a matrix product.

    The defaults were measured in float32 on one CPU core (`examples/bench/distributed.py --costs`).
    They are constants rather than measured at start-up so that the same script gives the same plan,
    and with it the same rounding, on every run.

    Attributes:
        eigh: one eigendecomposition of an n×n block costs `eigh` · n³.
        element: everything elementwise in the rule, per entry.
        call: fixed cost of a matrix; a vector, many of which share one call, costs a thirtieth.
        staleness: steps between two refreshes of a root.
    """

    eigh: float = 11.0
    element: float = 700.0
    call: float = 5e5
    staleness: float = 10.0

    def matrix(
        self, rows: int, cols: int, backend: RootBackend | None = None, polar_steps: int = 5
    ) -> float:
        """Cost of one step of a (rows, cols) matrix.

        Args:
            rows, cols: in any order.
            backend: its metric; None for none.
            polar_steps: Newton–Schulz steps; 0 for a matrix that has no polar share.
        """
        rows, cols = min(rows, cols), max(rows, cols)
        cost = self.call + self.element * rows * cols
        if cols >= 2 * rows:
            # Newton–Schulz on the Gram side: the long matrix is touched twice.
            cost += (2.0 * rows * rows * cols + 4.0 * polar_steps * rows**3) * (polar_steps > 0)
        else:
            cost += polar_steps * (2.0 * rows * rows * cols + rows**3)
        return cost + (self._metric(backend, rows, cols) if backend is not None else 0.0)

    def _metric(self, backend: RootBackend, rows: int, cols: int) -> float:
        """Products with, and decompositions of, every factor in the backend's own state.

        Read off the state's shapes, so that a user's own backend is counted too.
        """
        device = torch.device("meta")
        cost = 0.0
        for key, value in backend.create(1, rows, cols, dtype=torch.float32, device=device).items():
            other = cols if key.startswith("left") else rows
            if value.ndim >= 3 and value.shape[-1] == value.shape[-2] and key.endswith("_root"):
                blocks, size = value.numel() // value.shape[-1] ** 2, value.shape[-1]
                cost += 2.0 * blocks * size * size * other
                cost += self.eigh * blocks * size**3 / self.staleness
            elif key.endswith("_basis"):
                cost += 4.0 * value.numel() * other
        return cost

    def vector(self, length: int) -> float:
        """Cost of one step of a vector."""
        return self.call / 30 + self.element * length


@dataclass(frozen=True)
class Item:
    """One parameter, as the planner sees it.

    Attributes:
        cost: from a `CostModel`.
        nbytes: bytes of its update on the wire.
        stack: parameters with the same value are updated in one batch where one rank owns several.
        together: whether all of one stack stay together (vectors, which cost next to nothing).
    """

    cost: float
    nbytes: int
    stack: Hashable
    together: bool = False


@dataclass(frozen=True)
class Plan:
    """Who owns what.

    Attributes:
        owner: rank of every item.
        bucket: the collective, 0 … buckets-1, that every item's update travels in.
        buckets: how many there are.
        work: cost of every rank.
    """

    owner: list[int]
    bucket: list[int]
    buckets: int
    work: list[float]

    @property
    def balance(self) -> float:
        """The largest rank's work over the mean: 1 is perfect."""
        mean = sum(self.work) / len(self.work)
        return max(self.work) / mean if mean > 0 else 1.0


def make_plan(
    items: Sequence[Item], ranks: int, *, buckets: int = 4, settled: Mapping[int, int] | None = None
) -> Plan:
    """Give every item an owner: largest first, each to the rank with the least work so far.

    That rule is never more than 4/3 - 1/(3·ranks) above the best possible plan. Whole matrices are
    given: a polar factor needs the whole matrix, so one rank's work is at least its largest matrix.

    Args:
        items: in the same order on every rank.
        ranks: how many ranks share them.
        buckets: into how many collectives the updates are gathered.
        settled: item → owner for those that already have one, whose state lives there.
    """
    settled = settled or {}
    owner = [-1] * len(items)
    work = [0.0] * ranks
    for index, rank in settled.items():
        owner[index] = rank
        work[rank] += items[index].cost
    units: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        if index not in settled:
            key = ("together", item.stack) if item.together else index
            units.setdefault(key, []).append(index)

    def weight(unit: list[int]) -> float:
        return sum(items[i].cost for i in unit)

    heap = [(load, rank) for rank, load in enumerate(work)]
    heapq.heapify(heap)
    for unit in sorted(units.values(), key=lambda unit: (-weight(unit), unit[0])):
        load, rank = heapq.heappop(heap)
        for index in unit:
            owner[index] = rank
        work[rank] = load + weight(unit)
        heapq.heappush(heap, (work[rank], rank))
    return Plan(owner, _order_of_travel(items, owner, ranks, buckets), buckets, work)


def _order_of_travel(
    items: Sequence[Item], owner: Sequence[int], ranks: int, buckets: int
) -> list[int]:
    """Cut every rank's own sequence of stacks, dearest first, into parts of about equal cost."""
    bucket = [0] * len(items)
    mine: list[dict[Hashable, list[int]]] = [{} for _ in range(ranks)]
    for index, item in enumerate(items):
        mine[owner[index]].setdefault(item.stack, []).append(index)
    for stacks in mine:
        costs = {key: sum(items[i].cost for i in members) for key, members in stacks.items()}
        total = sum(costs.values())
        before = 0.0
        for key in sorted(stacks, key=lambda key: (-costs[key], stacks[key][0])):
            # A stack travels when it is complete: where its middle falls decides.
            middle = before + 0.5 * costs[key]
            part = min(int(buckets * middle / total), buckets - 1) if total > 0 else 0
            for index in stacks[key]:
                bucket[index] = part
            before += costs[key]
    return bucket
