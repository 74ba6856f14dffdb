"""What is an observation good for? Every arm of `examples/research.py` against observing nothing.

    python -m examples.bench.observation_arms run screen      four tasks at half their steps, two rates
    python -m examples.bench.observation_arms run final       eight tasks, own best of three rates, five seeds
    python -m examples.bench.observation_arms run attached    the library, attached or not
    python -m examples.bench.observation_arms report [screen|final|attached]

Runs are kept in runs/observation_arms.jsonl and not repeated (docs/data has those of docs/observation.md).
Arms of a seed share initialisation and batches, so differences are paired: log(loss of the arm / loss without
observation) in percent, mean and 95 % t-interval over seeds (of the screen: over seeds and rates), and how
many pairs there are.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from torch import nn

import rpt
from examples.battery.bundle import Bundle
from examples.battery.peers import PEERS, Peer
from examples.battery.runner import run_all
from examples.battery.store import Config, Store
from examples.battery.tasks import TASKS as BATTERY
from examples.research import Arm, ResearchTransport

STORE = Path("runs/observation_arms.jsonl")
ARMS: dict[str, Arm] = {
    "nothing": Arm(),
    # (a) The observed metric.
    "R": Arm("R"),
    "R 3/8": Arm("R", -0.375),
    "R 1/2": Arm("R", -0.5),
    "L": Arm("L"),
    "RL": Arm("RL"),
    "RL 3/8": Arm("RL", -0.375),
    "R 3/8 b99": Arm("R", -0.375, beta2=0.99),
    "R 3/8 64": Arm("R", -0.375, rows=64),
    "R 3/8 1024": Arm("R", -0.375, rows=1024),
    "R 3/8 ridge": Arm("R", -0.375, ridge=1e-2),
    # (b) The length from this step's own noise.
    "noise": Arm(length="noise"),
    "both": Arm(length="both"),
    "shrunk": Arm(length="shrunk"),
    # (c) The polar weight.
    "head 0": Arm(polar="head"),
    "rank": Arm(polar="rank"),
    "beyond": Arm(polar="beyond"),
    "wiener": Arm(polar="wiener"),
    # (d) Further ideas; "own" ones observe nothing and are there to tell the two apart.
    "back own R": Arm(back="R"),
    "back own RL": Arm(back="RL"),
    "back R": Arm("R", back="R"),
    "back RL": Arm("RL", back="RL"),
    "back RL 3/8": Arm("RL", -0.375, back="RL", back_power=-0.375),
    "back RL 1/2": Arm("RL", -0.5, back="RL", back_power=-0.5, ridge=1e-2),
    "back RL 1/8": Arm("RL", back="RL", back_power=-0.125),
    "back RL ridge": Arm("RL", back="RL", ridge=1e-2),
    "back RL b99": Arm("RL", back="RL", beta2=0.99),
    "back RL outputs": Arm("RL", back="RL", cap="outputs"),
    "L back L": Arm("L", back="L"),
    "back own L": Arm(back="L"),
    "RL back L 3/8": Arm("RL", back="L", back_power=-0.375),
    "RL back L seen": Arm("RL", back="L", back_where="seen"),
    "back own L seen": Arm(back="L", back_where="seen"),
    "back own L tables": Arm(back="L", back_where="unseen"),
    "RL back R": Arm("RL", back="R"),
    "RL back L": Arm("RL", back="L"),
    "back R 1/8": Arm("R", back="R", back_power=-0.125),
    "outputs": Arm(cap="outputs"),
    "trim 4": Arm(trim=4.0),
}
TUNING = (100, 101, 0)
SCREEN = ("gpt_char", "operator_1d", "vit_digits", "mlp_digits")
SCREEN_RATES, SCREEN_SHARE = (1e-2, 3e-3), 0.5
TASKS = ("gpt_char", "gpt_bpe", "context_lm", "lstm_char", "vit_digits", "resnet_mnist", "mlp_digits",
         "operator_1d")  # fmt: skip
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = 5


def maker(arm: Arm) -> Callable[..., Bundle]:
    return lambda model, rate, decay: Bundle([ResearchTransport(model, rate, arm, decay)])


def _version(arm: Arm) -> str:
    """What differs from observing nothing: a new field of `Arm` does not disown older runs."""
    return repr({f.name: v for f in fields(arm) if (v := getattr(arm, f.name)) != f.default})


def library(sites: str, **options: float) -> Callable[..., Bundle]:
    """The library's default preset: nothing attached, "declared" sites, or "linear" for every such layer."""

    def make(model: nn.Module, rate: float, decay: float) -> Bundle:
        optimizer = rpt.ResidualPolarTransport(
            model.parameters(), rate, weight_decay=decay, **options
        )
        if sites:
            module_filter = (lambda m: isinstance(m, nn.Linear)) if sites == "linear" else None
            optimizer.attach_model(model, module_filter)
        return Bundle([optimizer])

    return make


