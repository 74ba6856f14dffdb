"""`step()` inside a function that `torch.compile` takes: one graph, no break, nothing to recompile for.

A tracer sees `Compiled.step`: `prepare`, which runs while it traces, lists of tensors that become the graph's
inputs, and `_core`, whose operations become the graph. The decisions are those of a recorded step, made by
tensors. What a graph cannot hold is in two operators, called in every step: one fetches the learning rates,
the other decomposes where roots are due, so that neither a schedule nor a refresh is traced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from .observing import NOTHING
from .options import NAMES
from .ownership import Agreement, Live, Ownership
from .refusals import interrupted, warn_of_failed_roots, warn_of_nonfinite
from .roots.kronecker import KroneckerRoots
from .roots.packed import PLACES, lower
from .rule.update import Facts, refresh, take_step
from .stacks import Stacks
from .step import begin, deliver, limits
from .store.schema import METRIC
from .store.stack import Stack
from .work import Work

if TYPE_CHECKING:
    from .optimizer import ResidualPolarTransport

_numbers = itertools.count()
_traced: WeakValueDictionary[str, Traced] = WeakValueDictionary()
# Whoever changes one of them wants another graph; the rate is fetched.
_DECIDING = [name for name in NAMES if name != "lr"]


class Traced:
    """What a compiled step of an optimizer works on, in lists that a tracer can guard.

    Attributes:
        handle: where the operators find this, text, so that no tracer takes it for a size.
        groups, options, counts: the parameter groups, what their options were, and how many parameters
            they had.
        parameters, idle: those with a gradient, and those without.
        works: of a plan for `parameters`.
        tensors: the stacks' tensors, one stack after the other.
        sides, places: sizes of covariances, and where the triangle of each is (`packed.lower`).
        rates: learning rate of each group, (groups,), float64.
    """

    def __init__(
        self, optimizer: ResidualPolarTransport, live: Sequence[Live], works: list[Work]
    ) -> None:
        self.handle = str(next(_numbers))
        _traced[self.handle] = self
        self.optimizer = ref(optimizer)
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.options = [[group[name] for name in _DECIDING] for group in self.groups]
        self.counts = [len(group["params"]) for group in self.groups]
        self.parameters = [parameter for _, parameter, _ in live]
        self.idle = [p for p in optimizer._all() if p.grad is None]
        self.works = works
        self.tensors = [t for work in works for t in work.stack.whole()]
        device = self.tensors[0].device
        self.sides = sorted(
            {
                root.shape[-1]
                for work in works
                for key, root in work.stack.tensors.items()
                if _is_root(key) and root.ndim == 4
            }
        )
        self.places = [lower(side, device)[0] for side in self.sides]
        self.rates = torch.zeros(len(self.groups), dtype=torch.float64, device=device)

    def as_traced(self) -> bool:
        """Always true where it is traced; what it reads, the tracer guards."""
        for group, options in zip(self.groups, self.options, strict=True):
            for name, option in zip(_DECIDING, options, strict=True):
                if group[name] != option:
                    return False
        counts = [len(group["params"]) for group in self.groups]
        return counts == self.counts and all(parameter.grad is None for parameter in self.idle)


def _is_root(key: str) -> bool:
    return key.startswith(METRIC) and key.endswith("_root")


class Compiled:
    """The step of one optimizer, for torch.compile."""

    def __init__(self, optimizer: ResidualPolarTransport) -> None:
        self._optimizer = ref(optimizer)

    def step(self, stacks: Stacks) -> bool:
        """Take the step as part of a graph; False for one that must be ordinary."""
        handle = self.prepare()
        if not handle:
            return False
        traced = stacks.traced[handle]
        if not traced.as_traced():
            return False
        gradients = [parameter.grad for parameter in traced.parameters]
        _core(handle, traced.parameters, gradients, traced.tensors, traced.places, traced.rates)
        return True

    @torch.compiler.assume_constant_result
    def prepare(self) -> str:
        """While a step is traced: give all parameters with a gradient their places.

        Returns:
            a handle; empty for what a graph cannot hold, and where the ordinary step has an error to
            raise.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        stacks = optimizer._stacks
        try:
            live, _ = stacks.live(optimizer)
        except (RuntimeError, TypeError, ValueError):
            return ""
        ranks = optimizer._ranks()
        if not live or stacks.blind or type(ranks) is not Ownership:
            return ""
        for group in optimizer.param_groups:
            by_drift = group["root_drift_threshold"] is not None
            if by_drift or group["gain_rate"] or group["nonfinite"] == "raise":
                return ""
        agreed, curved = stacks.settle(
            optimizer, Agreement(live, [0.0] * len(live), NOTHING), ranks
        )
        works = [] if curved else stacks.planned(optimizer, agreed.live, True)
        if not works or any(not _traceable(work) for work in works):
            return ""
        if len({tensor.device for work in works for tensor in work.stack.whole()}) > 1:
            return ""
        traced = Traced(optimizer, live, works)
        # A dict of one, because a tracer takes a size for dynamic that is another than it was before in
        # the same place.
        stacks.traced = {traced.handle: traced}
        return traced.handle


