"""`step()` inside a function that `torch.compile` takes: one graph, with no break and nothing to recompile.

A tracer sees three things: a lookup that runs while it traces, lists of tensors that are the graph's inputs,
and `_core`, whose tensor operations become the graph. Decisions are those of a recorded step, by tensors. Roots
that are due are decomposed by an operator of ours, which the graph calls in every step and which looks
at the host's own memory; it fetches the learning rates too, so that no number of a schedule is traced.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .apply import SingleProcess
from .rule.scalars import numbers_of
from .rule.update import Facts, Rows, _refresh, take_step
from .step import _begin, _limits, deliver
from .roots.packed import lower, traced_places
from .store.schema import METRIC
from .store.stack import Stack
from .work import Work

if TYPE_CHECKING:
    from .optimizer import ResidualPolarTransport

__all__ = ["Traced", "core"]

_traced: WeakValueDictionary[int, Traced] = WeakValueDictionary()
_handles = itertools.count()


class Traced:
    """What a compiled step works on, in lists that a tracer can guard.

    Attributes:
        handle: under which the operator finds this again.
        groups: the parameter groups, and their options when this was made.
        parameters: those with a gradient.
        idle: those without.
        works: of a plan.
        tensors: of all works, one after the other.
        rates: learning rate of each group, (groups,).
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        parameters: list[Tensor],
        idle: list[Tensor],
        works: list[Work],
    ) -> None:
        self.handle = next(_handles)
        _traced[self.handle] = self
        self.groups, self.parameters, self.idle, self.works = groups, parameters, idle, works
        self.tensors = [t for work in works for t in _tensors_of(work.stack)]
        like = self.tensors[0]
        sizes = {
            value.shape[-1]
            for work in works
            for name, value in work.stack.tensors.items()
            if name.startswith(METRIC) and value.ndim == 4
        }
        self.sizes = sorted(sizes)
        self.places = [lower(size, like.device)[0] for size in self.sizes]
        self.rates = torch.zeros(len(groups), dtype=torch.float64, device=like.device)


def _tensors_of(stack: Stack) -> list[Tensor]:
    more = [] if stack.true_shapes is None else [stack.true_shapes]
    return [*stack.tensors.values(), stack.sizes, stack.extents, *more]


def _traced_stack(stack: Stack, tensors: list[Tensor]) -> Stack:
    found = copy.copy(stack)
    found.tensors = dict(zip(stack.tensors, tensors, strict=False))
    found.sizes, found.extents = tensors[len(found.tensors) : len(found.tensors) + 2]
    found.true_shapes = None if stack.true_shapes is None else tensors[-1]
    if stack.ragged:
        found.buffer = found.sizes.new_zeros(stack.count, stack.width)
        found.places = found.unpacked(found.buffer, list(stack.seats.values()))
    return found


def core(
    handle: int,
    parameters: list[Tensor],
    gradients: list[Tensor],
    tensors: list[Tensor],
    places: list[Tensor],
    rates: Tensor,
) -> None:
    traced_places.update(
        (size, (place, place)) for size, place in zip(_traced[handle].sizes, places, strict=True)
    )
    try:
        _step(handle, parameters, gradients, tensors, rates)
    finally:
        traced_places.clear()


