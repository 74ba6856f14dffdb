"""What happened in the last step, per parameter and in sum: read on request, never in the hot path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from .store.schema import COUNTERS

if TYPE_CHECKING:
    from .optimizer import ResidualPolarTransport

__all__ = ["ParameterTelemetry", "Telemetry", "gather_telemetry"]


_COUNTERS = tuple(name for name, entry in COUNTERS.items() if entry.telemetry)


@dataclass(frozen=True)
class ParameterTelemetry:
    """One parameter after its last step; all plain numbers.

    Attributes:
        name: its name, or its group, position and shape.
        step: updates it received.
        residual_entropy_rank: last observed rank r; 1 before any observation, None for vectors.
        polar_weight: α; None for vectors, which have none.
        frame_coherence: q, cosine between the last two live requests.
        frame_confidence: ρ, the share of carried momentum.
        axial_closure: ρ β1 |‖P‖ - ⟨m̂,h⟩| / ‖P‖ of the last step.
        gradient_alignment: cosine of the applied update with the gradient.
        step_signal: s, how far the step's length was moved by agreement between requests: 1 in noise.
        step_capped: whether `max_relative_step` shortened it.
        root_age: steps since its roots were recomputed; 0 for vectors.
        root_refreshes: how often they were.
        root_condition: largest over smallest eigenvalue of the metric at that time; an upper bound of it
            from a capturable optimizer.
        root_failures: decompositions that failed and left the previous root.
        observations: steps that brought an observation.
        skipped: steps skipped for a non-finite gradient.
        state_bytes: bytes of optimizer state: its part of what is held for it, padding included.
    """

    name: str
    step: int
    residual_entropy_rank: float | None
    polar_weight: float | None
    frame_coherence: float
    frame_confidence: float
    axial_closure: float
    gradient_alignment: float
    step_signal: float
    step_capped: bool
    root_age: int
    root_refreshes: int
    root_condition: float
    root_failures: int
    observations: int
    skipped: int
    state_bytes: int


class Telemetry(dict[str, Any]):
    """Plain Python: {"parameters": {name: {...}}, "total": {...}}; `str()` of it is a table.

    A vector has neither rank nor polar weight: its entry lacks them, and no mean counts them.
    """

    _COLUMNS = (
        ("step", "step", "d", "updates received"),
        ("rank", "residual_entropy_rank", ".3f", "last observed entropy rank, 1 if none was"),
        ("polar", "polar_weight", ".3f", "share of the polar factor in the update"),
        ("q", "frame_coherence", "+.3f", "cosine between the last two requests"),
        ("signal", "step_signal", ".2f", "length of the step over what noise alone would give"),
        ("age", "root_age", "d", "steps since the roots were recomputed"),
        ("refresh", "root_refreshes", "d", "how often they were"),
        (
            "condition",
            "root_condition",
            ".1e",
            "largest over smallest eigenvalue of the metric then",
        ),
        ("failed", "root_failures", "d", "decompositions that failed and left the old root"),
        ("skipped", "skipped", "d", "steps left out for a gradient that was not finite"),
    )
    _OF_MATRICES = (
        *("residual_entropy_rank", "polar_weight"),
        *("root_age", "root_refreshes", "root_condition", "root_failures"),
    )

    def __str__(self) -> str:
        width = max([len(name) for name in self["parameters"]] + [len("parameter")])
        head = f"{'parameter':{width}}" + "".join(f"{label:>10}" for label, *_ in self._COLUMNS)
        lines = [head, "-" * len(head)]
        for name, entry in self["parameters"].items():
            vector = "polar_weight" not in entry
            cells = [
                "–" if vector and key in self._OF_MATRICES else format(entry[key], form)
                for _, key, form, _ in self._COLUMNS
            ]
            lines.append(f"{name:{width}}" + "".join(f"{cell:>10}" for cell in cells))
        total = self["total"]
        lines.append("-" * len(head))
        lines += [f"{label:>10}  {meaning}" for label, _, _, meaning in self._COLUMNS]
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
        sides = {"total": self["total"], **self["parameters"]}
        return {
            f"{_without_shape(name)}/{key}": float(value)
            for name, entry in sides.items()
            for key, value in entry.items()
        }


def _without_shape(name: str) -> str:
    return name if name.startswith("parameter ") else name.partition(" (")[0]


def gather_telemetry(optimizer: ResidualPolarTransport) -> Telemetry:
    """Read the state of every parameter that has one, with one transfer per stack and quantity."""
    entries = list(_entries(optimizer))
    matrices = [e for e in entries if e.polar_weight is not None]
    parameters = {
        entry.name: {k: v for k, v in asdict(entry).items() if k != "name" and v is not None}
        for entry in entries
    }
    total = {
        "parameters": len(entries),
        "state_bytes": sum(e.state_bytes for e in entries),
        "polar_weight": _mean([e.polar_weight for e in entries], 0.0),
        "residual_entropy_rank": _mean([e.residual_entropy_rank for e in entries], 1.0),
        "turn": _mean([0.5 * (1.0 - e.frame_coherence) for e in entries], 0.0),
        "history_alignment": _mean([e.gradient_alignment for e in entries], 1.0),
        "frame_coherence": _mean([e.frame_coherence for e in entries], 1.0),
        "frame_confidence": _mean([e.frame_confidence for e in entries], 1.0),
        "axial_closure": _mean([e.axial_closure for e in entries], 0.0),
        "step_signal": _mean([e.step_signal for e in entries], 1.0),
        "step_capped": sum(e.step_capped for e in entries),
        "root_condition": _mean([e.root_condition for e in matrices], 1.0),
        "root_refresh_fraction": _mean([float(e.root_age == 0) for e in matrices], 0.0),
        "root_age": _mean([float(e.root_age) for e in matrices], 0.0),
        "root_refreshes": sum(e.root_refreshes for e in entries),
        "root_failures": sum(e.root_failures for e in entries),
        "observations": sum(e.observations for e in entries),
        "skipped": sum(e.skipped for e in entries),
        "gain": _mean([float(group["gain"]) for group in optimizer.param_groups], 1.0),
    }
    return Telemetry(parameters=parameters, total=total)


def _entries(optimizer: ResidualPolarTransport) -> Iterator[ParameterTelemetry]:
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            record = optimizer.state.get(parameter)
            if not record:
                continue
            # On the device where the optimizer is capturable.
            counts = {key: int(_number(record, key, 0)) for key in _COUNTERS}
            is_matrix = "root_refreshes" in record
            age = counts["step"] - counts["last_root_step"]
            yield ParameterTelemetry(
                name=optimizer.parameter_name(g, i),
                step=counts["step"],
                residual_entropy_rank=_number(record, "residual_entropy_rank", 1.0)
                if is_matrix
                else None,
                polar_weight=_number(record, "polar_weight", 0.0) if is_matrix else None,
                frame_coherence=_number(record, "frame_coherence", 1.0),
                frame_confidence=_number(record, "frame_confidence", 1.0),
                axial_closure=_number(record, "axial_closure", 0.0),
                gradient_alignment=_number(record, "gradient_alignment", 0.0),
                step_signal=_number(record, "step_signal", 1.0),
                step_capped=_number(record, "step_capped", 0.0) > 0,
                root_age=age if counts["last_root_step"] else 0,
                root_refreshes=counts["root_refreshes"],
                root_condition=_number(record, "root_condition", 1.0),
                root_failures=int(_number(record, "root_failures", 0.0)),
                observations=counts["observations"],
                skipped=counts["skipped"],
                state_bytes=optimizer._registry.nbytes(parameter) or _bytes(record),
            )


def _number(record: dict[str, Any], key: str, default: float) -> float:
    # Telemetry is asked for by a person or a logger: this is where the host waits.
    value = record.get(key, default)
    if isinstance(value, torch.Tensor):  # of a stack of matrices, their mean
        value = value.double().mean()
    value = float(value)
    return value if math.isfinite(value) else default


def _bytes(record: dict[str, Any]) -> int:
    tensors = (v for v in record.values() if isinstance(v, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)


def _mean(values: list[float | None], empty: float) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else empty