def _traceable(work: Work) -> bool:
    """All of a stack, with built-in roots: their state is known to be statistics and roots."""
    backend = work.stack.backend
    ours = backend is None or type(backend).__module__ == KroneckerRoots.__module__
    return work.index is None and ours and (backend is None or backend.capturable)


@torch.compiler.allow_in_graph
def _core(
    handle: str,
    parameters: list[Tensor],
    gradients: list[Tensor],
    tensors: list[Tensor],
    places: list[Tensor],
    rates: Tensor,
) -> None:
    """The step of `Traced` number `handle`, on the tensors given in place of its own."""
    traced = _traced[handle]
    brought = {PLACES % s: p for s, p in zip(traced.sides, places, strict=True)}
    with torch.no_grad(), torch.autocast(rates.device.type, enabled=False):
        _take(traced, parameters, gradients, tensors, brought, rates)


def _take(
    traced: Traced,
    parameters: list[Tensor],
    gradients: list[Tensor],
    tensors: list[Tensor],
    places: dict[str, Tensor],
    rates: Tensor,
) -> None:
    """A recorded step, whose roots are refreshed in the middle of it by the host."""
    torch.ops.rpt.rates(traced.handle, rates)
    ownership, works = Ownership(), []
    for work in traced.works:
        count = len(work.stack.whole())
        stack, tensors = work.stack.on(tensors[:count]), tensors[count:]
        mine = [parameters[i] for i in work.order]
        works.append(
            replace(
                work,
                stack=stack,
                seats=[s._replace(parameter=p) for s, p in zip(work.seats, mine, strict=True)],
                parameters=mine,
                group=work.group | {"lr": rates[work.group_index]},
                hosted=True,
            )
        )
    live = [(0, p, g) for p, g in zip(parameters, gradients, strict=True)]
    for work in works:
        work.open().metric |= places
        begin(work, live, [], {}, None)
        _keep_statistics(work)
    _call_host(traced.handle, works)
    for work in works:
        rows, facts, counts = work.rows, work.facts, work.counts
        assert rows is not None
        assert facts is not None
        assert work.gradient is not None
        if work.due is not None:
            due, count = work.due, rows.matrices
            now = counts["step"][:count] + 1, counts["peak"][:count]
            for name, value in zip(("last_root_step", "root_peak"), now, strict=True):
                counts[name][:] = torch.where(due, value, counts[name])
            counts["root_refreshes"] += due
        if work.rule.max_relative_step is not None and rows.matrices:
            facts.limits = limits(work, ownership)
        work.step = take_step(rows, work.gradient, facts, work.rule)
        deliver(work, ownership)


