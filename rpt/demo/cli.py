"""`python -m rpt demo`: arguments in, a race with progress bars, a table and a picture out."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from rpt.options import Preset

from .race import CheckpointError, Race, read_checkpoint
from .text import load_corpus
from .train import History, OptimizerFactory, TrainConfig

__all__ = ["adamw_factory", "main", "rpt_factory", "summary_table"]

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
OUT = Path("rpt-demo.png")
PICTURES = (".png", ".svg", ".pdf", ".jpg")
OBSERVE = ("declared", "all", "none")

# The self-context block does more work per parameter; both demonstrations take about as long.
SIZES = {"plain": {"width": 96, "layers": 3}, "self_context": {"width": 64, "layers": 2}}

DEFAULTS: dict[str, Any] = {
    "plain": False,
    "steps": 300,
    "seed": 0,
    "lr": 3e-3,
    "adamw_lr": 2e-3,
    "preset": "drop_in",
    "observe": "declared",
    "observe_every": None,
    "width": None,
    "layers": None,
    "heads": 4,
    "context": 64,
    "batch": 32,
    "eval_every": 20,
    "device": "cpu",
    "threads": 1,
}


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _number(kind: type, at_least: float, below: float = math.inf) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not at_least <= value < below:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} of at least {at_least:g}")
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="python -m rpt demo",
        description="Train a small causal transformer on the text of Python's standard library "
        "with AdamW and with Residual Polar Transport, from the same initialisation and batches; "
        "end with a table and a picture.",
        argument_default=argparse.SUPPRESS,
    )
    count = _number(int, 1)
    rate = _number(float, 0)
    model = parser.add_argument_group("model and text")
    model.add_argument("--plain", action="store_true", help="a plain GPT, no self-context blocks")
    model.add_argument("--width", type=count, help="96 with --plain, else 64")
    model.add_argument("--layers", type=count, help="3 with --plain, else 2")
    model.add_argument("--heads", type=count, help="4")
    model.add_argument("--context", type=count, help="characters per window (64)")
    model.add_argument("--batch", type=count, help="windows per step (32)")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=count, help="300")
    training.add_argument("--seed", type=_number(int, 0, 2**63), help="0")
    training.add_argument("--lr", type=rate, help="RPT's peak rate (3e-3)")
    training.add_argument("--adamw-lr", type=rate, help="AdamW's peak rate (2e-3, its best here)")
    training.add_argument("--preset", choices=("drop_in", "paper"), help="RPT's preset (drop_in)")
    training.add_argument(
        "--observe",
        choices=OBSERVE,
        help="which matrices to observe: those the model declares (default), every linear, none",
    )
    training.add_argument(
        "--no-attach",
        action="store_const",
        const="none",
        dest="observe",
        help="only swap the optimizer's line; the same as --observe none",
    )
    training.add_argument("--observe-every", type=count, help="measure every so many updates")
    training.add_argument("--eval-every", type=count, help="steps between evaluations (20)")
    training.add_argument("--device", help="cpu (default) or cuda")
    training.add_argument("--threads", type=count, help="CPU threads (1)")
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, help="the picture (rpt-demo.png)")
    files.add_argument("--history", type=Path, help="also write the curves as JSON")
    files.add_argument("--save", type=Path, help="checkpoint, written as it goes and on Ctrl-C")
    files.add_argument("--save-every", type=count, help="steps between checkpoints (50)")
    files.add_argument("--resume", type=Path, help="continue a checkpoint, bitwise")
    return parser


def adamw_factory(lr: float) -> OptimizerFactory:
    """AdamW at `lr` with the demonstration's betas and weight decay."""
    return lambda model: torch.optim.AdamW(
        model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY
    )


def rpt_factory(
    lr: float,
    preset: Preset = "drop_in",
    observe: str = "declared",
    observe_every: int | None = None,
    **options: Any,
) -> OptimizerFactory:
    """RPT at `lr`, attached to what `observe` says: "declared", "all" or "none".

    Other keyword arguments go to the optimizer. The paper preset keeps its own betas.
    """

    def build(model: nn.Module) -> torch.optim.Optimizer:
        from rpt import ResidualPolarTransport

        if preset == "drop_in":
            options.setdefault("betas", BETAS)
        optimizer = ResidualPolarTransport(
            model.parameters(), lr=lr, preset=preset, weight_decay=WEIGHT_DECAY, **options
        )
        cadence: dict[str, Any] = {} if observe_every is None else {"observe_every": observe_every}
        if observe == "declared":
            optimizer.attach_model(model, **cadence)
        elif observe == "all":
            optimizer.attach_model(model, lambda m: isinstance(m, nn.Linear), **cadence)
        return optimizer

    return build


