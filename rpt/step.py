"""The step over stacks, the only one: ordinary, recorded in a CUDA graph, and shared by ranks.

The mathematics is `rpt.rule`. Here gradients become rows, counters become decisions, and updates reach
the weights. Decisions are made on the host where it may read, for every matrix whose roots are due. While
a graph is recorded they are made by tensors, for the most overdue: nothing then waits for the host, and
every step issues the same operations on the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .apply import StepSize, largest_entries, step_size, weight_norms
from .ownership import Live, Outcome, Ownership
from .rule.length import next_gain, relative_limit
from .rule.scalars import Scalars, numbers_of
from .rule.schedule import OUTGROWN, divisor, most_overdue, next_unit, overdue
from .rule.update import Facts, drift, measure, take_step, update_polar_weight
from .store.schema import METRIC, WHO
from .work import Work


def advance(
    batch: Sequence[Work],
    live: Sequence[Live],
    peaks: Sequence[float],
    ranks: Mapping[Tensor, Tensor],
    global_rank: Tensor | None,
    ownership: Ownership,
) -> None:
    """Take the step of some stacks, up to their updates.

    Args:
        batch: of a plan for `live`.
        live: (group index, parameter, gradient).
        peaks: largest absolute entry of each gradient, all finite; not read where steps are recorded.
        ranks, global_rank: what was observed.
        ownership: knows the lengths of whole weights.
    """
    # Arithmetic on arrays as tensors do it: infinities and NaN without a warning.
    with np.errstate(all="ignore"):
        waiting = []
        for work in batch:
            begin(work, live, peaks, ranks, global_rank)
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
            if work.rule.max_relative_step is not None and work.rows.matrices:
                work.facts.limits = limits(work, ownership)
            work.step = take_step(work.rows, work.gradient, work.facts, work.rule)
            work.failed = work.step.failed


def begin(
    work: Work,
    live: Sequence[Live],
    peaks: Sequence[float],
    ranks: Mapping[Tensor, Tensor],
    global_rank: Tensor | None,
) -> None:
    """Count and measure the gradients, and decide whose roots are due, except by their drift."""
    rows = work.rows or work.open()
    rule, counts, recorded = work.rule, work.counts, work.recorded
    wide = work.stack.dtype == torch.float64
    deciding = numbers_of(work.stack.dtype, not recorded)
    work.gradients = [live[i][2] for i in work.order]
    work.changed = work.due = None
    peak: Scalars
    top: Any = torch.maximum if recorded else np.maximum
    if recorded:
        peak = _rows_of(work, largest_entries(work.gradients).to(work.stack.dtype)[:, None])
        work.finite = peak.isfinite()
        peak = torch.where(work.finite, peak, 0.0)
        work.before = {key: value.clone() for key, value in work.tensors.items()}
    else:
        peak = np.array([[peaks[i]] for i in work.order], dtype=deciding.dtype)
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

    step, count = counts["step"] + 1, rows.matrices
    seen = step - counts["metric_start"]
    # float64: a float32 power would tell in the corrections of a float64 parameter.
    correction1 = 1.0 - rule.beta1 ** deciding.cast(step, deciding.wide)
    correction2 = 1.0 - rule.beta2 ** deciding.cast(seen, deciding.wide)
    work.facts = Facts(
        _sent(work, correction1),
        _sent(work, correction2),
        _sent(work, unit) if rule.eps else unit,
        None,
        recorded or _by_products(work),
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
        if work.hosted:
            work.due = able & (ages >= 1.0)
            return
        work.facts.due = most_overdue(ages, able, rule.max_root_staleness)
        return
    work.due = ages[:, 0] >= 1.0
    if not by_age and not work.due.all():
        work.changed = drift(rows, work.facts.correction2)


def _read_drifts(waiting: Sequence[Work]) -> None:
    """On a device, the one synchronisation: whether a root is made anew is decided on the host."""
    drifts = [work.changed for work in waiting if work.changed is not None]
    device = drifts[0].device
    numbers = torch.cat([each.double().to(device) for each in drifts]).cpu().numpy()
    for work, each in zip(waiting, drifts, strict=True):
        work.due = work.due | (numbers[: len(each)] >= work.rule.root_drift_threshold)
        numbers = numbers[len(each) :]


def _by_products(work: Work) -> bool:
    """Whether roots come from matrix products (`rpt.roots.newton`) where nothing is recorded either.

    On a device they do: there `torch.linalg.eigh` makes the host wait and takes the matrices of a batch
    one after the other (500 of 100×100 in 0.9 s on a recent GPU, torch issue 174674), where products
    take all of them in some fifty calls. On a CPU `eigh` is 2.4 to 6 times as fast. float64, the
    published rule, which asks for the drift of exact roots, and backends that know no products
    decompose everywhere.
    """
    stack, rule = work.stack, work.rule
    return (
        not stack.on_host
        and stack.dtype == torch.float32
        and rule.root_drift_threshold is None
        and stack.backend is not None
        and stack.backend.capturable
    )


def _rows_that_are(due: np.ndarray, device: torch.device) -> Tensor | None:
    if not due.any():
        return None
    # From ordinary memory a copy that does not block is staged first: it may be freed at once.
    return torch.from_numpy(due.nonzero()[0]).to(device, non_blocking=True)


def _sent(work: Work, values: Scalars) -> Scalars:
    """Numbers of the counters' kind as numbers of the rule's kind, in the working dtype."""
    assert work.rows is not None
    numbers = work.rows.numbers
    if isinstance(values, Tensor) or numbers.on_host:
        return numbers.cast(values, numbers.dtype)
    first = values[0, 0]
    if (values == first).all():  # a fill, for which no host memory is copied
        return work.rows.momentum.new_full(values.shape, float(first))
    return torch.from_numpy(values).to(work.stack.device, work.stack.dtype, non_blocking=True)


def _rows_of(work: Work, values: Tensor) -> Tensor:
    """(parameters, 1) -> (rows, 1)."""
    if not work.lead:
        return values
    parts = [v.expand(seat.form.pieces, 1) for v, seat in zip(values, work.seats, strict=True)]
    return torch.cat(parts)


def _peaks_of_each(work: Work, peak: Scalars) -> Scalars:
    """The largest entry of every matrix, where parameters are stacks of them."""
    parts = [
        gradient.reshape(seat.form.pieces, -1).abs().amax(1, keepdim=True).to(work.stack.dtype)
        for gradient, seat in zip(work.gradients, work.seats, strict=True)
    ]
    each = torch.cat(parts)
    if isinstance(peak, Tensor):
        return torch.where(work.finite, each, 0.0)  # type: ignore[arg-type]
    return each.cpu().numpy()  # one more wait on a device, for each such stack


def _observe(work: Work, ranks: Mapping[Tensor, Tensor], global_rank: Tensor | None) -> None:
    """Let observations move the polar weights of a stack's matrices."""
    assert work.rows is not None
    rows, mine = work.rows, []
    for seat in work.seats:
        if seat.form.matrix:
            mine += [ranks.get(seat.parameter, global_rank)] * seat.form.pieces
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
        if work.alike:
            joined = torch.stack(work.gradients).view(len(scale), -1)
        else:
            joined = torch.cat([g.reshape(-1, stack.width) for g in work.gradients])
        return joined.div_(scale) if joined.dtype == stack.dtype else joined / scale
    if work.index is None:
        rows, places = stack.buffer, stack.places
    else:
        rows = work.rows.momentum.new_zeros(len(scale), stack.width)
        places = stack.unpacked(rows, work.seats)
    torch._foreach_copy_(places, work.gradients)
    return rows.div_(scale)


