"""The step over stacks, the only one: ordinary, recorded in a CUDA graph, and shared by ranks.

The mathematics is `rpt.rule`. Here gradients become rows, counters become decisions, and updates reach
the weights. Decisions are made on the host where it may read, for every matrix whose roots are due. While
a graph is recorded they are made by tensors, for the most overdue: nothing then waits for the host, and
every step issues the same operations on the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .apply import largest_entries, step_size
from .ownership import Live, Outcome, Ownership, StepSize
from .rule.scalars import Scalars, numbers_of, quiet
from .rule.schedule import OUTGROWN, divisor, most_overdue, next_unit, overdue
from .rule.update import Facts, Rows, Rule, Step, drift, measure, take_step, update_polar_weight
from .store.schema import COUNTERS, METRIC, VALUES
from .store.stack import Index, Seat, Stack

__all__ = ["Work", "advance", "deliver", "is_recording", "next_gain", "plan"]


def is_recording() -> bool:
    """Whether a CUDA graph is being recorded: the host must not wait for a value."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass
class Work:
    """One stack's part of a step; kept from step to step while the same parameters take part.

    Attributes:
        stack: the stack.
        seats: the members that take part, in the order of their rows.
        parameters: theirs.
        order: where each one's gradient is among those given.
        group: their parameter group, and its index.
        rule: its numbers.
        recorded: whether decisions are made by tensors.
        index: their rows, None for all of the stack's.
    """

    stack: Stack
    seats: list[Seat]
    parameters: list[Tensor]
    order: list[int]
    group: dict[str, Any]
    group_index: int
    rule: Rule
    recorded: bool
    index: Index | None
    lead: bool
    # The stack's tensors, or copies of some rows; what of them the rule works on; the counters, which
    # are arrays where the host decides.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rows: Rows | None = None
    counts: dict[str, Scalars] = field(default_factory=dict)
    shares: Scalars = None
    own: bool = False
    # Of the step at hand.
    gradients: list[Tensor] = field(default_factory=list)
    gradient: Tensor | None = None
    facts: Facts | None = None
    due: Scalars = None
    changed: Tensor | None = None
    finite: Tensor | None = None
    before: dict[str, Tensor] = field(default_factory=dict)
    step: Step | None = None

    def open(self) -> Rows:
        """What the rule works on."""
        if self.rows is not None and self.own:
            return self.rows
        stack, index = self.stack, self.index
        tensors = self.tensors = stack.select(index)
        numbers = numbers_of(stack.dtype, not self.recorded and stack.device.type == "cpu")
        self.counts = {
            name: tensors[name] if self.recorded else tensors[name].cpu().numpy()
            for name in COUNTERS
            if name in tensors
        }
        # Copies are returned after the step.
        self.own = index is None and (self.recorded or tensors["step"].device.type == "cpu")
        sizes, shares, shapes = stack.sizes, stack.shares, stack.true_shapes
        if index is not None:
            sizes, shares = sizes[index.all], shares[index.matrix.to(shares.device)]
            shapes = None if shapes is None else shapes[index.matrix]
        self.shares = shares if self.recorded else shares.cpu().numpy()
        self.rows = Rows(
            momentum=tensors["momentum"],
            frame=tensors["frame"],
            metric={k[len(METRIC) :]: v for k, v in tensors.items() if k.startswith(METRIC)},
            values={name: numbers.read(tensors[name]) for name in VALUES if name in tensors},
            sizes=numbers.read(sizes),
            layout=stack.layout,
            matrices=len(shares),
            shapes=shapes,
            backend=stack.backend,
            numbers=numbers,
        )
        return self.rows

    def close(self) -> None:
        """Return copies to the stack, and let go of the step's gradients."""
        if not self.own:
            stack = self.stack
            if not self.recorded:
                for name, value in self.counts.items():
                    self.tensors[name].copy_(torch.from_numpy(value))
            if self.index is not None:
                stack.write_back(self.tensors, self.index)
            self.rows = None
            self.tensors, self.counts = {}, {}
        self.gradients, self.gradient, self.facts, self.before = [], None, None, {}


def plan(
    live: Sequence[Live],
    groups: Sequence[dict[str, Any]],
    rules: Sequence[Rule],
    home: Callable[[Tensor], tuple[Stack, Seat]],
    recorded: bool,
) -> list[Work]:
    """Sort parameters into the stacks that `home(parameter)` names."""
    found: dict[int, list[tuple[int, Seat]]] = {}
    stacks: dict[int, tuple[Stack, int]] = {}
    for i, (g, parameter, _) in enumerate(live):
        stack, seat = home(parameter)
        stacks.setdefault(id(stack), (stack, g))
        found.setdefault(id(stack), []).append((i, seat))
    works = []
    for key, members in found.items():
        stack, g = stacks[key]
        members.sort(key=lambda member: member[1].start)
        seats = [seat for _, seat in members]
        works.append(
            Work(
                stack,
                seats,
                [seat.parameter for seat in seats],
                [i for i, _ in members],
                groups[g],
                g,
                rules[g],
                recorded,
                stack.index(seats),
                any(seat.form.lead for seat in seats),
            )
        )
    return works