def _keep_statistics(work: Work) -> None:
    """Rows whose gradient is not finite keep their statistics; their roots are not due."""
    assert work.rows is not None
    assert work.finite is not None
    kept = work.finite[: work.rows.matrices]
    for name in [name for name in work.before if name.startswith(METRIC)]:
        before, value = work.before.pop(name), work.tensors[name]
        if not _is_root(name):
            value.copy_(torch.where(kept.view(-1, *[1] * (value.ndim - 1)), value, before))


def _rates(handle: str, rates: Tensor) -> None:
    """Fetch the learning rates; raises for one out of range before the graph changes anything."""
    traced = _traced[handle]
    optimizer = traced.optimizer()
    assert optimizer is not None
    for g, group in enumerate(traced.groups):
        if type(group["lr"]) is not float or not 0.0 <= group["lr"] < math.inf:
            optimizer._groups.look(traced.groups)  # raises, or makes a number of it
        rates[g] = group["lr"]


def _held(stack: Stack) -> list[str]:
    """What of a stack with roots the host works on."""
    return [*(k for k in stack.tensors if k.startswith(METRIC)), "root_condition", "root_failures"]


def _call_host(handle: str, works: Sequence[Work]) -> None:
    """Hand `_host` what it needs: whose gradients are finite, and of each work with roots its part."""
    finite = [work.finite for work in works]
    due, corrections, units, held = [], [], [], []
    for work in works:
        if work.due is not None:
            assert work.facts is not None
            count = work.stack.matrices
            due.append(work.due)
            corrections.append(work.facts.correction2[:count])
            units.append(work.facts.units[:count])
            held += [work.tensors[name] for name in _held(work.stack)]
    torch.ops.rpt.host(handle, finite, due, corrections, units, held)


def _host(
    handle: str,
    finite: Sequence[Tensor],
    due: Sequence[Tensor],
    corrections: Sequence[Tensor],
    units: Sequence[Tensor],
    held: Sequence[Tensor],
) -> None:
    """What the host has to do in a compiled step. On a device it waits, as an ordinary step does."""
    traced = _traced[handle]
    optimizer = traced.optimizer()
    assert optimizer is not None
    try:
        for work, each in zip(traced.works, finite, strict=True):
            if not each.all():
                owners = [s.parameter for s in work.seats for _ in range(s.form.pieces)]
                bad = [p for p, good in zip(owners, each[:, 0].tolist(), strict=True) if not good]
                warn_of_nonfinite(optimizer, bad)
        with_roots = [work for work in traced.works if work.stack.backend is not None]
        rest = iter(held)
        for work, *parts in zip(with_roots, due, corrections, units, strict=True):
            warn_of_failed_roots(optimizer, _refresh(work, parts, rest))
    except Exception as error:
        raise interrupted(error, traced.parameters, [], optimizer._name) from error


def _refresh(
    work: Work, parts: Sequence[Tensor], rest: Iterator[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Decompose what is due of one work, in the next of the tensors held; (parameter, whether it failed)."""
    due, correction, units = parts
    stack = copy(work.stack)
    stack.tensors = stack.tensors | {name: next(rest) for name in _held(stack)}
    now = due[:, 0].cpu()
    if not now.any():
        return []
    work = replace(work, stack=stack, due=now.numpy())
    rows_due = now.nonzero()[:, 0].to(stack.device)
    work.facts = Facts(None, correction, units, rows_due, False, True)
    work.failed = refresh(work.open(), work.facts, work.rule)
    return work.tried()


torch.library.define("rpt::rates", "(str handle, Tensor(a!) rates) -> ()")
torch.library.define(
    "rpt::host",
    "(str handle, Tensor[] finite, Tensor[] due, Tensor[] corrections, Tensor[] units, "
    "Tensor(a!)[] held) -> ()",
)
for name, host in (("rpt::rates", _rates), ("rpt::host", _host)):
    torch.library.impl(name, "CompositeExplicitAutograd", host)
    torch.library.register_fake(name, lambda *_: None)
