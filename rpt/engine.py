"""Runs the update rule over the stacks of one step: host decisions here, the mathematics in `update`."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .gain import next_gain
from .length import relative_limit
from .options import group_rule
from .ownership import Outcome, Ownership, StepSize
from .scalars import quiet
from .stack import Rows, Stack
from .update import (
    Members,
    Rule,
    Step,
    divisor,
    next_unit,
    take_step,
    update_polar_weight,
)

__all__ = [
    "OUTGROWN",
    "StackWork",
    "advance",
    "deliver",
    "group_gain",
    "limits",
    "observe",
    "sort_into_stacks",
    "step_size",
]


# How many times the largest gradient entry that its roots have seen makes a gradient too large for them.
OUTGROWN = 4.0


@dataclass
class StackWork:
    """One stack's part of a step.

    Attributes:
        stack: the stack.
        members: positions in it of the parameters that have a gradient; those of matrices come first.
        gradients: their gradients.
        peaks: largest absolute entry of each.
        group: their parameter group.
        rule: its numbers.
        working: the tensors the rule changes: the stack's own, or copies of some rows.
        index: rows to write those copies back to, None for the stack's own.
        step: the result.
    """

    stack: Stack
    members: list[int]
    gradients: list[Tensor]
    peaks: list[float]
    group: dict[str, Any]
    rule: Rule
    working: dict[str, Tensor] = field(default_factory=dict)
    index: Rows | None = None
    step: Step | None = None

    @property
    def parameters(self) -> list[Tensor]:
        return [self.stack.parameters[i] for i in self.members]

    @property
    def matrices(self) -> int:
        """How many of them are matrices."""
        count = self.stack.matrices
        return count if self.index is None else sum(i < count for i in self.members)

    @property
    def sizes(self) -> Tensor:
        """Number of entries of each, (k, 1)."""
        return self.stack.sizes if self.index is None else self.stack.sizes[self.index.all]

    @property
    def shapes(self) -> Tensor | None:
        """True (rows, cols) of the matrices where the stack is padded, (matrices, 2)."""
        shapes = self.stack.shapes
        return shapes if shapes is None or self.index is None else shapes[self.index.matrices]

    def sort(self) -> None:
        """By position: matrices first."""
        order = sorted(range(len(self.members)), key=self.members.__getitem__)
        self.members = [self.members[i] for i in order]
        self.gradients = [self.gradients[i] for i in order]
        self.peaks = [self.peaks[i] for i in order]


def sort_into_stacks(
    live: Sequence[tuple[int, Tensor, Tensor]],
    peaks: Sequence[float],
    groups: Sequence[dict[str, Any]],
    home: Any,
) -> list[StackWork]:
    """Sort gradients into the stacks that `home(parameter)` names.

    Args:
        live: (group index, parameter, whole gradient).
        peaks: largest absolute entry of each gradient.
        groups: the optimizer's parameter groups.
        home: gives the stack of a parameter and its position there.
    """
    rules: dict[int, Rule] = {}
    plan: dict[int, StackWork] = {}
    for (g, parameter, gradient), peak in zip(live, peaks, strict=True):
        stack, position = home(parameter)
        if g not in rules:
            rules[g] = group_rule(groups[g])
        if id(stack) not in plan:
            plan[id(stack)] = StackWork(stack, [], [], [], groups[g], rules[g])
        plan[id(stack)].members.append(position)
        plan[id(stack)].peaks.append(peak)
        plan[id(stack)].gradients.append(gradient)
    for item in plan.values():
        if item.stack.mixed:
            item.sort()
    return list(plan.values())


def advance(
    batch: Sequence[StackWork],
    state: Mapping[Tensor, dict[str, Any]],
    ranks: Mapping[Tensor, Tensor],
    global_rank: Tensor | None,
    ownership: Ownership,
) -> None:
    """Run the rule over some stacks, with one host synchronisation among them."""
    waiting: list[tuple[StackWork, Generator[Tensor, list[float], Step], Tensor]] = []
    for item in batch:
        task = _start(item, state, ranks, global_rank, ownership)
        try:
            with quiet():
                waiting.append((item, task, next(task)))
        except StopIteration as stop:
            item.step = stop.value
    if not waiting:
        return
    device = waiting[0][2].device
    # The one synchronisation: whether to refresh a root is decided on the host.
    numbers = torch.cat([drift.double().to(device) for *_, drift in waiting]).tolist()
    for item, task, drift in waiting:
        mine, numbers = numbers[: len(drift)], numbers[len(drift) :]
        try:
            with quiet():
                task.send(mine)
        except StopIteration as stop:
            item.step = stop.value


def _start(
    item: StackWork,
    state: Mapping[Tensor, dict[str, Any]],
    ranks: Mapping[Tensor, Tensor],
    global_rank: Tensor | None,
    ownership: Ownership,
) -> Generator[Tensor, list[float], Step]:
    stack, group = item.stack, item.group
    item.working, item.index = stack.select(item.members)
    records = [state[p] for p in item.parameters]
    memory = math.sqrt(item.rule.beta2)
    for record, peak in zip(records, item.peaks, strict=True):
        # Forgotten as fast as the covariance forgets.
        record["peak"] = max(peak, memory * record["peak"])
        unit = next_unit(record["unit"], peak)
        record["unit"] = float(unit > 0) if stack.dtype == torch.float64 else unit
    divisors = [
        divisor(r["unit"], peak) * (-1.0 if group["maximize"] else 1.0)
        for r, peak in zip(records, item.peaks, strict=True)
    ]
    if stack.dtype == torch.float64:
        divisors = [math.copysign(1.0, d) for d in divisors]
    gradient = stack.gradients(item.members, item.gradients, divisors)
    matrices = records[: item.matrices]
    if matrices:
        mine = [ranks.get(p, global_rank) for p in item.parameters[: len(matrices)]]
        observe(item, mine)
        for record, rank in zip(matrices, mine, strict=True):
            record["observations"] += rank is not None
    members = Members(
        matrices=len(matrices),
        steps=[r["step"] + 1 for r in records],
        metric_steps=[r["step"] + 1 - r.get("metric_start", 0) for r in records],
        root_ages=[
            r["step"] + 1 - r["last_root_step"] if r["last_root_step"] else None for r in matrices
        ],
        units=[r["unit"] for r in records],
        positions=[stack.ordinals[i] for i in item.members[: len(matrices)]],
        shapes=item.shapes,
        limits=limits(item, ownership),
        company=stack.company,
        outgrown=[r["peak"] > OUTGROWN * r["root_peak"] for r in matrices],
        shaped=group["polar_prior"] > 0 or any(r["observations"] for r in matrices),
    )
    return take_step(
        item.working, gradient, item.sizes, stack.layout, stack.backend, members, item.rule
    )


def observe(item: StackWork, ranks: Sequence[Tensor | None]) -> Tensor | None:
    """Let observations move the polar weights of a stack's matrices; which were there, bool (k,)."""
    if all(rank is None for rank in ranks):
        return None
    keys = ("polar_weight", "residual_entropy_rank")
    weight, stored = (item.working[key][: len(ranks)] for key in keys)
    nothing = weight.new_full((), float("nan"))
    rank = torch.stack([nothing if r is None else r.to(weight) for r in ranks])
    beta, release = item.rule.polar_beta, item.rule.polar_release_beta
    moved = update_polar_weight(weight, rank, polar_beta=beta, polar_release_beta=release)
    weight.copy_(moved)
    stored.copy_(torch.where(rank.isnan(), stored, rank))
    return ~rank.isnan()


