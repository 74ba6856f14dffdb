"""What happened in the last step, per parameter and in sum: read on request, never in the hot path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .store.schema import ENTRIES

_SHOWN = {entry.name: entry for entry in ENTRIES if entry.telemetry}
_OF_MATRICES = (
    *("residual_entropy_rank", "polar_weight"),
    *("root_age", "root_refreshes", "root_condition", "root_failures"),
)
_SUMMED = (
    *("state_bytes", "step_capped", "root_refreshes", "root_failures", "observations", "skipped"),
)
_AVERAGED = (
    *("polar_weight", "residual_entropy_rank", "frame_coherence", "frame_confidence"),
    *("axial_closure", "step_signal", "root_condition", "root_age"),
)
_COLUMNS = (
    ("step", "step", "d", "updates received"),
    ("rank", "residual_entropy_rank", ".3f", "last observed entropy rank, 1 if none was"),
    ("polar", "polar_weight", ".3f", "share of the polar factor in the update"),
    ("q", "frame_coherence", "+.3f", "cosine between the last two requests"),
    ("signal", "step_signal", ".2f", "length of the step over what noise alone would give"),
    ("age", "root_age", "d", "steps since the roots were recomputed"),
    ("refresh", "root_refreshes", "d", "how often they were"),
    ("condition", "root_condition", ".1e", "largest over smallest eigenvalue of the metric then"),
    ("failed", "root_failures", "d", "decompositions that failed and left the old root"),
    ("skipped", "skipped", "d", "steps left out for a gradient that was not finite"),
)


class Telemetry(dict[str, Any]):
    """Plain Python: {"parameters": {name: {...}}, "total": {...}}; `str()` of it is a table.

    Beside what the table explains, a parameter has `frame_confidence` ρ, the share of carried momentum;
    `axial_closure`, ρ β1 |‖P‖ - ⟨m̂,h⟩| / ‖P‖; `gradient_alignment`, the cosine of the update with the
    gradient; `step_capped`, whether `max_relative_step` shortened the step; `observations`, the steps
    that brought one; and `state_bytes`, its part of what is held, padding included. A vector has neither
    rank nor polar weight: its entry lacks them, and no mean counts them. A capturable optimizer's
    `root_condition` is an upper bound.
    """

    def __str__(self) -> str:
        width = max([len(name) for name in self["parameters"]] + [len("parameter")])
        head = f"{'parameter':{width}}" + "".join(f"{label:>10}" for label, *_ in _COLUMNS)
        lines = [head, "-" * len(head)]
        for name, entry in self["parameters"].items():
            vector = "polar_weight" not in entry
            cells = [
                "–" if vector and key in _OF_MATRICES else format(entry[key], form)
                for _, key, form, _ in _COLUMNS
            ]
            lines.append(f"{name:{width}}" + "".join(f"{cell:>10}" for cell in cells))
        total = self["total"]
        lines.append("-" * len(head))
        lines += [f"{label:>10}  {meaning}" for label, _, _, meaning in _COLUMNS]
        lines.append(
            f"{total['parameters']} parameters, {total['state_bytes'] / 2**20:.2f} MiB of state; "
            f"mean polar weight {total['polar_weight']:.3f}, rank {total['residual_entropy_rank']:.3f}"
            f", coherence {total['frame_coherence']:+.3f}; {total['root_failures']} failed roots, "
            f"{total['skipped']} skipped updates"
        )
        return "\n".join(lines)

    def scalars(self) -> dict[str, float]:
        """All numbers in one flat dict, as loggers take them.

        Returns:
            "total/polar_weight" and so on, then "0.weight/polar_weight" per parameter, by its name
            without the shape.
        """
        flat = {f"total/{key}": float(value) for key, value in self["total"].items()}
        for name, entry in self["parameters"].items():
            short = name if name.startswith("parameter ") else name.partition(" (")[0]
            flat |= {f"{short}/{key}": float(value) for key, value in entry.items()}
        return flat


def gather_telemetry(optimizer: Any) -> Telemetry:
    """Read the state of every parameter that has one."""
    parameters = {}
    for g, i, parameter in optimizer._enumerate():
        if record := optimizer.state.get(parameter):
            entry = _entry(record)
            entry["state_bytes"] = optimizer._stacks.registry.nbytes(parameter) or sum(
                v.nbytes for v in record.values() if isinstance(v, torch.Tensor)
            )
            parameters[optimizer.parameter_name(g, i)] = entry
    entries = list(parameters.values())
    matrices = [entry for entry in entries if "polar_weight" in entry]
    total: dict[str, Any] = {"parameters": len(entries)}
    total |= {key: sum(entry[key] for entry in entries) for key in _SUMMED}
    for key in _AVERAGED:
        start = _SHOWN[key].start if key in _SHOWN else 0.0
        total[key] = _mean([e[key] for e in (matrices if key in _OF_MATRICES else entries)], start)
    total |= {
        "turn": 0.5 * (1.0 - total["frame_coherence"]),
        "history_alignment": _mean([entry["gradient_alignment"] for entry in entries], 1.0),
        "root_refresh_fraction": _mean([float(entry["root_age"] == 0) for entry in matrices], 0.0),
        "gain": _mean([float(group["gain"]) for group in optimizer.param_groups], 1.0),
    }
    return Telemetry(parameters=parameters, total=total)


def _entry(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the schema shows of a parameter's state, as plain numbers."""
    shown: dict[str, Any] = {
        name: (int if entry.whole else float)(_number(record.get(name, entry.start), entry.start))
        for name, entry in _SHOWN.items()
    }
    refreshed = shown.pop("last_root_step")
    shown["root_age"] = shown["step"] - refreshed if refreshed else 0
    shown["step_capped"] = shown["step_capped"] > 0
    if "root_refreshes" not in record:  # a vector
        del shown["residual_entropy_rank"], shown["polar_weight"]
    return shown


def _number(value: Any, default: float) -> float:
    # Telemetry is asked for by a person or a logger: this is where the host waits.
    if isinstance(value, torch.Tensor):  # of a stack of matrices, their mean
        value = value.double().mean()
    value = float(value)
    return value if math.isfinite(value) else default


def _mean(values: list[float], empty: float) -> float:
    return sum(values) / len(values) if values else empty