def limits(work: Work, ownership: Ownership) -> Scalars:
    """The largest RMS that each row's update may have, (k, 1); vectors have no bound."""
    rows, stack, rule = work.rows, work.stack, work.rule
    assert rows is not None
    assert rule.max_relative_step is not None
    numbers, count = rows.numbers, rows.matrices
    if work.lead:
        each = [
            m for s in work.seats if s.form.matrix for m in s.parameter.reshape(-1, *stack.layout)
        ]
        norms = weight_norms(each)
    else:
        norms = ownership.weight_norms(work.parameters[:count])
    rate = step_size(work.group, stack.device, stack.dtype).rate
    norms = numbers.read(norms.to(stack.device, stack.dtype))[:, None]
    fan_in = _sent(work, work.extents[:, 1:])
    found = relative_limit(norms, rows.sizes[:count], fan_in, rule.max_relative_step, rate, numbers)
    if count == len(rows.sizes):
        return found
    limits = rows.sizes + math.inf
    limits[:count] = found
    return limits


def deliver(work: Work, ownership: Ownership) -> Outcome:
    """Write a finished stack's update to the parameters and its counters to their state."""
    step, stack, finite = work.step, work.stack, work.finite
    assert step is not None
    size = step_size(work.group, stack.device, stack.dtype)
    update, compared = step.update, step.compared
    if finite is not None:
        update, size = _masked(work, update, size)
        compared = compared & finite[:, 0]
    if stack.ragged and work.index is None:
        stack.buffer.copy_(update)
        updates = stack.places
    elif work.alike:
        updates = list(update.view(-1, *work.parameters[0].shape).unbind(0))
    else:
        updates = stack.unpacked(update, work.seats)
    parameters, refreshed, told = work.parameters, _refreshed(work), compared
    if work.lead:
        starts = _starts(work)
        parameters = [s.parameter for s in work.seats for _ in range(s.form.pieces)]
        told = torch.stack([compared[start] for start in starts])
        refreshed = [k for k, start in enumerate(starts) if start in refreshed]
    ownership.deliver(work.parameters, updates, size, told, refreshed)
    if finite is None:
        work.counts["step"] += 1
    else:
        _keep_what_is_not_finite(work, finite)
    work.gradients, work.gradient, work.step, work.finite = [], None, None, None
    if not work.own:
        work.close()
    return Outcome(work.group_index, parameters, step.coherence, compared)


