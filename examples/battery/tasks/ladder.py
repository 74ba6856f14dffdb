"""Character GPTs of four sizes, each at twenty characters a parameter; the smallest at a hundred too."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from rpt.demo.model import LanguageModel
from rpt.demo.text import VOCABULARY_SIZE, encode

from ..task import Problem, Task
from .text import language_problem

CONTEXT, CHARACTERS = 64, 24_000_000


@dataclass(frozen=True)
class Rung:
    """One size.

    Attributes:
        width, layers: of the GPT.
        batch: windows of 64 characters a step; grows about as the root of all characters.
        ratio: characters a parameter.
    """

    width: int
    layers: int
    batch: int
    ratio: int = 20

    @property
    def parameters(self) -> int:
        width, hidden = self.width, 12 * self.width**2 + 2 * self.width
        return 2 * VOCABULARY_SIZE * width + CONTEXT * width + self.layers * hidden + width

    @property
    def steps(self) -> int:
        return round(self.ratio * self.parameters / (self.batch * CONTEXT))


RUNGS = {
    "ladder_005": Rung(40, 2, 16),
    "ladder_012": Rung(56, 3, 24),
    "ladder_030": Rung(76, 4, 40),
    "ladder_075": Rung(108, 5, 64),
    "ladder_005_long": Rung(40, 2, 16, 100),
}


@lru_cache
def library() -> tuple[Tensor, Tensor]:
    """(train, held out) codes of all of the standard library, its packages too; every tenth file apart.

    No run sees more than the first 24 million characters, most of them once.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    parts: tuple[list[str], list[str]] = ([], [])
    total = 0
    for index, path in enumerate(paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts[index % 10 == 9].append(text)
        total += len(text)
        if total >= CHARACTERS:
            break
    train, held_out = (encode("".join(part)) for part in parts)
    return train, held_out


def _build(seed: int, *, width: int, layers: int, batch: int) -> Problem:
    torch.manual_seed(seed)
    return language_problem(
        seed, lambda: LanguageModel(VOCABULARY_SIZE, CONTEXT, width, layers), library(), batch, CONTEXT,
        held_out_windows=256,
    )  # fmt: skip


TASKS = [
    Task(
        name, "ladder", partial(_build, width=rung.width, layers=rung.layers, batch=rung.batch),
        rung.steps, evaluations=40,
    )
    for name, rung in RUNGS.items()
]  # fmt: skip