def advance(
    batch: Sequence[Work],
    live: Sequence[Live],
    peaks: Sequence[float],
    ranks: Mapping[Tensor, Tensor],
    global_rank: Tensor | None,
) -> None:
    """Take the step of some stacks, up to their updates.

    Args:
        batch: of a plan for `live`.
        live: (group index, parameter, gradient).
        peaks: largest absolute entry of each gradient, all finite; not read where steps are recorded.
        ranks, global_rank: what was observed.
    """
    with quiet():
        waiting = []
        for work in batch:
            _begin(work, live, peaks, ranks, global_rank)
            if work.changed is not None:
                waiting.append(work)
        if waiting:
            _read_drifts(waiting)
        for work in batch:
            assert work.rows is not None
            assert work.gradient is not None
            assert work.facts is not None
            if not work.recorded and work.due is not None:
                work.facts.due = _rows_that_are(work.due, work.stack.device)
            work.step = take_step(work.rows, work.gradient, work.facts, work.rule)


def _begin(
    work: Work,
    live: Sequence[Live],
    peaks: Sequence[float],
    ranks: Mapping[Tensor, Tensor],
    global_rank: Tensor | None,
) -> None:
    """Count and measure the gradients, and decide whose roots are due, except by their drift."""
    rows, rule, counts, recorded = work.open(), work.rule, work.counts, work.recorded
    numbers, wide = rows.numbers, work.stack.dtype == torch.float64
    deciding = numbers_of(work.stack.dtype, not recorded)
    work.gradients = [live[i][2] for i in work.order]
    work.changed = work.due = None
    if recorded:
        peak = _rows_of(work, largest_entries(work.gradients).to(work.stack.dtype)[:, None])
        work.finite = peak.isfinite()
        peak = torch.where(work.finite, peak, 0.0)
        work.before = {key: value.clone() for key, value in work.tensors.items()}
        top = torch.maximum
    else:
        peak = np.array([[peaks[i]] for i in work.order], dtype=deciding.dtype)
        top = np.maximum
    if work.lead:
        peak = _peaks_of_each(work, peak)
    if (ranks or global_rank is not None) and rows.matrices:
        _observe(work, ranks, global_rank)

    # Forgotten as fast as the covariance forgets.
    counts["peak"][:] = top(peak, counts["peak"] * math.sqrt(rule.beta2))
    unit = next_unit(counts["unit"], peak, deciding)
    if wide:
        unit = deciding.cast(unit > 0, deciding.dtype)
    counts["unit"][:] = unit
    scale = divisor(unit, peak, deciding)
    if wide:
        scale = scale * 0.0 + 1.0
    work.gradient = gradient = _gather(work, _sent(work, -scale if rule.maximize else scale))
    if work.finite is not None:
        gradient.masked_fill_(~work.finite, 0.0)
    measure(rows, gradient, rule)

    step = counts["step"] + 1
    seen = step
    count = rows.matrices
    if count:
        seen = counts["step"] + 1
        seen[:count] -= counts["metric_start"]
    # float64: a float32 power would tell in the corrections of a float64 parameter.
    correction1 = 1.0 - rule.beta1 ** deciding.cast(step, deciding.wide)
    correction2 = 1.0 - rule.beta2 ** deciding.cast(seen, deciding.wide)
    work.facts = Facts(
        _sent(work, correction1),
        _sent(work, correction2),
        _sent(work, unit) if rule.eps else unit,
        None,
        recorded,
        recorded or rule.polar_prior > 0 or bool(count and counts["observations"][:count].any()),
    )
    if not count or rows.backend is None:
        return
    by_age = rule.root_drift_threshold is None
    outgrown = counts["peak"][:count] > OUTGROWN * counts["root_peak"]
    ages = overdue(
        step[:count],
        counts["last_root_step"],
        work.shares,
        outgrown,
        rule.max_root_staleness,
        by_age,
        deciding,
    )
    if work.finite is not None:
        able = work.finite[:count] & (unit[:count] > 0)
        work.facts.due = most_overdue(ages, able, rule.max_root_staleness)
        return
    work.due = ages[:, 0] >= 1.0
    if not by_age and not work.due.all():
        work.changed = drift(rows, work.facts.correction2)


def _read_drifts(waiting: Sequence[Work]) -> None:
    """On a device, the one synchronisation: whether a root is made anew is decided on the host."""
    drifts = [work.changed for work in waiting if work.changed is not None]
    device = drifts[0].device
    numbers = torch.cat([drift.double().to(device) for drift in drifts]).cpu().numpy()
    for work, drift in zip(waiting, drifts, strict=True):
        work.due = work.due | (numbers[: len(drift)] >= work.rule.root_drift_threshold)
        numbers = numbers[len(drift) :]


