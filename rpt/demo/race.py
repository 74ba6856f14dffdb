"""Several runs in lockstep on the same batches, with progress bars and a resumable checkpoint."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .text import Corpus
from .train import Batches, OptimizerFactory, Run, TrainConfig

__all__ = ["CheckpointError", "Race", "read_checkpoint", "write_atomically"]

FORMAT = "rpt-demo-1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be continued; the message says why."""


def write_atomically(path: Path, payload: Mapping[str, Any]) -> None:
    """Save so that `path` holds either the old or the new content, whatever interrupts it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(dict(payload), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `Race.save` wrote.

    Raises:
        CheckpointError: missing, unreadable, or not such a file.
    """
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except Exception:  # unpickling raises nearly anything on a damaged file
        raise CheckpointError(f"{path} is not a readable checkpoint") from None
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this demonstration")
    return payload


@dataclass
class _Stop:
    requested: bool = False


class Race:
    """Arms that train on the same batches from the same initialisation, step by step in turn.

    In turn, so that whatever else the machine does slows all of them alike.

    Args:
        config: shared by all arms.
        factories: optimizer factory per arm, by name.
        corpus: the text.
        settings: plain values saved with the checkpoint and returned by `read_checkpoint`.
    """

    def __init__(
        self,
        config: TrainConfig,
        factories: Mapping[str, OptimizerFactory],
        corpus: Corpus,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.settings = dict(settings or {})
        self.runs = {name: Run(config, factory, corpus) for name, factory in factories.items()}
        self.batches = Batches(corpus, config)

    @property
    def steps_taken(self) -> int:
        return next(iter(self.runs.values())).steps_taken

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs.values())

    def step(self) -> None:
        """One step of every arm on one batch, and the evaluations that are due."""
        batch = self.batches.next()
        for run in self.runs.values():
            run.train_step(*batch)
            if run.due:
                run.evaluate()

    def go(
        self,
        on_step: Callable[[Race], None] | None = None,
        save_to: Path | None = None,
        save_every: int = 50,
    ) -> bool:
        """Train to the end, or to the first interrupt signal if there is a file to save to.

        Returns:
            True at the end; False when interrupted, with the checkpoint written.
        """
        stop = _Stop()
        previous = _catch_interrupts(stop) if save_to is not None else {}
        try:
            for run in self.runs.values():
                if run.due:
                    run.evaluate()
            while not self.finished and not stop.requested:
                self.step()
                if on_step is not None:
                    on_step(self)
                if save_to is not None and self.steps_taken % save_every == 0:
                    self.save(save_to)
            if save_to is not None:
                self.save(save_to)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self.finished

    def save(self, path: Path) -> None:
        """Write everything the next step depends on, atomically."""
        payload = {
            "format": FORMAT,
            "settings": self.settings,
            "torch": str(torch.__version__),
            "text": self.corpus.fingerprint,
            "random": torch.get_rng_state(),
            "batches": self.batches.state_dict(),
            "runs": {name: run.state_dict() for name, run in self.runs.items()},
        }
        write_atomically(path, payload)

    def load(self, payload: Mapping[str, Any]) -> None:
        """Continue from what `read_checkpoint` returned.

        Raises:
            CheckpointError: the checkpoint saw another text or holds other arms.
        """
        if payload["text"] != self.corpus.fingerprint:
            raise CheckpointError(
                "the checkpoint was trained on another Python's standard library; "
                "resume with the Python version that wrote it"
            )
        if set(payload["runs"]) != set(self.runs):
            raise CheckpointError(
                f"the checkpoint holds {', '.join(sorted(payload['runs']))}; "
                f"this race runs {', '.join(sorted(self.runs))}"
            )
        for name, run in self.runs.items():
            run.load_state_dict(payload["runs"][name])
        self.batches.load_state_dict(payload["batches"])
        torch.set_rng_state(payload["random"])


def _catch_interrupts(stop: _Stop) -> dict[int, Any]:
    """Let the first SIGINT or SIGTERM end the loop after its step, a second one at once."""
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    for number in (signal.SIGINT, signal.SIGTERM):
        # Python allows handlers in the main thread only; elsewhere interrupts stay as they are.
        with suppress(ValueError):
            previous[number] = signal.signal(number, handle)
    return previous
