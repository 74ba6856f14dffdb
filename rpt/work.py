"""One stack's part of a step: what the rule works on, opened before it and closed behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .ownership import Live
from .rule.scalars import Scalars, numbers_of
from .rule.schedule import share_of_age
from .rule.update import Facts, Rows, Rule, Step
from .store.schema import COUNTERS, METRIC, VALUES
from .store.stack import Index, Seat, Stack


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
        hosted: whether the host refreshes roots that are due, though recorded (`rpt.compiled`).
        index: their rows, None for all of the stack's.
        lead: whether any is a stack of matrices or vectors of its own.
        alike: whether all have one shape, and rows hold them without padding.
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
    alike: bool
    hosted: bool = False
    # The stack's tensors, or copies of some rows; what of them the rule works on; the counters, which
    # are arrays where the host decides.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rows: Rows | None = None
    counts: dict[str, Scalars] = field(default_factory=dict)
    extents: Scalars = None
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
    failed: Tensor | None = None

    def open(self) -> Rows:
        """What the rule works on."""
        stack, index = self.stack, self.index
        tensors = self.tensors = stack.select(index)
        numbers = numbers_of(stack.dtype, not self.recorded and stack.on_host)
        self.counts = {
            name: tensors[name] if self.recorded else tensors[name].cpu().numpy()
            for name in COUNTERS
            if name in tensors
        }
        # Copies are returned after the step.
        self.own = index is None and (self.recorded or tensors["step"].device.type == "cpu")
        sizes, extents, shapes = stack.sizes, stack.extents[: stack.matrices], stack.true_shapes
        if index is not None:
            sizes, extents = sizes[index.of("all", sizes)], extents[index.of("matrix", extents)]
            shapes = None if shapes is None else shapes[index.of("matrix", shapes)]
        deciding = numbers_of(stack.dtype, not self.recorded)
        self.extents = extents if self.recorded else extents.cpu().numpy()
        self.shares = share_of_age(self.extents, deciding)
        self.rows = Rows(
            momentum=tensors["momentum"],
            frame=tensors["frame"],
            metric={k[len(METRIC) :]: v for k, v in tensors.items() if k.startswith(METRIC)},
            values={name: numbers.read(tensors[name]) for name in VALUES if name in tensors},
            sizes=numbers.read(sizes),
            layout=stack.layout,
            matrices=len(extents),
            shapes=shapes,
            backend=stack.backend,
            numbers=numbers,
        )
        return self.rows

    def close(self) -> None:
        """Return copies to the stack."""
        if not self.recorded:
            for name, value in self.counts.items():
                self.tensors[name].copy_(torch.from_numpy(value))
        if self.index is not None:
            self.stack.write_back(self.tensors, self.index)
        self.rows = None
        self.tensors, self.counts = {}, {}

    def tried(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, whether it failed) of the roots that were decomposed in the step just taken.

        Of roots made of products telemetry alone tells: here the host would wait for them.
        """
        assert self.facts is not None
        assert self.failed is not None
        if self.facts.products:
            return []
        owners = [s.parameter for s in self.seats for _ in range(s.form.pieces)]
        rows, failed = self.due.nonzero()[0], self.failed.cpu()
        return [(owners[row], bad) for row, bad in zip(rows, failed, strict=True)]


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
                lead := any(seat.form.lead for seat in seats),
                not (stack.ragged or lead) and len({s.parameter.shape for s in seats}) == 1,
            )
        )
    return works
