"""Runs as JSON lines, so that an interrupted example goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["RunLog"]


class RunLog:
    """A file of records, one a line, each found again by its "key".

    Args:
        path: the file; it and its folder are made when needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.known: dict[str, dict[str, Any]] = {r["key"]: r for r in map(json.loads, lines)}

    def get(self, key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record under `key`; where there is none, `run()` is called and its record written."""
        if key not in self.known:
            self.known[key] = {"key": key, **run()}
            with self.path.open("a") as stream:
                stream.write(json.dumps(self.known[key]) + "\n")
        return self.known[key]
