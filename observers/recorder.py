"""Histories of an optimizer's observation, one JSON line per recorded step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from torch import Tensor

__all__ = ["Recorder", "read_records"]

KEPT = (
    "residual_entropy_rank",
    "polar_weight",
    "frame_coherence",
    "root_age",
    "root_refreshes",
    "observations",
)


class HasTelemetry(Protocol):
    """An optimizer that can say what happened in its last step."""

    def telemetry(self) -> Any: ...


class Recorder:
    """Appends to a JSON-lines file what `optimizer.telemetry()` says of every matrix.

        with Recorder("run.jsonl", every=10) as recorder:
            for batch in loader:
                ...
                optimizer.step()
                recorder.record(optimizer, loss=loss)

    Each line holds `step`, `seconds` since the recorder was made, the keyword values given, and
    under `parameters` per name the entropy rank, polar weight, frame coherence, root age, number of
    root refreshes, and number of observed steps.

    Args:
        path: The file; created, or appended to.
        every: Read the telemetry at every n-th call of `record` (reading it waits for the device);
            the other calls only count.

    Raises:
        ValueError: For an `every` below 1.
        OSError: For a file that cannot be opened.

    Example:
        >>> import os, rpt, torch
        >>> from rpt.observers import Recorder
        >>> optimizer = rpt.RPT([torch.nn.Parameter(torch.ones(2, 3))])
        >>> with Recorder(os.devnull) as recorder:
        ...     recorder.record(optimizer, loss=0.5)
        True
    """

    def __init__(self, path: str | Path, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.every = every
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._start = time.perf_counter()
        self._calls = 0

    def record(self, optimizer: HasTelemetry, **values: float | Tensor) -> bool:
        """Note one step, after `optimizer.step()`; whether this call wrote a line."""
        self._calls += 1
        if (self._calls - 1) % self.every:
            return False
        entries = optimizer.telemetry()["parameters"]
        line = {
            "step": max((entry["step"] for entry in entries.values()), default=self._calls),
            "seconds": round(time.perf_counter() - self._start, 3),
            **{key: _plain(float(value)) for key, value in values.items()},
            "parameters": {
                name: {key: _plain(entry[key]) for key in KEPT if key in entry}
                for name, entry in entries.items()
                # Vectors have neither roots nor ranks.
                if entry.get("root_refreshes", 0) or entry.get("observations", 0)
            },
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        return True

    def close(self) -> None:
        """Close the file; closing twice is no error."""
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a recorded file.

    Raises:
        ValueError: For a line that is no record, by its number.
        OSError: For a file that cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
                record["step"], record["parameters"].items()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a line that Recorder writes"
                ) from error
            yield record