def limits(item: StackWork, ownership: Ownership) -> Tensor | None:
    """The largest RMS that each member's update may have, (k,); vectors have no bound."""
    group, stack = item.group, item.stack
    share, matrices = group["max_relative_step"], item.parameters[: item.matrices]
    if share is None or not matrices:
        return None
    norms = ownership.weight_norms(matrices).to(stack.device, stack.dtype)
    rate = step_size(group, stack.device, stack.dtype).rate
    found = relative_limit(norms, matrices, float(share), rate)
    if vectors := len(item.members) - len(matrices):
        found = torch.cat([found, found.new_full((vectors,), math.inf)])
    return found


def step_size(group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> StepSize:
    """(1 - lr·g·weight_decay, lr·g): numbers, or 0-d tensors where the rate or the gain is one."""
    rate = group["lr"]
    if group["gain_rate"]:
        rate = rate * group["gain"]
    if isinstance(rate, Tensor):
        rate = rate.reshape(()).to(device=device, dtype=dtype, non_blocking=True)
    return StepSize(1.0 - rate * group["weight_decay"], rate, group["rounding"])


def deliver(item: StackWork, state: Mapping[Tensor, dict[str, Any]], ownership: Ownership) -> None:
    """Write a finished stack's update to the parameters and its counters to their state."""
    stack, step, group = item.stack, item.step, item.group
    assert step is not None
    size = step_size(group, stack.device, stack.dtype)
    stack.write_back(item.working, item.index)
    updates = stack.updates(item.members, step.update)
    ownership.deliver(item.parameters, updates, size, step)
    refreshed = set(step.refreshed)
    for k, parameter in enumerate(item.parameters):
        record = state[parameter]
        record["step"] += 1
        # Roots of a metric that has seen only zero gradients are none: the next step makes them.
        if k in refreshed and record["unit"]:
            record["last_root_step"] = record["step"]
            record["root_peak"] = record["peak"]
            record["root_refreshes"] += 1
    item.gradients, item.working = [], {}


def group_gain(group: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Tensor:
    """The group's gain after a step: it moves with the mean coherence of what could be compared."""
    gain: Tensor = group["gain"]
    if not outcomes:
        return gain
    compared = torch.cat([o.compared.to(gain) for o in outcomes])
    coherence = torch.cat([o.coherence.to(gain) for o in outcomes])
    count = compared.sum()
    moved = next_gain(
        gain,
        (coherence * compared).sum() / count.clamp_min(1),
        rate=group["gain_rate"],
        target=group["target_coherence"],
        low=group["min_gain"],
        high=group["max_gain"],
    )
    return torch.where(count > 0, moved, gain)