def _rows_that_are(due: np.ndarray, device: torch.device) -> Tensor | None:
    if not due.any():
        return None
    return torch.from_numpy(due.nonzero()[0]).to(device)


def _sent(work: Work, values: Scalars) -> Scalars:
    """Numbers of the counters' kind as numbers of the rule's kind, in the working dtype."""
    assert work.rows is not None
    numbers = work.rows.numbers
    if isinstance(values, Tensor) or numbers.on_host:
        return numbers.cast(values, numbers.dtype)
    first = values[0, 0]
    if (values == first).all():  # a fill, for which no host memory is copied
        return work.rows.momentum.new_full(values.shape, float(first))
    return torch.from_numpy(values).to(device=work.stack.device, dtype=work.stack.dtype)


def _rows_of(work: Work, values: Tensor) -> Tensor:
    """(parameters, 1) -> (rows, 1)."""
    if not work.lead:
        return values
    parts = [v.expand(seat.form.count, 1) for v, seat in zip(values, work.seats, strict=True)]
    return torch.cat(parts)


def _peaks_of_each(work: Work, peak: Scalars) -> Scalars:
    """The largest entry of every matrix, where parameters are stacks of them."""
    parts = [
        gradient.reshape(seat.form.count, -1).abs().amax(1, keepdim=True).to(work.stack.dtype)
        for gradient, seat in zip(work.gradients, work.seats, strict=True)
    ]
    each = torch.cat(parts)
    if isinstance(peak, Tensor):
        return torch.where(work.finite, each, 0.0)  # type: ignore[arg-type]
    return each.cpu().numpy()


def _observe(work: Work, ranks: Mapping[Tensor, Tensor], global_rank: Tensor | None) -> None:
    """Let observations move the polar weights of a stack's matrices."""
    assert work.rows is not None
    rows, mine = work.rows, []
    for seat in work.seats:
        if seat.form.matrix:
            mine += [ranks.get(seat.parameter, global_rank)] * seat.form.count
    if all(rank is None for rank in mine):
        return
    numbers, count = rows.numbers, rows.matrices
    nothing = rows.momentum.new_full((), float("nan"))
    stacked = torch.stack([nothing if r is None else r.to(nothing) for r in mine])[:, None]
    rank = numbers.read(stacked)
    weight = rows.values["polar_weight"]
    weight[:count] = update_polar_weight(weight[:count], rank, work.rule, numbers)
    stored = rows.values["residual_entropy_rank"]
    stored[:count] = numbers.where(rank == rank, rank, stored[:count])
    there = rank == rank if work.recorded else np.array([[r is not None] for r in mine])
    work.counts["observations"][:count] += there


def _gather(work: Work, divisors: Scalars) -> Tensor:
    """The gradients, each divided by its divisor, as (k, rows·cols) in the working dtype."""
    assert work.rows is not None
    stack, scale = work.stack, work.rows.numbers.tensor(divisors)
    if not stack.ragged:
        if len(work.gradients) == 1:
            return torch.div(work.gradients[0].reshape(len(scale), -1), scale)
        if work.lead:
            joined = torch.cat([g.reshape(-1, stack.width) for g in work.gradients])
        else:
            joined = torch.stack(work.gradients).view(len(scale), -1)
        return joined.div_(scale) if joined.dtype == stack.dtype else joined / scale
    if work.index is None:
        rows, places = stack.buffer_and_places()
    else:
        rows = work.rows.momentum.new_zeros(len(scale), stack.width)
        places = _places(work, rows)
    torch._foreach_copy_(places, work.gradients)
    return rows.div_(scale)


def _places(work: Work, rows: Tensor) -> list[Tensor]:
    """Views of (k, rows·cols) in the parameters' own shapes."""
    counts = [seat.form.count for seat in work.seats]
    return [
        work.stack.unpack(part, seat)
        for part, seat in zip(rows.split(counts), work.seats, strict=True)
    ]


def deliver(work: Work, ownership: Ownership) -> Outcome:
    """Write a finished stack's update to the parameters and its counters to their state."""
    step, stack, counts = work.step, work.stack, work.counts
    assert step is not None
    size = step_size(work.group, stack.device, stack.dtype)
    update = step.update
    finite = work.finite
    if finite is not None:
        update, size = _masked(work, update, size)
    if stack.ragged and work.index is None:
        rows, updates = stack.buffer_and_places()
        rows.copy_(update)
    elif stack.ragged or work.lead:
        updates = _places(work, update)
    else:
        shape = work.parameters[0].shape
        updates = list(update.view(-1, *shape).unbind(0))
    refreshed = _count(work)
    ownership.deliver(work.parameters, updates, size, step, refreshed)
    parameters, compared = work.parameters, step.compared
    if work.lead:
        parameters = [s.parameter for s in work.seats for _ in range(s.form.count)]
    if finite is not None:
        compared = compared & finite[:, 0]
    work.close()
    return Outcome(work.group_index, parameters, step.coherence, compared)
