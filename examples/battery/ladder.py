"""Does it last? One GPT in four sizes, and what grows or shrinks with them.

    python -m examples.battery.ladder [--sizes ...] [--optimizers ...] [--out runs/ladder]
    python -m examples.battery.ladder report [--save docs/data/ladder.jsonl.gz]

Every size is trained on twenty characters a parameter, the smallest on a hundred too. At the two
smallest sizes each rate is the best of three (1, 3 and 10 times the documented default, on a seed of
its own); from there it is carried on by each method's own rule: what moves entries by a given RMS
(AdamW, SOAP, RPT) shrinks its rate as the width grows, what moves matrices by a given spectral norm
(Muon and NorMuon at their first scaling) keeps it. Interrupted runs continue. On one CPU core the two
smallest sizes take an hour, the others a day.
"""

from __future__ import annotations

import argparse
import gzip
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .analysis import Results
from .grids import grid
from .store import Config, Store
from .suites import TUNING_SEED, Suite
from .summary import markdown, share
from .tasks import TASKS
from .tasks.ladder import RUNGS

__all__ = ["carried_rate", "extrapolate", "ladder_configs", "write_ladder"]

OPTIMIZERS = ("adamw", "muon", "soap", "rpt")
TUNED = ("ladder_005", "ladder_012")
SIZES = tuple(name for name, rung in RUNGS.items() if rung.ratio == 20)
# Of a size, three; of what takes half an hour of a core, or five times the data, one.
SEEDS = {name: (0, 1, 2) if name in SIZES[:3] else (0,) for name in RUNGS}
FAR = 1e8  # parameters
KEPT = ("muon", "normuon")


def best_of_three(store: Store, task: str, optimizer: str) -> float | None:
    """The best rate on the tuning seed, once all three have run."""
    found = [
        (store.get(Config(task, optimizer, r, TUNING_SEED)), r) for r in grid(optimizer, "large")
    ]
    finals = [(record["final"], rate) for record, rate in found if record is not None]
    return min(finals)[1] if len(finals) == len(found) else None


def carried_rate(store: Store, task: str, optimizer: str) -> float | None:
    """The rate at which a size is reported: its own tuning, or the largest tuned size's, carried on."""
    tuned = task if task in TUNED else TUNED[0] if RUNGS[task].ratio != 20 else TUNED[-1]
    rate = best_of_three(store, tuned, optimizer)
    if rate is None or optimizer in KEPT:
        return rate
    return float(f"{rate * RUNGS[tuned].width / RUNGS[task].width:.3g}")


def ladder_configs(
    store: Store, sizes: Iterable[str], optimizers: Iterable[str]
) -> list[list[Config]]:
    """What to run, in two stages: the grids, then what is reported."""
    sizes, names = list(sizes), list(optimizers)
    grids = [
        Config(task, name, rate, TUNING_SEED)
        for task in TUNED
        if set(sizes) - set(TUNED) or task in sizes
        for name in names
        for rate in grid(name, "large")
    ]
    reported = [
        Config(task, name, rate, seed)
        for task in sizes
        for seed in SEEDS[task]
        for name in names
        for rate in _reported_rates(store, task, name, names)
    ]
    return [grids, reported]


def _reported_rates(store: Store, task: str, name: str, names: Sequence[str]) -> list[float]:
    """Its own rate, and of RPT AdamW's too: whether a rate carries over is a question of its own."""
    sources = (name, "adamw") if name == "rpt" and "adamw" in names else (name,)
    rates = [carried_rate(store, task, source) for source in sources]
    return sorted({rate for rate in rates if rate is not None})


class Ladder(Results):
    """The ladder's runs, asked like the battery's."""

    def rate(self, task: str, optimizer: str) -> float | None:
        return carried_rate(self.store, task, optimizer)

    def rest(self, task: str, optimizer: str) -> float:
        return 1.0