def summary_table(histories: dict[str, History], baseline: str) -> str:
    """Final and best validation loss per arm, and what each needed to reach the baseline's end."""
    goal = histories[baseline].validation_loss[-1]
    rows = [("", "validation loss", "best", "steps", "seconds", "ms per step", f"to {goal:.3f}")]
    for name, history in histories.items():
        reached = history.first_at_or_below(goal)
        steps, seconds = history.step[-1], history.seconds[-1]
        rows.append(
            (
                name,
                f"{history.validation_loss[-1]:.4f}",
                f"{min(history.validation_loss):.4f}",
                f"{steps}",
                f"{seconds:.1f}",
                f"{1000 * seconds / max(steps, 1):.0f}",
                "never" if reached is None else f"{reached[0]} steps, {reached[1]:.1f} s",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the demonstration needs {' and '.join(missing)}: "
            "pip install 'residual-polar-transport[demo]'"
        )


def _writable(path: Path | None) -> None:
    if path is not None and not path.resolve().parent.is_dir():
        raise ValueError(f"the folder of {path} does not exist")


def _settings(given: dict[str, Any], checkpoint: dict[str, Any] | None) -> dict[str, Any]:
    """Defaults under the given arguments; a checkpoint's settings rule, and may not be changed."""
    given = {key: value for key, value in given.items() if key in DEFAULTS}
    if checkpoint is None:
        settings = {**DEFAULTS, **given}
        sizes = SIZES["plain" if settings["plain"] else "self_context"]
        settings.update({k: v for k, v in sizes.items() if settings[k] is None})
        return settings
    settings = checkpoint["settings"]
    for key, value in given.items():
        if value != settings[key]:
            raise CheckpointError(
                f"the checkpoint was trained with {key.replace('_', '-')} {settings[key]}, "
                f"not {value}; leave the option out or start anew"
            )
    return settings


def _config(settings: dict[str, Any]) -> TrainConfig:
    if settings["device"] != "cpu":
        kind = str(settings["device"]).split(":")[0]
        if kind != "cuda" or not torch.cuda.is_available():
            raise ValueError(f"device {settings['device']!r} is not available")
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    block = "plain" if settings["plain"] else "self_context"
    return TrainConfig(block=block, **{k: v for k, v in settings.items() if k in names})


def _bars(race: Race, stream: Any) -> tuple[Callable[[Race], None], Callable[[], None]]:
    from tqdm import tqdm

    bars = {
        name: tqdm(
            total=race.config.steps,
            initial=race.steps_taken,
            desc=f"{name:>5}",
            position=position,
            file=stream,
            mininterval=0.5,
            unit="step",
            dynamic_ncols=True,
        )
        for position, name in enumerate(race.runs)
    }

    def update(race: Race) -> None:
        for name, run in race.runs.items():
            if run.history.step and run.history.step[-1] == run.steps_taken:
                loss = f"{run.history.validation_loss[-1]:.3f}"
                bars[name].set_postfix(validation=loss, refresh=False)
            bars[name].update()

    def close() -> None:
        for bar in bars.values():
            bar.close()

    return update, close


def _prepare(given: dict[str, Any]) -> tuple[Race, dict[str, Any]]:
    _require("matplotlib", "tqdm")
    for key in ("out", "history", "save", "resume"):
        _writable(given.get(key))
    if given.get("out", OUT).suffix not in PICTURES:
        raise ValueError(f"{given['out']} must end in one of {', '.join(PICTURES)}")
    checkpoint = read_checkpoint(given["resume"]) if "resume" in given else None
    settings = _settings(given, checkpoint)
    config = _config(settings)
    torch.set_num_threads(settings["threads"])
    factories = {
        "AdamW": adamw_factory(settings["adamw_lr"]),
        "RPT": rpt_factory(
            settings["lr"], settings["preset"], settings["observe"], settings["observe_every"]
        ),
    }
    race = Race(config, factories, load_corpus(), settings)
    if checkpoint is not None:
        race.load(checkpoint)
    return race, settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration.

    Returns:
        0 when it ran to the end, 130 when interrupted. Bad arguments exit with 2 and one line.
    """
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    try:
        race, settings = _prepare(given)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    out = given.get("out", OUT)
    save_to = given.get("save", given.get("resume"))
    model = next(iter(race.runs.values())).model
    kind = "plain GPT" if settings["plain"] else "self-context GPT"
    parameters = sum(p.numel() for p in model.parameters())
    corpus = race.corpus
    print(
        f"{kind}, {parameters:,} parameters; {len(corpus.train):,} characters of the standard "
        f"library's source to train on, {len(corpus.validation):,} held out"
    )
    update, close = _bars(race, sys.stderr)
    try:
        finished = race.go(update, save_to, given.get("save_every", 50))
    except KeyboardInterrupt:
        finished = False
    finally:
        close()
    if not finished:
        where = f"; continue with --resume {save_to}" if save_to else ""
        print(f"\ninterrupted after {race.steps_taken} steps{where}")
        return 130
    return _report(race, settings, given, kind, out)


def _report(
    race: Race, settings: dict[str, Any], given: dict[str, Any], kind: str, out: Path
) -> int:
    from .plot import plot_race

    histories = {name: run.history for name, run in race.runs.items()}
    print("\n" + summary_table(histories, "AdamW"))
    rates = f"AdamW {settings['adamw_lr']:g}, RPT {settings['lr']:g}"
    title = f"{kind}, seed {settings['seed']}, observed: {settings['observe']}; rates {rates}"
    plot_race(histories, out, title)
    if "history" in given:
        curves = {name: dataclasses.asdict(history) for name, history in histories.items()}
        given["history"].write_text(json.dumps({"settings": settings, "arms": curves}))
    print(f"\n{title}\npicture: {out}")
    return 0
