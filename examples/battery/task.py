"""What a task is: a model, its batches, its loss, its held-out measure, and its budget."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Problem", "Task", "classification", "minibatches", "regression"]

Batch = tuple[Tensor, ...]


@dataclass
class Problem:
    """One task built from one seed. Every optimizer gets an identical one.

    Attributes:
        model: freshly initialised.
        batches: endless; drawn from a generator of its own.
        loss: training loss of the model on a batch, 0-d.
        measure: held-out "loss", and "accuracy" for classifiers.
    """

    model: nn.Module
    batches: Iterator[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    measure: Callable[[nn.Module], dict[str, float]]


@dataclass(frozen=True)
class Task:
    """A named problem and the budget that all optimizers share.

    Attributes:
        name, group: identification; `group` gathers like tasks in the report.
        build: seed → problem.
        steps: optimizer steps.
        schedule: "cosine" (to zero) or "constant", after `warm_up` (a share of the steps).
        clip: cap of the gradient norm.
        weight_decay: decoupled, for the optimizers that have it.
        evaluations: held-out measurements, evenly spread.
        tail: how many of the last of them the final loss averages.
        revision: to be raised when code that `build` calls changes what is trained.
    """

    name: str
    group: str
    build: Callable[[int], Problem]
    steps: int
    schedule: str = "cosine"
    warm_up: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.01
    evaluations: int = 20
    tail: int = 1
    revision: int = 1

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at `step` = 0, 1, …, steps-1."""
        warm = math.ceil(self.warm_up * self.steps)
        if step < warm:
            return (step + 1) / warm
        if self.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    @cached_property
    def version(self) -> str:
        """Changes when the task's builder, its budget or its revision does."""
        build, given = self.build, ""
        if isinstance(build, partial):
            given = "".join(inspect.getsource(a) for a in build.args) + repr(build.keywords)
            build = build.func
        budget = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "build"]
        code = f"{inspect.getsource(build)}{given}{budget}"
        return hashlib.sha256(code.encode()).hexdigest()[:8]


def minibatches(seed: int, size: int, *tensors: Tensor) -> Iterator[Batch]:
    """Epochs of shuffled rows, without the ragged end of each."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    rows = len(tensors[0])
    size = min(size, rows)
    while True:
        order = torch.randperm(rows, generator=generator)
        for start in range(0, rows - size + 1, size):
            chosen = order[start : start + size]
            yield tuple(t[chosen] for t in tensors)


def _supervised(
    seed: int,
    model: Callable[[], nn.Module],
    train: Batch,
    held_out: Batch,
    batch: int,
    criterion: Callable[[Tensor, Tensor], Tensor],
    classes: bool,
) -> Problem:
    torch.manual_seed(seed)
    made = model()

    def loss(net: nn.Module, rows: Batch) -> Tensor:
        return criterion(net(rows[0]), rows[1])

    def measure(net: nn.Module) -> dict[str, float]:
        output = net(held_out[0])
        found = {"loss": criterion(output, held_out[1]).item()}
        if classes:
            found["accuracy"] = (output.argmax(-1) == held_out[1]).float().mean().item()
        return found

    return Problem(made, minibatches(seed, batch, *train), loss, measure)


def classification(
    seed: int, model: Callable[[], nn.Module], train: Batch, held_out: Batch, batch: int
) -> Problem:
    """Cross-entropy in nats on (inputs, class indices)."""
    return _supervised(seed, model, train, held_out, batch, functional.cross_entropy, True)


def regression(
    seed: int, model: Callable[[], nn.Module], train: Batch, held_out: Batch, batch: int
) -> Problem:
    """Mean squared error on (inputs, targets)."""
    return _supervised(seed, model, train, held_out, batch, functional.mse_loss, False)


def split(x: Tensor, y: Tensor, seed: int, share: float = 0.75) -> tuple[Batch, Batch]:
    """Rows into (train, held out) at random."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(20_000 + seed))
    cut = int(share * len(x))
    return (x[order[:cut]], y[order[:cut]]), (x[order[cut:]], y[order[cut:]])


def standardised(x: Tensor, like: Any) -> Tensor:
    """Columns of `x` with the mean and standard deviation that the columns of `like` have."""
    return (x - like.mean(0)) / like.std(0).clamp_min(1e-6)