def _starts(work: Work) -> list[int]:
    """The first row of each parameter."""
    starts, row = [], 0
    for seat in work.seats:
        starts.append(row)
        row += seat.form.pieces
    return starts


def _refreshed(work: Work) -> list[int]:
    """Count what was made anew; which rows these are, where the host knows."""
    assert work.facts is not None
    due, counts = work.facts.due, work.counts
    if due is None:
        return []
    last, refreshes, peak = (counts[k] for k in ("last_root_step", "root_refreshes", "root_peak"))
    # Roots of a metric that has seen only zero gradients are none: the next step makes them.
    if work.recorded:
        made = counts["unit"][due] > 0
        last[due] = torch.where(made, counts["step"][due] + 1, last[due])
        peak[due] = torch.where(made, counts["peak"][due], peak[due])
        refreshes[due] += made
        return []
    rows = work.due.nonzero()[0]
    rows = rows[counts["unit"][rows, 0] > 0]
    last[rows], peak[rows] = counts["step"][rows] + 1, counts["peak"][rows]
    refreshes[rows] += 1
    return rows.tolist()  # type: ignore[no-any-return]


def _masked(work: Work, update: Tensor, size: StepSize) -> tuple[Tensor, StepSize]:
    """Rates of 0 where a gradient is not finite: the update times its rate, and decay for each."""
    assert work.finite is not None
    rates = work.finite.to(update.dtype) * size.rate
    decay: Any = 1.0
    if work.group["weight_decay"]:
        decays = (1.0 - rates[:, 0] * work.group["weight_decay"]).unbind()
        decay = [decays[start] for start in _starts(work)]
    return update * rates, StepSize(decay, 1.0, size.rounding)


def _keep_what_is_not_finite(work: Work, finite: Tensor) -> None:
    """Rows without a finite gradient keep all of their state but the count of such steps."""
    assert work.rows is not None
    count = work.rows.matrices
    work.counts["step"] += 1
    kinds = {"all": finite, "matrix": finite[:count], "vector": finite[count:]}
    for name, before in work.before.items():
        value, kept = work.tensors[name], kinds["matrix" if name.startswith(METRIC) else WHO[name]]
        kept = kept.view(-1, *[1] * (value.ndim - 1))
        value.copy_(torch.where(kept, value, before))
    work.counts["skipped"] += ~finite


def move_gains(
    groups: Sequence[dict[str, Any]], outcomes: Sequence[Outcome], recorded: bool
) -> None:
    """After a step each group's gain moves with the mean coherence of what could be compared."""
    for g, group in enumerate(groups):
        mine = [o for o in outcomes if o.group == g] if group["gain_rate"] else []
        if not mine or (recorded and not group["capturable"]):
            continue
        # Where the coherences are: elsewhere the host would wait for them.
        gain: Tensor = group["gain"].to(mine[0].coherence.device)
        compared = torch.cat([o.compared.to(gain) for o in mine])
        coherence = torch.cat([o.coherence.to(gain) for o in mine])
        count = compared.sum()
        moved = next_gain(
            gain,
            (coherence * compared).sum() / count.clamp_min(1),
            rate=group["gain_rate"],
            target=group["target_coherence"],
            low=group["min_gain"],
            high=group["max_gain"],
        )
        moved = torch.where(count > 0, moved, gain)
        # In place: a replay reads what the replay before it wrote.
        group["gain"] = gain.copy_(moved) if group["capturable"] else moved
