"""What is an observation good for? Every arm of `examples/research.py` against observing nothing.

    python -m examples.bench.observation_arms run screen      four tasks at half their steps, two rates, tuning seeds
    python -m examples.bench.observation_arms run final       eight tasks, own best of three rates, fresh seeds
    python -m examples.bench.observation_arms report [screen|final]

Runs are kept in runs/observation_arms.jsonl and not repeated. Arms of a seed share initialisation and batches,
so differences are paired: log(loss of the arm / loss without observation), with a 95 % t-interval.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    "back R 1/8": Arm("R", back="R", back_power=-0.125),
    "outputs": Arm(cap="outputs"),
    "trim 4": Arm(trim=4.0),
}
SCREEN = ("gpt_char", "operator_1d", "vit_digits", "mlp_digits")
SCREEN_RATES, SCREEN_SEEDS, SCREEN_SHARE = (3e-3, 1e-2), (100, 101), 0.5
TASKS = ("gpt_char", "gpt_bpe", "context_lm", "lstm_char", "vit_digits", "resnet_mnist", "mlp_digits",
         "operator_1d")  # fmt: skip
RATES, SEEDS = (1e-3, 3e-3, 1e-2), {"gpt_bpe": 3, "context_lm": 3}


def maker(arm: Arm) -> Callable[..., Bundle]:
    return lambda model, rate, decay: Bundle([ResearchTransport(model, rate, arm, decay)])


def library(model: nn.Module, rate: float, decay: float) -> Bundle:
    return Bundle([rpt.ResidualPolarTransport(model.parameters(), rate, weight_decay=decay)])


for _task in TASKS:  # only the end of a run is looked at
    BATTERY[_task] = replace(BATTERY[_task], evaluations=1, tail=1)
for _name, _arm in ARMS.items():
    PEERS[_name] = Peer(_name, 1e-3, maker(_arm), "", options=repr(_arm))
PEERS["library"] = Peer("library", 1e-3, library, "")


def finals(
    store: Store, task: str, arm: str, rate: float, seeds: Sequence[int], share: float = 1.0
) -> list[float]:
    records = [store.get(Config(task, arm, rate, seed, share)) for seed in seeds]
    return [r["final"] for r in records if r is not None]


def interval(logs: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of the 95 % t-interval."""
    quantile = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 16: 2.131}
    if len(logs) < 2:
        return (logs[0] if logs else math.nan), math.nan
    q = quantile.get(len(logs), 2.0)
    return statistics.mean(logs), q * statistics.stdev(logs) / len(logs) ** 0.5


def best_rate(store: Store, task: str, arm: str) -> float | None:
    found = {r: finals(store, task, arm, r, [100]) for r in RATES}
    found = {r: f for r, f in found.items() if f}
    return min(found, key=lambda r: found[r]) if found else None


def seeds_of(task: str) -> range:
    return range(SEEDS.get(task, 5))


def run(
    store: Store, stage: str, arms: Sequence[str], tasks: Sequence[str], seeds: Sequence[int]
) -> None:
    if stage == "screen":
        wanted = [
            Config(t, a, r, s, SCREEN_SHARE)
            for s in seeds for a in arms for t in tasks for r in SCREEN_RATES
        ]  # fmt: skip
        run_all(wanted, store, 1, "screen")
        return
    for task in tasks:
        run_all([Config(task, a, r, 100) for a in arms for r in RATES], store, 1, task)
        best = {a: best_rate(store, task, a) for a in arms}
        run_all([Config(task, a, best[a] or 1e-3, s) for s in seeds_of(task) for a in arms], store, 1, task)


def report(store: Store, stage: str, arms: Sequence[str], tasks: Sequence[str]) -> None:
    print("| arm | " + " | ".join(tasks) + " |\n|" + " --- |" * (len(tasks) + 1))
    for arm in arms:
        cells = []
        for task in tasks:
            if stage == "screen":
                share = SCREEN_SHARE
                pairs = [
                    (a[0], b[0]) for r in SCREEN_RATES for s in SCREEN_SEEDS
                    if (a := finals(store, task, arm, r, [s], share))
                    and (b := finals(store, task, "nothing", r, [s], share))
                ]  # fmt: skip
            else:
                rates_of = [best_rate(store, task, arm), best_rate(store, task, "nothing")]
                if None in rates_of:
                    cells.append("")
                    continue
                pairs = [
                    (a[0], b[0]) for s in seeds_of(task)
                    if (a := finals(store, task, arm, rates_of[0] or 0, [s]))
                    and (b := finals(store, task, "nothing", rates_of[1] or 0, [s]))
                ]  # fmt: skip
            if not pairs:
                cells.append("")
                continue
            mean, half = interval([math.log(a / b) for a, b in pairs])
            base = statistics.mean(p[1 if arm != "nothing" else 0] for p in pairs)
            cells.append(f"{base:.4g}" if arm == "nothing" else f"{100 * mean:+.1f} ± {100 * half:.1f}")
        print(f"| {arm} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("stage", choices=("screen", "final"), nargs="?", default="final")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SCREEN_SEEDS), help="of the screen")
    options = parser.parse_args()
    tasks = options.tasks or (SCREEN if options.stage == "screen" else TASKS)
    if options.what == "run":
        run(Store(STORE), options.stage, options.arms, tasks, options.seeds)
    else:
        report(Store(STORE), options.stage, options.arms, tasks)


if __name__ == "__main__":
    sys.exit(main())
