"""Every entry of a parameter's state, once: who has it, of what type, how it begins, who else sees it.

A root backend's own entries come on top, under the prefix `METRIC`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# Prefix of the root backend's entries among a parameter's state.
METRIC = "metric."


@dataclass(frozen=True)
class Entry:
    """One entry.

    Attributes:
        name: its key in `optimizer.state[parameter]`.
        who: which parameters have it.
        kind: "row" has the parameter's shape, "value" is a number that the update rule computes, kept
            on the parameter's device, "counter" one that decisions are made from, kept where decisions
            are made: on the host, or on the device for a capturable optimizer.
        whole: whether it is int64; all others have the working dtype.
        start: its first value.
        missing: its value where an older state has none of it; None: `start`.
        travels: whether every rank keeps it of every parameter, whoever owns the rest.
        telemetry: whether `telemetry()` reports it under this name.
        kept: False for what can be told from the rest: it is in no state and no checkpoint.
    """

    name: str
    who: Literal["all", "matrix", "vector"] = "all"
    kind: Literal["row", "value", "counter"] = "value"
    whole: bool = False
    start: float = 0.0
    missing: float | None = None
    travels: bool = False
    telemetry: bool = False
    kept: bool = True

    def dtype(self, working: torch.dtype) -> torch.dtype:
        """What it is kept in."""
        return torch.int64 if self.whole else working


def _shown(name: str, start: float = 0.0, **options: Any) -> Entry:
    return Entry(name, start=start, travels=True, telemetry=True, **options)


ENTRIES: tuple[Entry, ...] = (
    Entry("momentum", kind="row"),
    Entry("frame", kind="row"),
    # A matrix's starts at `polar_prior`.
    _shown("polar_weight"),
    _shown("residual_entropy_rank", 1.0),
    _shown("frame_confidence", 1.0),
    _shown("frame_coherence", 1.0),
    _shown("axial_closure"),
    _shown("gradient_alignment"),
    _shown("step_signal", 1.0),
    _shown("step_capped"),
    _shown("root_condition", 1.0, who="matrix"),
    _shown("root_failures", who="matrix", whole=True),
    Entry("second_moment", who="vector"),
    # e of the step's length; below zero where it is not known.
    Entry("request_energy", missing=-1.0),
    # Whether a frame is stored: 1 where it is.
    Entry("held", kept=False),
    Entry("step", kind="counter", whole=True, telemetry=True),
    # Steps that brought an observation.
    Entry("observations", kind="counter", whole=True, telemetry=True),
    # Steps skipped for a non-finite gradient.
    Entry("skipped", kind="counter", whole=True, telemetry=True),
    # 0 until the first non-zero gradient. float32 then works in units of a power of two near its largest
    # entry, float64 in ones.
    Entry("unit", kind="counter"),
    # The largest gradient entry in the covariance's memory, and what it was at the last refresh.
    Entry("peak", kind="counter"),
    Entry("root_peak", who="matrix", kind="counter"),
    Entry("last_root_step", who="matrix", kind="counter", whole=True, telemetry=True),
    Entry("root_refreshes", who="matrix", kind="counter", whole=True, telemetry=True),
    # The step before which the metric's statistics, or a vector's second moment, began: 0, or where they
    # started anew.
    Entry("metric_start", kind="counter", whole=True),
)

COUNTERS = {entry.name: entry for entry in ENTRIES if entry.kind == "counter"}
VALUES = tuple(entry.name for entry in ENTRIES if entry.kind == "value")
WHO = {entry.name: entry.who for entry in ENTRIES}
TRAVELLING = tuple(entry.name for entry in ENTRIES if entry.travels)


def holds_state(record: Mapping[str, Any]) -> bool:
    """Whether a parameter's record is its state: on ranks that do not own it, large tensors are empty."""
    momentum = record.get("momentum")
    return isinstance(momentum, Tensor) and momentum.numel() > 0


def counted(record: Mapping[str, Any], working: torch.dtype) -> dict[str, Tensor]:
    """The counters of a record from a checkpoint as tensors, as they are in a stack."""
    return {
        name: torch.tensor(record[name], dtype=entry.dtype(working), device="cpu")
        for name, entry in COUNTERS.items()
        if isinstance(record.get(name), (int, float))
    }


def numbered(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with its counters as plain numbers."""

    def plain(key: str, value: Any) -> Any:
        readable = type(value) is Tensor and value.numel() == 1 and value.device.type != "meta"
        return value.item() if key in COUNTERS and readable else value

    return {key: plain(key, value) for key, value in record.items()}


def saved(record: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state as a checkpoint holds it: plain numbers, and tensors of their own.

    In `optimizer.state` they are views of whole stacks, which a file would store with each of them.
    """
    found = numbered(record)
    for key, value in found.items():
        if isinstance(value, Tensor):
            found[key] = value.detach().clone(memory_format=torch.contiguous_format)
    return found
