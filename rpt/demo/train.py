"""One training run: model, optimizer, schedule, batches, history, and its checkpoint."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .model import BLOCKS, LanguageModel
from .text import VOCABULARY_SIZE, Corpus, load_corpus

__all__ = ["Batches", "History", "OptimizerFactory", "Run", "TrainConfig", "train"]

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class TrainConfig:
    """What a run is, but for its optimizer. Lengths in characters, rates come from the optimizer.

    Raises:
        ValueError: naming the field, for a value that cannot be trained with.
    """

    block: str = "plain"
    width: int = 96
    layers: int = 3
    heads: int = 4
    context: int = 64
    batch: int = 32
    steps: int = 300
    schedule: str = "cosine"
    seed: int = 0
    eval_every: int = 20
    eval_batches: int = 8
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "context", "batch", "steps", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.eval_batches < 1:
            raise ValueError(f"eval_batches must be at least 1, got {self.eval_batches}")
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width, got heads {self.heads} and width {self.width}"
            )
        if self.block not in BLOCKS:
            raise ValueError(f"block must be one of {', '.join(BLOCKS)}, got {self.block!r}")
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")


@dataclass
class History:
    """What a run measured: one entry per evaluation, in plain numbers.

    Attributes:
        step: optimizer steps taken so far.
        seconds: wall time of those steps, evaluations not counted.
        train_loss: loss of the last batch (nats per character); NaN before the first step.
        validation_loss: mean over the fixed validation windows (nats per character).
        polar_weight, entropy_rank: per matrix by parameter name, where the optimizer keeps them;
            NaN before the first step, and for ranks of matrices that no observation has reached.
    """

    step: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    polar_weight: dict[str, list[float]] = field(default_factory=dict)
    entropy_rank: dict[str, list[float]] = field(default_factory=dict)

    def first_at_or_below(self, loss: float) -> tuple[int, float] | None:
        """Steps and seconds at the first evaluation whose validation loss is at most `loss`."""
        for step, seconds, value in zip(self.step, self.seconds, self.validation_loss, strict=True):
            if value <= loss:
                return step, seconds
        return None


class Batches:
    """Random windows of the training text, from a generator of their own; resumable."""

    def __init__(self, corpus: Corpus, config: TrainConfig) -> None:
        if len(corpus.train) <= config.context + 1:
            raise ValueError(
                f"context {config.context} is longer than the text of {len(corpus.train)}"
            )
        self._text = corpus.train
        self._context = config.context
        self._batch = config.batch
        self._device = config.device
        self._generator = torch.Generator().manual_seed(config.seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Codes and the codes that follow them, both int64 (batch, context)."""
        starts = torch.randint(
            len(self._text) - self._context, (self._batch,), generator=self._generator
        )
        return _windows(self._text, starts, self._context, self._device)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


def _windows(text: Tensor, starts: Tensor, context: int, device: str) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(context + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


def _plain_number(value: object) -> float:
    if value is None:
        return math.nan
    # Telemetry for the curves, read at evaluations only.
    return float(value.item() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]


class Run:
    """One arm: its own model (initialised from `config.seed`), optimizer, schedule and history.

    Args:
        config: see `TrainConfig`.
        optimizer_factory: gets the model, returns its optimizer; attach observers here.
        corpus: the text.
    """

    def __init__(
        self, config: TrainConfig, optimizer_factory: OptimizerFactory, corpus: Corpus
    ) -> None:
        self.config = config
        torch.manual_seed(config.seed)
        self.model = LanguageModel(
            VOCABULARY_SIZE,
            config.context,
            config.width,
            config.layers,
            config.heads,
            config.block,
        ).to(config.device)
        self.optimizer = optimizer_factory(self.model)
        self.schedule = (
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=config.steps)
            if config.schedule == "cosine"
            else torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0, total_iters=0)
        )
        self.history = History()
        self.steps_taken = 0
        self.seconds = 0.0
        self._last_loss: Tensor | None = None
        windows = config.batch * config.eval_batches
        last_start = len(corpus.validation) - config.context - 1
        if last_start < 0:
            raise ValueError(
                f"context {config.context} is longer than the held-out text of "
                f"{len(corpus.validation)}"
            )
        starts = torch.linspace(0, last_start, windows, dtype=torch.float64).long()
        self._held_out = [
            _windows(corpus.validation, part, config.context, config.device)
            for part in starts.split(config.batch)
        ]

    def train_step(self, codes: Tensor, targets: Tensor) -> None:
        """Take one optimizer step on one batch and time it."""
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(codes, targets)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        if self.config.device != "cpu":
            torch.cuda.synchronize()  # else the clock would measure the launch alone
        self.seconds += time.perf_counter() - started
        self.steps_taken += 1
        self._last_loss = loss.detach()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Append one entry to the history and return the validation loss."""
        self.model.eval()
        losses = [self.model.loss(codes, targets) for codes, targets in self._held_out]
        self.model.train()
        history = self.history
        history.step.append(self.steps_taken)
        history.seconds.append(self.seconds)
        history.train_loss.append(_plain_number(self._last_loss))
        history.validation_loss.append(float(torch.stack(losses).mean()))
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            if parameter.ndim < 2 or "polar_weight" not in state:
                continue
            observed = state.get("observations", 0) > 0
            rank = state.get("residual_entropy_rank") if observed else None
            for curves, value in (
                (history.polar_weight, state["polar_weight"]),
                (history.entropy_rank, rank),
            ):
                missing = len(history.step) - 1 - len(curves.setdefault(name, []))
                curves[name] += [math.nan] * missing + [_plain_number(value)]
        return history.validation_loss[-1]

    @property
    def due(self) -> bool:
        """Whether the history lacks an evaluation that belongs to the steps taken so far."""
        at = self.steps_taken
        wanted = at % self.config.eval_every == 0 or at == self.config.steps
        return wanted and (not self.history.step or self.history.step[-1] != at)

    @property
    def finished(self) -> bool:
        return self.steps_taken >= self.config.steps

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on; loads with `torch.load(weights_only=True)`."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "history": dataclasses.asdict(self.history),
            "steps_taken": self.steps_taken,
            "seconds": self.seconds,
            "last_loss": _plain_number(self._last_loss),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.history = History(**state["history"])
        self.steps_taken = state["steps_taken"]
        self.seconds = state["seconds"]
        self._last_loss = torch.tensor(state["last_loss"])


def train(
    config: TrainConfig,
    optimizer_factory: OptimizerFactory,
    corpus: Corpus | None = None,
    on_step: Callable[[Run], None] | None = None,
) -> History:
    """Train one model from scratch and return what was measured.

    Runs with equal `config` see the same initialisation and the same batches, whatever their
    optimizers.

    Args:
        config: see `TrainConfig`.
        optimizer_factory: gets the model, returns its optimizer; attach observers here.
        corpus: the text; the standard library's when None.
        on_step: called after every step and its evaluation, for progress bars.
    """
    corpus = load_corpus() if corpus is None else corpus
    run = Run(config, optimizer_factory, corpus)
    batches = Batches(corpus, config)
    run.evaluate()
    while not run.finished:
        run.train_step(*batches.next())
        if run.due:
            run.evaluate()
        if on_step is not None:
            on_step(run)
    return run.history