for _task in (*TASKS, "ripple"):  # only the end of a run is looked at
    BATTERY[_task] = replace(BATTERY[_task], evaluations=1, tail=1)
for _name, _arm in ARMS.items():
    PEERS[_name] = Peer(_name, 1e-3, maker(_arm), "", options=_version(_arm))
# With a release of 1 an observation lowers no weight, and the prior here is 1.
ATTACHED: dict[str, Callable[..., Bundle]] = {
    "library": library(""),
    "declared": library("declared"),
    "linear": library("linear"),
    "linear, never below the prior": library("linear", polar_release_beta=1),
}
for _name, _make in ATTACHED.items():
    PEERS[_name] = Peer(_name, 1e-3, _make, "", options=_name)


FINAL = ["nothing", "back own L", "L back L", "RL", "wiener"]
STAGES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "screen": (list(ARMS), SCREEN),
    "final": (FINAL, TASKS),
    "attached": (list(ATTACHED), ("gpt_char", "vit_digits", "ripple")),
}


def final(store: Store, config: Config) -> float | None:
    record = store.get(config)
    return None if record is None else record["final"]


def interval(logs: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of the 95 % t-interval."""
    quantile = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
    if len(logs) < 2 or not all(map(math.isfinite, logs)):
        return (logs[0] if logs else math.nan), math.nan
    q = quantile.get(len(logs), 2.2)
    return statistics.mean(logs), q * statistics.stdev(logs) / len(logs) ** 0.5


def best_rate(store: Store, task: str, arm: str) -> float | None:
    found = {r: final(store, Config(task, arm, r, TUNING[0])) for r in RATES}
    known = {r: f for r, f in found.items() if f is not None}
    return min(known, key=lambda r: known[r]) if known else None


def configs(store: Store, stage: str, task: str, arm: str) -> list[Config]:
    """What is compared with the same list of another arm, entry by entry."""
    if stage == "screen":
        return [Config(task, arm, r, s, SCREEN_SHARE) for s in TUNING for r in SCREEN_RATES]
    if stage == "attached":
        return [Config(task, arm, 3e-3, seed, SCREEN_SHARE) for seed in range(3)]
    rate = best_rate(store, task, arm)
    return [Config(task, arm, rate, s) for s in range(SEEDS)] if rate else []


def run(store: Store, stage: str, arms: Sequence[str], tasks: Sequence[str]) -> None:
    for task in tasks:
        if stage == "final":
            run_all([Config(task, a, r, TUNING[0]) for a in arms for r in RATES], store, 1, task)
        lists = [configs(store, stage, task, arm) for arm in arms]
        # Arm by arm within a seed, so that an interruption leaves pairs.
        run_all([c for row in zip(*lists, strict=True) for c in row], store, 1, task)


def report(store: Store, stage: str, arms: Sequence[str], tasks: Sequence[str]) -> None:
    """Rows of a Markdown table: the first arm's mean loss, the others' paired differences in percent."""
    print("| | " + " | ".join(tasks) + " |\n|" + " --- |" * (len(tasks) + 1))
    for arm in arms:
        cells = []
        for task in tasks:
            pairs = [
                (x, y)
                for a, b in zip(
                    configs(store, stage, task, arm),
                    configs(store, stage, task, arms[0]),
                    strict=False,
                )
                if (x := final(store, a)) is not None and (y := final(store, b)) is not None
            ]
            if not pairs:
                cells.append("")
            elif arm == arms[0]:
                cells.append(f"{statistics.mean(x for x, _ in pairs):.4g}")
            else:
                mean, half = interval([math.log(x / y) for x, y in pairs])
                width = f" ± {100 * half:.1f}" if len(pairs) > 1 else ""
                cells.append(f"{100 * mean:+.1f}{width} ({len(pairs)})")
        if any(cells):
            print(f"| {arm} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    global TUNING, SCREEN_RATES
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("stage", choices=tuple(STAGES))
    parser.add_argument("--arms", nargs="+", help="beside the one that observes nothing; all")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=TUNING, help="of the screen")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=SCREEN_RATES, help="of the screen"
    )
    options = parser.parse_args()
    TUNING, SCREEN_RATES = tuple(options.seeds), tuple(options.rates)
    arms, tasks = STAGES[options.stage]
    if options.arms:
        arms = [arms[0], *options.arms]
    (run if options.what == "run" else report)(
        Store(STORE), options.stage, arms, options.tasks or tasks
    )


if __name__ == "__main__":
    main()