def _step(
    handle: int,
    parameters: list[Tensor],
    gradients: list[Tensor],
    tensors: list[Tensor],
    rates: Tensor,
) -> None:
    """The step of `Traced` number `handle`, on the tensors given in place of its own."""
    traced = _traced[handle]
    ownership = SingleProcess()
    works = []
    rest = tensors
    for work in traced.works:
        count = len(_tensors_of(work.stack))
        stack = _traced_stack(work.stack, rest[:count])
        rest = rest[count:]
        mine = [parameters[i] for i in work.order]
        seats = [s._replace(parameter=p) for s, p in zip(work.seats, mine, strict=True)]
        works.append(
            Work(
                stack,
                seats,
                mine,
                work.order,
                {**work.group, "lr": rates[work.group_index]},
                work.group_index,
                work.rule,
                True,
                None,
                work.lead,
                work.alike,
                hosted=True,
            )
        )
    live = [(0, p, g) for p, g in zip(parameters, gradients, strict=True)]
    for work in works:
        _begin(work, live, [], {}, None)
        _keep_metric(work)
    with_roots = [work for work in works if work.due is not None]
    lists: list[list[Tensor]] = [[] for _ in range(7)]
    for work in with_roots:
        assert work.facts is not None
        assert work.rows is not None
        count = work.rows.matrices
        lists[0].append(work.due)
        lists[1].append(work.facts.correction2[:count])
        lists[2].append(work.facts.units[:count])
        lists[5].append(work.rows.values["root_condition"])
        lists[6].append(work.rows.values["root_failures"])
        for key, value in work.rows.metric.items():
            lists[4 if key.endswith("_root") else 3].append(value)
    torch.ops.rpt.refresh_due(handle, *lists, rates)
    for work in works:
        if work.due is not None:
            counts, due = work.counts, work.due
            count = len(due)
            step, peak = counts["step"][:count] + 1, counts["peak"][:count]
            counts["last_root_step"][:] = torch.where(due, step, counts["last_root_step"])
            counts["root_peak"][:] = torch.where(due, peak, counts["root_peak"])
            counts["root_refreshes"] += due
        if work.rule.max_relative_step is not None and work.rows.matrices:
            work.facts.limits = _limits(work, ownership)
        work.step = take_step(work.rows, work.gradient, work.facts, work.rule)
    for work in works:
        deliver(work, ownership)


def _keep_metric(work: Work) -> None:
    """Rows whose gradient is not finite keep their statistics; their roots are not due."""
    assert work.rows is not None
    kept = work.finite[: work.rows.matrices]
    for name in [name for name in work.before if name.startswith(METRIC)]:
        before, value = work.before.pop(name), work.tensors[name]
        if not name.endswith("_root"):
            value.copy_(torch.where(kept.view(-1, *[1] * (value.ndim - 1)), value, before))


def _refresh_due(
    handle: int,
    due: Sequence[Tensor],
    corrections: Sequence[Tensor],
    units: Sequence[Tensor],
    statistics: Sequence[Tensor],
    roots: Sequence[Tensor],
    conditions: Sequence[Tensor],
    failures: Sequence[Tensor],
    rates: Tensor,
) -> None:
    traced = _traced[handle]
    for g, group in enumerate(traced.groups):
        rates[g] = group["lr"]
    if not any(each.any() for each in due):
        return
    works = [work for work in traced.works if work.stack.matrices]
    statistics, roots = list(statistics), list(roots)
    for k, work in enumerate(works):
        stack = work.stack
        metric = {}
        for key in stack.tensors:
            if key.startswith(METRIC):
                metric[key[len(METRIC) :]] = (roots if key.endswith("_root") else statistics).pop(0)
        rows = due[k][:, 0].nonzero()[:, 0]
        if not len(rows):
            continue
        numbers = numbers_of(stack.dtype, False)
        given = Rows(
            momentum=due[k],
            frame=due[k],
            metric=metric,
            values={"root_condition": conditions[k], "root_failures": failures[k]},
            sizes=None,
            layout=stack.layout,
            matrices=stack.matrices,
            shapes=stack.true_shapes,
            backend=stack.backend,
            numbers=numbers,
        )
        facts = Facts(None, corrections[k], units[k], rows, False, True)
        _refresh(given, facts, work.rule)


_SIGNATURE = (
    "(int handle, Tensor[] due, Tensor[] corrections, Tensor[] units, Tensor[] statistics, "
    "Tensor(a!)[] roots, Tensor(b!)[] conditions, Tensor(c!)[] failures, Tensor(d!) rates) -> ()"
)
torch.library.define("rpt::refresh_due", _SIGNATURE)
torch.library.impl("rpt::refresh_due", "CompositeExplicitAutograd", _refresh_due)
torch.library.register_fake("rpt::refresh_due", lambda *_: None)
