"""As users tune: the best loss to expect of one, two or four runs from the documented default rate.

    python -m examples.battery.budget [--optimizers ...] [--tasks ...] [--out runs/battery]
    python -m examples.battery.budget report

A user tries the documented default first, then rates drawn at random within a decade on either side;
which, a seed has fixed, the same multiples for every optimizer. Five rates of the two decades are run,
on the battery's tuning seed and in its records; losses between them are read off on logarithmic axes.
Also draws the final losses of the language models over the two decades (`sensitivity.png`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .analysis import bootstrap
from .grids import rate_at
from .peers import PEERS
from .store import Config, Store
from .suites import CORE, DEV, SUBSET, TUNING_SEED
from .summary import interval, markdown
from .tasks import TASKS

__all__ = ["expected_best", "write_budget"]

MULTIPLES = (0.1, 0.3, 1, 3, 10)
BUDGETS = (1, 2, 4)
USERS, SEED = 4000, 0
LANGUAGE = tuple(task for task in DEV if TASKS[task].group == "text")
BUDGET_TASKS = tuple(dict.fromkeys((*LANGUAGE, *SUBSET)))


def expected_best(losses: Mapping[float, float], budget: int) -> float:
    """Mean over users of the lowest loss among `budget` runs.

    Args:
        losses: multiple of the documented default → final loss, 1 among them.
        budget: runs, the default included.
    """
    draws = np.random.default_rng(SEED).uniform(-1, 1, (USERS, max(BUDGETS) - 1))[:, : budget - 1]
    known = sorted(losses)
    # Fixed before any run: whoever has more budget tries what the others tried, and then more.
    read = np.interp(draws, np.log10(known), np.log([losses[m] for m in known]))
    first = np.full((USERS, 1), math.log(losses[1]))
    return float(np.exp(np.concatenate((first, read), 1).min(1)).mean())


def rate_losses(store: Store, task: str, optimizer: str) -> dict[float, float]:
    """Multiple of the default → final loss on the tuning seed; a run that diverged counts as no training."""
    found = {}
    for multiple in MULTIPLES:
        record = store.get(Config(task, optimizer, rate_at(optimizer, multiple), TUNING_SEED))
        if record is not None and record["curves"]:
            start = record["curves"]["loss"][0]
            found[multiple] = record["final"] if math.isfinite(record["final"]) else start
    return found


def write_budget(store: Store, tasks: Sequence[str], optimizers: Sequence[str], out: Path) -> Path:
    """Write `budget.md` and `sensitivity.png`; tasks count for an optimizer once all rates have run."""
    out.mkdir(parents=True, exist_ok=True)
    found = {(t, n): rate_losses(store, t, n) for t in tasks for n in optimizers}
    complete = {key: losses for key, losses in found.items() if len(losses) == len(MULTIPLES)}
    # All optimizers over the same tasks, or not at all.
    names = [n for n in optimizers if any((t, n) in complete for t in tasks)]
    shared = [t for t in tasks if all((t, n) in complete for n in names)]
    best = {
        (t, n, k): expected_best(complete[t, n], k) for t in shared for n in names for k in BUDGETS
    }
    rows = []
    for name in names if shared else ():
        ratios = [
            [[math.log(best[t, name, k] / best[t, "adamw", 1])] for t in shared] for k in BUDGETS
        ]
        rows.append((name, f"{PEERS[name].rate:g}", *(interval(bootstrap(r)) for r in ratios)))
    parts = [
        f"## Expected best loss of 1, 2 and 4 runs, {len(shared)} tasks\n\nOver AdamW's at its default "
        "rate; geometric mean (95 %, tasks resampled).\n\n"
        + markdown(("", "default rate", *(f"{k} runs" if k > 1 else "1 run" for k in BUDGETS)), rows),
        "## By task\n\n" + markdown(
            ("", *(f"{n}, {k}" for n in names for k in BUDGETS)),
            [(t, *(f"{best[t, n, k]:.4g}" for n in names for k in BUDGETS)) for t in shared],
        ),
    ]  # fmt: skip
    path = out / "budget.md"
    path.write_text("\n\n".join(parts) + "\n")
    language = [t for t in tasks if t in LANGUAGE and any(found[t, n] for n in names)]
    if language:
        from . import plots

        figure = plots.decades({t: {n: found[t, n] for n in names} for t in language})
        figure.savefig(out / "sensitivity.png", dpi=110)
        plots.plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.battery.budget",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=("run", "report"), default="run")
    parser.add_argument("--optimizers", nargs="+", default=list(CORE), help="AdamW among them")
    parser.add_argument("--tasks", nargs="+", default=list(BUDGET_TASKS))
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/battery"), help="folder")
    options = parser.parse_args()
    store = Store(options.out / "results.jsonl")
    if options.command == "run":
        from .runner import run_all

        configs = [
            Config(task, name, rate_at(name, multiple), TUNING_SEED)
            for task in options.tasks
            for name in options.optimizers
            for multiple in MULTIPLES
        ]
        run_all(configs, store, options.jobs, "budget")
    print(write_budget(store, options.tasks, options.optimizers, options.out).read_text())


if __name__ == "__main__":
    main()
