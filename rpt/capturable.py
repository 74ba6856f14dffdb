"""The step of `capturable=True`: no value is read on the host, and no decision depends on one.

The rule is `rpt.update`'s. What `rpt.engine` keeps and decides in Python (counters, units of the
gradient, skips, whose roots are due) lives here in tensors of the stack, so that every step issues the
same operations on the same memory: it can be recorded in a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .engine import OUTGROWN, StackWork, group_gain, limits, observe, sort_into_stacks, step_size
from .manifold import manifold_of
from .ownership import Live, Outcome, SingleProcess, StepSize, apply_updates, largest_entries
from .update import Members, Step, spread, take_step

if TYPE_CHECKING:
    from rpt.observers.staging import Committed

    from .stepping import SteppingOptimizer

__all__ = ["device_divisor", "device_unit", "due_rows", "update_on_device"]

# Until a stack is this old all its roots are made anew in every step, unless a graph is being recorded.
YOUNG = 10
# The share of `max_root_staleness` in which round after round reaches every matrix of a stack: what
# `due_by_age` comes to on average.
_ROUND = 0.75


def update_on_device(optimizer: SteppingOptimizer, live: Sequence[Live], seen: Committed) -> None:
    """One step of an optimizer whose groups are all capturable.

    Args:
        optimizer: its groups' options have been validated.
        live: (group index, parameter, gradient) of what takes part: the same in every step that a
            graph is to replay.
        seen: observations.

    Raises:
        RuntimeError: what cannot be done without the host, with the remedy, before anything changes.
    """
    groups = optimizer.param_groups
    _refuse(optimizer, live, groups)
    optimizer._registry.ensure(
        [(g, p) for g, p, _ in live], groups, optimizer.state, optimizer._backend
    )
    work = sort_into_stacks(live, [math.nan] * len(live), groups, optimizer._registry.home)
    outcomes = []
    for item in work:
        step, finite = _advance(
            item, [seen.ranks.get(p, seen.global_rank) for p in item.parameters]
        )
        index = next(g for g, group in enumerate(groups) if group is item.group)
        compared = step.compared & finite
        outcomes.append(Outcome(index, item.parameters, step.coherence, compared))
    for g, group in enumerate(groups):
        if group["gain_rate"] and (mine := [o for o in outcomes if o.group == g]):
            if group["gain"].device != mine[0].coherence.device:
                group["gain"] = group["gain"].to(mine[0].coherence.device)
            # In place: a replay reads what the replay before it wrote.
            group["gain"].copy_(group_gain(group, mine))
    optimizer._end_observed_step(
        {p: q for o in outcomes for p, q in zip(o.parameters, o.coherence, strict=True)}
    )


def _refuse(
    optimizer: SteppingOptimizer, live: Sequence[Live], groups: Sequence[Mapping[str, Any]]
) -> None:
    if not isinstance(optimizer._ranks(), SingleProcess):
        raise RuntimeError(
            "capturable=True works in a single process: ranks that share the work agree on the host. "
            'Leave capturable out, or pass ownership="local" if every rank trains on its own'
        )
    for g, parameter, _ in live:
        if manifold_of(parameter) is not None:
            raise RuntimeError(
                "capturable=True cannot update parameters on a manifold: give them to an optimizer "
                "of their own"
            )
        rate = groups[g]["lr"]
        if isinstance(rate, Tensor) and rate.device != parameter.device:
            raise RuntimeError(
                f"capturable=True needs lr on the parameters' device: it is on {rate.device}, they are "
                f"on {parameter.device}; pass lr=torch.tensor(lr, device={str(parameter.device)!r})"
            )
    if optimizer._attachment is not None and _recording():
        raise RuntimeError(
            "an attached model measures ranks by decomposition, which a CUDA graph cannot record: call "
            "remove_observers() before recording; polar weights keep their values"
        )


def _recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def device_unit(unit: Tensor, peak: Tensor) -> Tensor:
    """`rpt.update.next_unit` of tensors: float64 (k,), no host read."""
    # Of a number m·2^e, 2^e = (m·2^e)/m exactly.
    mantissa, _ = torch.frexp(peak)
    power = (peak / torch.where(peak > 0, mantissa, 1.0)).clamp(2.0**-126, 2.0**126)
    return torch.where((unit > 0) | (peak == 0), unit, power)


def device_divisor(unit: Tensor, peak: Tensor) -> Tensor:
    """`rpt.update.divisor` of tensors: float64 (k,)."""
    return torch.maximum(torch.where(unit > 0, unit, 1.0), peak * 2.0**-50)


def due_rows(
    step: Tensor, last: Tensor, longest: Tensor, outgrown: Tensor, able: Tensor, count: int
) -> Tensor:
    """The `count` matrices of a stack whose roots are the most overdue, by the rule of `due_by_age`.

    Args:
        step: the number of this step, float64 (k,).
        last: that of the last refresh, 0 for none, (k,).
        longest: the age that each one's roots may reach at most, (k,).
        outgrown: whether its gradients have outgrown its roots, bool (k,).
        able: whether anything can be made of its statistics in this step, bool (k,): those that are
            not come last, or a matrix that never has a gradient would take every turn.
        count: how many.

    Returns:
        indices, int64 (count,).
    """
    limit = torch.minimum(longest, step / 3 * (longest / longest.amax())).clamp_min(1.0)
    overdue = torch.where(last > 0, (step - last) / limit, torch.inf)
    overdue = torch.where(outgrown, torch.inf, overdue)
    return torch.where(able, overdue, -torch.inf).topk(count).indices


def _advance(item: StackWork, ranks: Sequence[Tensor | None]) -> tuple[Step, Tensor]:
    """Run the rule over a stack; rows without a finite gradient keep parameter and state as they are.

    Returns:
        the step; which rows were finite, bool (k,).
    """
    stack, rule, group = item.stack, item.rule, item.group
    state, item.index = stack.select(item.members)
    item.working = state
    peak = largest_entries(item.gradients).double()
    finite = peak.isfinite()
    peak = torch.where(finite, peak, 0.0)
    before = {key: value.clone() for key, value in state.items()}

    if stack.matrices and (seen := observe(item, ranks)) is not None:
        state["observations"] += seen
    # Forgotten as fast as the covariance forgets.
    torch.maximum(peak, state["peak"] * math.sqrt(rule.beta2), out=state["peak"])
    unit = device_unit(state["unit"], peak)
    state["unit"].copy_((unit > 0) if stack.dtype == torch.float64 else unit)
    divisors = device_divisor(state["unit"], peak)
    if stack.dtype == torch.float64:
        divisors = torch.ones_like(divisors)
    if group["maximize"]:
        divisors = -divisors
    gradient = stack.gradients(item.members, item.gradients, divisors)
    gradient.masked_fill_(~finite[:, None], 0.0)
    state["step"] += 1
    members = _members(item, finite)
    task = take_step(state, gradient, item.sizes, stack.layout, stack.backend, members, rule)
    try:
        next(task)
    except StopIteration as stop:
        step: Step = stop.value
    if members.chosen is not None:
        _count_refreshes(state, members.chosen)

    for key, value in state.items():
        if key != "skipped":
            kept = finite.view(-1, *[1] * (value.ndim - 1))
            value.copy_(torch.where(kept, value, before[key]))
    state["skipped"] += ~finite
    stack.write_back(state, item.index)
    _apply(item, step, finite)
    if stack.age is not None:
        stack.age += 1
    item.gradients, item.working = [], {}
    return step, finite


def _members(item: StackWork, finite: Tensor) -> Members:
    stack, state, rule = item.stack, item.working, item.rule
    metric_steps, chosen = state["step"], None
    if stack.matrices:
        metric_steps = state["step"] - state["metric_start"]
        shares = [spread(stack.ordinals[i]) for i in item.members]
        longest = rule.max_root_staleness * stack.constant(*shares, dtype=torch.float64)
        seen = state["root_peak"]
        outgrown = (seen > 0) & (state["peak"] > OUTGROWN * seen)
        count = len(shares)
        if _recording() or (stack.age or 0) >= YOUNG:
            count = math.ceil(count / max(1.0, _ROUND * rule.max_root_staleness))
        able = finite & (state["unit"] > 0)
        chosen = due_rows(state["step"], state["last_root_step"], longest, outgrown, able, count)
    return Members(
        steps=state["step"],
        metric_steps=metric_steps,
        units=state["unit"],
        shaped=True,
        matrices=item.matrices,
        shapes=item.shapes,
        limits=limits(item, SingleProcess()),
        chosen=chosen,
    )


def _count_refreshes(state: Mapping[str, Tensor], chosen: Tensor) -> None:
    # Roots of a metric that has seen only zero gradients are none: a later step makes them.
    made = state["unit"][chosen] > 0
    for key, value in (
        ("last_root_step", state["step"][chosen]),
        ("root_peak", state["peak"][chosen]),
        ("root_refreshes", state["root_refreshes"][chosen] + 1),
    ):
        state[key].index_copy_(0, chosen, torch.where(made, value, state[key][chosen]))


def _apply(item: StackWork, step: Step, finite: Tensor) -> None:
    """W <- decay · W - rate · u where the gradient was finite."""
    group, stack = item.group, item.stack
    rates = finite.to(stack.dtype) * step_size(group, stack.device, stack.dtype).rate
    updates = stack.updates(item.members, step.update * rates[:, None])
    decay: Any = 1.0
    if group["weight_decay"]:
        decay = list((1.0 - rates * group["weight_decay"]).unbind())
    apply_updates(item.parameters, updates, StepSize(decay, 1.0, group["rounding"]))
