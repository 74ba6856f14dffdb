"""Run the battery, or report what it found.

    python -m examples.battery --suite quick|dev|large|other|full [--jobs N] [--out runs/battery]
    python -m examples.battery report [--suite dev] [--out runs/battery]

Interrupted runs continue where they stopped: results are JSON lines in the output folder, keyed by
task, optimizer, rate, seed and the version of the code that made them. On a CPU, quick takes a few
minutes, other half an hour, dev and large about two hours each, full a day; --tasks, --optimizers,
--stages and --seeds take a part. `examples.battery.ladder` asks what lasts as models grow,
`examples.battery.budget` what a few runs of tuning find.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .store import Store
from .suites import SUITES


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.battery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=("run", "report"), default="run")
    parser.add_argument("--suite", choices=tuple(SUITES), default="quick")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/battery"), help="folder")
    parser.add_argument("--tasks", nargs="+", default=None, help="only these tasks")
    parser.add_argument("--optimizers", nargs="+", default=None, help="only these optimizers")
    parser.add_argument("--stages", nargs="+", default=None, help="only stages so numbered, from 1")
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="only these seeds")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    suite = SUITES[options.suite]
    store = Store(options.out / "results.jsonl")
    if options.command == "run":
        from .runner import run_all

        for number, (label, configs) in enumerate(suite.stages(), 1):
            if options.stages and str(number) not in options.stages:
                continue
            # What a grid found may ask for one rate beyond its end, and that for AdamW's part of it.
            for _ in range(3):
                chosen = [
                    config
                    for config in configs(store)
                    if (not options.tasks or config.task in options.tasks)
                    and (not options.optimizers or config.optimizer in options.optimizers)
                    and (not options.seeds or config.seed in options.seeds)
                ]
                run_all(chosen, store, options.jobs, f"{number} {label}")
        if options.tasks or options.optimizers or options.stages or options.seeds:
            return  # a part of the suite: `report` says what there is so far
    from .report import write_report
    from .summary import write_summary

    page = write_report(store, suite, options.out)
    print(write_summary(store, suite, options.out).read_text())
    print(f"report: {page}")


if __name__ == "__main__":
    main()
