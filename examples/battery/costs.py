"""What a run costs in CPU time, over AdamW's: measured in turns of twenty steps.

    python -m examples.battery.costs [--suite dev] [--tasks ...] [--optimizers ...] [--out runs/battery]

A battery's runs are hours or days apart, and the CPU seconds of one and the same run differ by up to
a factor of two with what else a machine does. Here all optimizers train a task side by side in one
process, each at its tuned rate and for the whole of its run, so that whatever slows one slows all.
The report takes its "equal time" and its shares of seconds from these ratios where it has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from .runner import training
from .store import Config, Store
from .suites import CORE, SUITES, TUNING_SEED, TWO_FIFTHS, Suite, tuned_rate, tuned_rest
from .tasks import TASKS

__all__ = ["in_turns"]

TURN = 20  # steps


def in_turns(configs: Sequence[Config]) -> list[float]:
    """CPU seconds a step of whole runs of one task, which take turns.

    In turns of one step each would find the processor's caches full of the others' work.
    """
    seconds: list[list[float]] = [[] for _ in configs]
    running = dict(enumerate(map(training, configs)))
    while running:
        for place, run in list(running.items()):
            turn = list(islice(run, TURN))
            seconds[place] += turn
            if len(turn) < TURN:
                del running[place]
    return [sum(found) / len(found) for found in seconds]


def arms(store: Store, suite: Suite, task: str, optimizers: Sequence[str]) -> list[Config]:
    """Each optimizer at its tuned rate, where it has one; of RPT its short runs on text too."""
    found = []
    for name in optimizers:
        rate = tuned_rate(store, task, name, suite.name)
        if rate is not None:
            rest = tuned_rest(store, task, name, suite.name)
            found.append(Config(task, name, rate, TUNING_SEED, rest=rest))
            if name == "rpt" and TASKS[task].group == "text":
                found.append(Config(task, name, rate, TUNING_SEED, TWO_FIFTHS))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.battery.costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", choices=tuple(SUITES), default="dev")
    parser.add_argument("--tasks", nargs="+", default=None, help="only these tasks")
    parser.add_argument(
        "--optimizers", nargs="+", default=None, help="by default those of the suite"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/battery"), help="folder")
    options = parser.parse_args()
    suite = SUITES[options.suite]
    store = Store(options.out / "results.jsonl")
    for task in tqdm(options.tasks or suite.tasks, unit="task"):
        names = options.optimizers or (*CORE[1:], *(suite.others if task in suite.subset else ()))
        missing = [c for c in arms(store, suite, task, names) if store.cost(c) is None]
        yardstick = arms(store, suite, task, ["adamw"])
        if not missing or not yardstick:
            continue
        theirs, *seconds = in_turns([*yardstick, *missing])
        for config, value in zip(missing, seconds, strict=True):
            ratio = round(config.share * value / theirs, 4)
            store.add_cost(config, ratio)
            tqdm.write(f"{task:20} {config.optimizer:18} {config.share:g} {ratio:.3f}")


if __name__ == "__main__":
    main()
