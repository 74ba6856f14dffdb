"""Who owns what: every matrix to one rank, balanced by cost; and the order in which updates travel.

Plain Python over shapes: every rank works out the same plan from the same shapes, and a plan for a
thousand ranks can be looked at on a laptop (`examples/bench/distributed.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One parameter, as the planner sees it.

    Attributes:
        cost: from a `rpt.store.cost.CostModel`.
        nbytes: bytes of its update on the wire.
        stack: parameters with the same value are updated in one batch where one rank owns several.
        together: whether all of one stack stay together (vectors, which cost next to nothing).

    Example:
        >>> from rpt.distributed import Item
        >>> Item(cost=2.0, nbytes=48, stack=(4, 3))
        Item(cost=2.0, nbytes=48, stack=(4, 3), together=False)
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

    Example:
        >>> from rpt.distributed import Plan
        >>> Plan(owner=[0, 1, 1], bucket=[0, 0, 1], buckets=2, work=[3.0, 5.0]).balance
        1.25
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

    Example:
        >>> from rpt.distributed import Item, make_plan
        >>> items = [Item(cost, nbytes=48, stack=(4, 3)) for cost in (5.0, 3.0, 2.0)]
        >>> plan = make_plan(items, ranks=2)
        >>> plan.owner, plan.work
        ([0, 1, 1], [5.0, 5.0])
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
