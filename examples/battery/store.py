"""Results as JSON lines: one run a line, keyed by everything that determines it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .peers import PEERS
from .tasks import TASKS

__all__ = ["Config", "Store"]


@dataclass(frozen=True)
class Config:
    """One run.

    Attributes:
        task, optimizer, rate, seed: what is trained, and how.
        share: of the task's steps, with the schedule shortened to them.
        rest: multiplies the rate of what AdamW trains beside a peer that takes only some parameters.
    """

    task: str
    optimizer: str
    rate: float
    seed: int
    share: float = 1.0
    rest: float = 1.0

    @property
    def version(self) -> str:
        """Of the task's code and the optimizer's configuration: older results are not reused."""
        return f"{TASKS[self.task].version}-{PEERS[self.optimizer].version}"

    @property
    def key(self) -> str:
        key = f"{self.task}|{self.optimizer}|{self.rate:g}|{self.seed}|{self.version}"
        if self.share != 1.0:
            key = f"{key}|{self.share:g}"
        return key if self.rest == 1.0 else f"{key}|rest {self.rest:g}"


class Store:
    """The runs of one file. Later lines win; lines cut short by an interruption are ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = {record["key"]: record for record in _lines(path)}
        self._costs = {line["key"]: line["cost"] for line in _lines(self._costs_path)}

    def __contains__(self, config: Config) -> bool:
        return config.key in self._records

    def get(self, config: Config) -> dict[str, Any] | None:
        return self._records.get(config.key)

    def add(self, record: dict[str, Any]) -> None:
        self._records[record["key"]] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def cost(self, config: Config) -> float | None:
        """CPU seconds of a run over those of AdamW's, measured in turns (`costs`); None if they were not."""
        return self._costs.get(self._cost_key(config))

    def add_cost(self, config: Config, ratio: float) -> None:
        key = self._cost_key(config)
        self._costs[key] = ratio
        with self._costs_path.open("a") as file:
            file.write(json.dumps({"key": key, "cost": ratio}) + "\n")

    @staticmethod
    def _cost_key(config: Config) -> str:
        """Neither the rate nor the seed changes what a step costs."""
        return f"{config.task}|{config.optimizer}|{config.version}|{config.share:g}"

    @property
    def _costs_path(self) -> Path:
        return self.path.with_name("costs.jsonl")

    def current(self) -> Iterator[dict[str, Any]]:
        """Records whose code is today's."""
        for record in self._records.values():
            if record["task"] in TASKS and record["optimizer"] in PEERS:
                names = ("task", "optimizer", "rate", "seed")
                more = (record.get("share", 1.0), record.get("rest", 1.0))
                config = Config(*(record[n] for n in names), *more)
                if config.key == record["key"]:
                    yield record


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