def extrapolate(
    sizes: Sequence[float], values: Sequence[float], far: float = FAR
) -> tuple[float, float, float, float]:
    """Fit value = a sizeᵇ; return b, the value at `far`, and the 95 % interval of a run there.

    Least squares on logarithms; the interval is a new observation's, by Student's t. NaN where fewer
    than three points leave no residual, everything where there is one size only.
    """
    x, y = np.log(sizes), np.log(values)
    if len(set(sizes)) < 2:
        return (math.nan,) * 4
    slope, offset = np.polyfit(x, y, 1)
    at = math.log(far)
    middle = slope * at + offset
    freedom = len(x) - 2
    if freedom < 1:
        return float(slope), math.exp(middle), math.nan, math.nan
    from scipy.stats import t

    error = math.sqrt(((y - slope * x - offset) ** 2).sum() / freedom)
    spread = math.sqrt(1 + 1 / len(x) + (at - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())
    width = float(t.ppf(0.975, freedom)) * error * spread
    return float(slope), math.exp(middle), math.exp(middle - width), math.exp(middle + width)


def write_ladder(store: Store, optimizers: Sequence[str], out: Path) -> Path:
    """Write `ladder.md` and `ladder.png`: losses, shares of AdamW's steps, both against size."""
    results = Ladder(store, Suite("ladder", tuple(RUNGS), (), (), (), (0, 1, 2), ()))
    names = [n for n in optimizers if any(results.runs(t, n) for t in RUNGS)]
    out.mkdir(parents=True, exist_ok=True)
    parts = [
        "## Loss against size\n\n" + _losses(results, names),
        "## Shares of AdamW's steps, and of its CPU seconds, until its final loss\n\n"
        + _shares(results, names),
        "## RPT at AdamW's rate\n\n" + _at_adamws_rate(results),
        "## Fits\n\nvalue = a · parametersᵇ over the sizes at twenty characters a parameter, and a new "
        "run's 95 % interval at 100 M parameters.\n\n" + _fits(results, names),
    ]
    path = out / "ladder.md"
    path.write_text("\n\n".join(parts) + "\n")
    if names:
        _picture(results, names).savefig(out / "ladder.png", dpi=110)
    return path


def _losses(results: Results, names: Sequence[str]) -> str:
    rows = []
    for task, rung in RUNGS.items():
        cells = [
            f"{results.final(task, n):.4f} ({results.rate(task, n):g})"
            if results.runs(task, n)
            else ""
            for n in names
        ]
        seeds = max((len(results.runs(task, n)) for n in names), default=0)
        rows.append((f"{rung.parameters:,}", rung.ratio, TASKS[task].steps, seeds, *cells))
    header = ("parameters", "characters a parameter", "steps", "seeds", *names)
    return markdown(header, rows)


def _shares(results: Results, names: Sequence[str]) -> str:
    others = [n for n in names if n != "adamw"]
    rows = [
        (f"{rung.parameters:,}", rung.ratio,
         *(share(x) for n in others for x in results.to_target(task, n)))
        for task, rung in RUNGS.items()
        if results.runs(task, "adamw")
    ]  # fmt: skip
    header = [f"{n}: {what}" for n in others for what in ("steps", "seconds")]
    return markdown(("parameters", "characters a parameter", *header), rows)


def _at_adamws_rate(results: Results) -> str:
    rows = []
    for task, rung in RUNGS.items():
        rate = results.rate(task, "adamw")
        pairs = [
            (theirs["final"], ours["final"])
            for seed in SEEDS[task]
            if rate is not None
            and (theirs := results.store.get(Config(task, "adamw", rate, seed))) is not None
            and (ours := results.store.get(Config(task, "rpt", rate, seed))) is not None
        ]
        if pairs:
            means = [f"{sum(column) / len(pairs):.4f}" for column in zip(*pairs, strict=True)]
            rows.append((f"{rung.parameters:,}", rung.ratio, len(pairs), f"{rate:g}", *means))
    header = ("parameters", "characters a parameter", "seeds", "rate", "adamw", "rpt there")
    return markdown(header, rows)


def points(results: Results, optimizer: str, what: str) -> tuple[list[float], list[float]]:
    """(sizes, values), one a run: its final "loss", or its "share" of AdamW's steps."""
    sizes, values = [], []
    for task in SIZES:
        for run in results.runs(task, optimizer):
            value = run["final"]
            if what == "share":
                value = results.to_target(task, optimizer, seed=run["seed"])[0]
            if math.isfinite(value):
                sizes.append(float(RUNGS[task].parameters))
                values.append(value)
    return sizes, values


def _fits(results: Results, names: Sequence[str]) -> str:
    rows = []
    for what in ("loss", "share"):
        for name in names:
            if what == "share" and name == "adamw":
                continue
            sizes, values = points(results, name, what)
            slope, middle, low, high = extrapolate(sizes, values)
            if math.isnan(slope):
                continue
            between = "–" if math.isnan(low) else f"{low:.3g} to {high:.3g}"
            label = "loss" if what == "loss" else "share of AdamW's steps"
            rows.append((label, name, len(values), f"{slope:.4f}", f"{middle:.3f}", between))
    return markdown(("", "", "runs", "b", "at 100 M", "95 %"), rows)


def _picture(results: Results, names: Sequence[str]):  # type: ignore[no-untyped-def]
    from .plots import COLOURS, plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, what in zip(axes, ("loss", "share"), strict=True):
        for name in names:
            sizes, values = points(results, name, what)
            if not values or (what == "share" and name == "adamw"):
                continue
            (dots,) = axis.loglog(sizes, values, "o", ms=4, color=COLOURS.get(name), label=name)
            slope, far, *_ = extrapolate(sizes, values)
            if not math.isnan(slope):
                x = np.geomspace(min(sizes), 10 * max(sizes), 20)
                axis.plot(x, far * (x / FAR) ** slope, "-", lw=1, color=dots.get_color())
        axis.set_xlabel("parameters")
        axis.grid(alpha=0.2, which="both")
    axes[0].set_ylabel("final held-out loss, nats a character")
    axes[1].set_ylabel("share of AdamW's steps to its final loss")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.battery.ladder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=("run", "report"), default="run")
    parser.add_argument("--sizes", nargs="+", choices=tuple(RUNGS), default=list(RUNGS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/ladder"), help="folder")
    parser.add_argument("--save", type=Path, default=None, help="also pack the records into a file")
    options = parser.parse_args()
    store = Store(options.out / "results.jsonl")
    if options.command == "run":
        from .runner import run_all

        for stage in range(2):
            configs = ladder_configs(store, options.sizes, options.optimizers)[stage]
            run_all(configs, store, options.jobs, ("grids", "sizes")[stage])
    print(write_ladder(store, options.optimizers, options.out).read_text())
    if options.save is not None:
        options.save.write_bytes(gzip.compress(store.path.read_bytes(), mtime=0))


if __name__ == "__main__":
    main()
