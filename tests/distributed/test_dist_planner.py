"""Who owns what, and which box lies where: no processes needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpt.distributed.holding import box_numel, box_slices, shard_box, whole_box
from rpt.distributed.plan import Item, make_plan
from rpt.roots import AutoRoots, FullRoots
from rpt.store.cost import CostModel

items = st.lists(
    st.builds(
        Item,
        cost=st.floats(0.1, 100),
        nbytes=st.integers(4, 1000),
        stack=st.integers(0, 4),
        together=st.booleans(),
    ),
    min_size=1,
    max_size=40,
)


@given(items, st.integers(1, 9), st.integers(1, 5))
def test_a_plan_owns_everything_once_and_is_nearly_balanced(items, ranks, buckets):
    plan = make_plan(items, ranks, buckets=buckets)
    assert all(0 <= owner < ranks for owner in plan.owner)
    assert all(0 <= bucket < buckets for bucket in plan.bucket)
    assert sum(plan.work) == pytest.approx(sum(i.cost for i in items))
    units = {}
    for n, item in enumerate(items):
        key = ("together", item.stack) if item.together else n
        units[key] = units.get(key, 0) + item.cost
        if item.together:
            same = [
                plan.owner[k] for k, o in enumerate(items) if o.together and o.stack == item.stack
            ]
            assert len(set(same)) == 1
    best = max(max(units.values()), sum(units.values()) / ranks)
    assert max(plan.work) <= (4 / 3) * best + max(units.values()) / 3 + 1e-6
    assert make_plan(items, ranks, buckets=buckets) == plan


@given(items, st.integers(1, 6))
def test_settled_owners_stay(items, ranks):
    first = make_plan(items[: len(items) // 2 + 1], ranks)
    settled = dict(enumerate(first.owner))
    assert make_plan(items, ranks, settled=settled).owner[: len(settled)] == first.owner


@given(items, st.integers(1, 6))
def test_a_stack_of_one_rank_travels_together(items, ranks):
    plan = make_plan(items, ranks)
    where = {}
    for n, item in enumerate(items):
        assert where.setdefault((plan.owner[n], item.stack), plan.bucket[n]) == plan.bucket[n]


def test_costs_grow_as_the_work_does():
    costs = CostModel()
    square = costs.matrix(512, 512, AutoRoots(), 3)
    assert costs.matrix(512, 2048, AutoRoots(), 3) > 2 * square
    assert costs.matrix(2048, 512, AutoRoots(), 3) == costs.matrix(512, 2048, AutoRoots(), 3)
    assert costs.matrix(512, 512, FullRoots(), 3) > square
    assert costs.matrix(512, 512, AutoRoots(), 0) < square
    assert costs.vector(512) < 0.01 * square


@pytest.mark.parametrize("shape", [(8, 6), (5, 6), (1, 6), (0, 3), (7,), (3, 4, 5)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_boxes_are_those_of_torch_chunk(shape, ranks):
    from torch.distributed.tensor import Replicate, Shard

    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim in range(len(shape)):
        pieces = list(whole.chunk(ranks, dim))
        for rank in range(ranks):
            box = shard_box(shape, (ranks,), (Shard(dim),), (rank,))
            piece = whole[box_slices(box)]
            expected = pieces[rank] if rank < len(pieces) else piece[:0].flatten()[:0]
            assert piece.numel() == box_numel(box) == expected.numel()
            if piece.numel():
                assert torch.equal(piece, expected)
    assert shard_box(shape, (ranks,), (Replicate(),), (0,)) == whole_box(shape)


def test_nested_shards_split_left_to_right_and_strided_ones_right_to_left():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = (2, 2)
    ordinary = [
        shard_box((8, 8), mesh, (Shard(0), Shard(0)), (i, j))[0] for i in (0, 1) for j in (0, 1)
    ]
    assert ordinary == [(0, 2), (2, 4), (4, 6), (6, 8)]
    strided = [
        shard_box((8, 8), mesh, (_StridedShard(0, split_factor=2), Shard(0)), (i, j))[0]
        for i in (0, 1)
        for j in (0, 1)
    ]
    # The table in torch's own documentation of the strided shard.
    assert strided == [(0, 2), (4, 6), (2, 4), (6, 8)]


def test_a_pending_sum_is_no_box():
    from torch.distributed.tensor import Partial

    with pytest.raises(ValueError, match="redistribute"):
        shard_box((4, 4), (2,), (Partial(),), (0,))
