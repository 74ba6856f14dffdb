"""From runs to statements: final losses, ranks, paired ratios, profiles, time to a target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .peers import PEERS
from .store import Config, Store
from .suites import (
    ABLATIONS,
    CORE,
    TUNING_SEED,
    Suite,
    time_share,
    tuned_rate,
    tuned_rest,
    tuning_rates,
)

__all__ = ["Results", "bootstrap", "mean_ranks", "profile"]

Record = dict[str, Any]
Array = NDArray[np.float64]
WORST_RATIO = 10.0  # what a run that diverged counts as


class Results:
    """The runs of a suite, asked by task and optimizer.

    An optimizer's rate is the one its tuning seed chose; an ablation's that was not tuned is RPT's;
    the paper preset's, which has a scale of its own, the best of three on its first reported seed.
    """

    def __init__(self, store: Store, suite: Suite) -> None:
        self.store, self.suite = store, suite
        self._records: dict[tuple[str, str], list[Record]] = {}
        for record in store.current():
            if record["curves"] or record.get("error"):
                self._records.setdefault((record["task"], record["optimizer"]), []).append(record)

    def rate(self, task: str, optimizer: str) -> float | None:
        """The rate whose runs are reported."""
        if optimizer.startswith("rpt_paper"):
            first = self.suite.ablation_seeds[0]
            found = [r for r in self._records.get((task, optimizer), []) if r["seed"] == first]
            return min(found, key=lambda r: r["final"])["rate"] if found else None
        own = tuned_rate(self.store, task, optimizer, self.suite.name)
        if own is None and optimizer in ABLATIONS:
            return tuned_rate(self.store, task, "rpt", self.suite.name)
        return own

    def rest(self, task: str, optimizer: str) -> float:
        """What multiplies the rate of AdamW's part in the reported runs."""
        return tuned_rest(self.store, task, optimizer, self.suite.name)

    def runs(
        self, task: str, optimizer: str, rate: float | None = None, seeds: Sequence[int] = ()
    ) -> list[Record]:
        """Reported runs by seed, at the tuned rate unless another is given."""
        rest = 1.0
        if rate is None:
            rate = self.rate(task, optimizer)
            rest = self.rest(task, optimizer)
        wanted = seeds or self.suite.seeds
        found = [
            r
            for r in self._records.get((task, optimizer), [])
            if rate is not None and math.isclose(r["rate"], rate) and r["seed"] in wanted
            if r.get("share", 1.0) == 1.0 and r.get("rest", 1.0) == rest
        ]
        return sorted(found, key=lambda r: r["seed"])

    def final(self, task: str, optimizer: str, rate: float | None = None) -> float:
        """Mean final held-out loss over the reported seeds; NaN without any."""
        return _mean([r["final"] for r in self.runs(task, optimizer, rate)])

    def finals(self, task: str, arms: Sequence[str | tuple[str, float | None]]) -> list[float]:
        """Mean final losses of several optimizers, each at its tuned rate or as (name, rate).

        Over the seeds that all of those with any runs share, so that the means compare; NaN for an
        optimizer without runs.
        """
        named = [(arm, None) if isinstance(arm, str) else arm for arm in arms]
        runs = [{r["seed"]: r["final"] for r in self.runs(task, n, rate)} for n, rate in named]
        filled = [set(found) for found in runs if found]
        shared = set.intersection(*filled) if filled else set()
        return [_mean([x for seed, x in found.items() if seed in shared]) for found in runs]

    def best(self, task: str, optimizer: str) -> float:
        """Mean of each run's lowest held-out loss."""
        return _mean([r["best"] for r in self.runs(task, optimizer)])

    def accuracy(self, task: str, optimizer: str) -> float:
        """Mean final held-out accuracy; NaN for what is not a classification."""
        found = [r["curves"].get("accuracy") for r in self.runs(task, optimizer) if r["curves"]]
        return _mean([curve[-1] for curve in found if curve])

    def classifications(self, tasks: Iterable[str]) -> list[tuple[str, ...]]:
        """Rows (task, and for each of the core: final loss, lowest loss, final accuracy in per cent)."""
        return [
            (task, *(
                f"{self.final(task, n):.3g} / {self.best(task, n):.3g} / {100 * self.accuracy(task, n):.1f}"
                for n in CORE
            ))
            for task in self.complete(tasks, CORE)
            if not math.isnan(self.accuracy(task, "adamw"))
        ]  # fmt: skip

    def at_equal_time(self, task: str, optimizer: str) -> float:
        """Mean final loss of runs as long as AdamW's in CPU seconds, the schedule fitted to them.

        The full runs' where the optimizer is no slower; NaN before the shortened runs were made.
        """
        share = time_share(self.store, task, optimizer, self.suite)
        if share == 1.0:
            return self.final(task, optimizer)
        return self.shortened(task, optimizer, share)[0]

    def shortened(self, task: str, optimizer: str, share: float) -> tuple[float, float]:
        """Of runs with a share of the steps and the schedule fitted to them: mean final loss, and mean
        CPU seconds over those of AdamW's whole runs with the same seeds; NaN without any."""
        rate = self.rate(task, optimizer) or 0.0
        whole = {r["seed"]: r for r in self.runs(task, "adamw") if r["curves"]}
        rest = self.rest(task, optimizer)
        configs = (Config(task, optimizer, rate, seed, share, rest) for seed in self.suite.seeds)
        runs = [r for c in configs if (r := self.store.get(c)) is not None]
        timed = [(r, whole[r["seed"]]) for r in runs if r["curves"] and r["seed"] in whole]
        seconds = [_last(run, "cpu") / _last(theirs, "cpu") for run, theirs in timed]
        cost = self.store.cost(Config(task, optimizer, rate, 0, share))
        return _mean([r["final"] for r in runs]), _mean(seconds) if cost is None else cost

    def cost(self, task: str, optimizer: str) -> float:
        """CPU seconds of a whole run over AdamW's: measured in turns, or else of the reported runs."""
        cost = 1.0 if optimizer == "adamw" else self.store.cost(Config(task, optimizer, 0.0, 0))
        if cost is not None:
            return cost
        ours, theirs = (
            sum(_last(r, "cpu") for r in self.runs(task, n) if r["curves"])
            for n in (optimizer, "adamw")
        )
        return ours / theirs if ours and theirs else math.nan

    def to_target(
        self, task: str, optimizer: str, yardstick: str = "adamw", seed: int | None = None
    ) -> tuple[float, float]:
        """Shares of the yardstick's steps and CPU seconds until its final loss, mean over seeds (or one).

        First measurement at or below; infinite where it is never reached.
        """
        targets = {r["seed"]: r for r in self.runs(task, yardstick)}
        steps, seconds = [], []
        for run in self.runs(task, optimizer):
            target = targets.get(run["seed"])
            other_seed = seed is not None and run["seed"] != seed
            if other_seed or target is None or not run["curves"] or not target["curves"]:
                continue
            losses = run["curves"]["loss"]
            hit = next((i for i, x in enumerate(losses) if x <= target["final"] * 1.0001), None)
            reached = hit is not None
            steps.append(
                run["curves"]["step"][hit] / _last(target, "step") if reached else math.inf
            )
            part = run["curves"]["cpu"][hit] / _last(run, "cpu") if reached else math.inf
            seconds.append(part * self.cost(task, optimizer) / self.cost(task, yardstick))
        return _mean(steps), _mean(seconds)

    def log_ratios(
        self, tasks: Iterable[str], optimizer: str, yardstick: str, default_rate: bool = False
    ) -> dict[str, list[float]]:
        """Per task, log(final / yardstick's final) of the seeds that both have."""
        found: dict[str, list[float]] = {}
        for task in tasks:
            rates = [PEERS[n].rate if default_rate else None for n in (optimizer, yardstick)]
            theirs = {r["seed"]: r["final"] for r in self.runs(task, yardstick, rates[1])}
            pairs = [
                (run["final"], theirs[run["seed"]])
                for run in self.runs(task, optimizer, rates[0])
                if run["seed"] in theirs
            ]
            if pairs:
                found[task] = [_log_ratio(a, b) for a, b in pairs]
        return found

    def tuning(self, task: str, optimizer: str) -> list[tuple[float, float]]:
        """(rate, final loss) of what was tried on the tuning seed, by rate."""
        found = []
        for rate in sorted(tuning_rates(self.store, task, optimizer, self.suite.name)):
            record = self.store.get(Config(task, optimizer, rate, TUNING_SEED))
            if record is not None:
                found.append((rate, record["final"]))
        return found

    def complete(self, tasks: Iterable[str], optimizers: Iterable[str]) -> list[str]:
        """The tasks for which all of the optimizers have reported runs."""
        names = list(optimizers)
        return [t for t in tasks if all(self.runs(t, name) for name in names)]

    def peers(self) -> tuple[list[str], list[str], list[str]]:
        """What compares all peers: the tasks of the subset that most of them ran on, who ran on every
        one of these, and who did not."""
        names = [*CORE, *self.suite.others]
        tasks = [
            t
            for t in self.complete(self.suite.subset, CORE)
            if 2 * sum(bool(self.runs(t, n)) for n in self.suite.others) > len(self.suite.others)
        ]
        everywhere = [n for n in names if tasks and self.complete(tasks, [n]) == tasks]
        return tasks, everywhere, [n for n in names if n not in everywhere]


def mean_ranks(table: Array) -> Array:
    """Losses (tasks, optimizers) → mean rank of each optimizer, 1 the best, ties shared."""
    better = (table[:, None, :] < table[:, :, None]).sum(-1)
    equal = (table[:, None, :] == table[:, :, None]).sum(-1)
    return (better + (equal + 1) / 2).mean(0)


def profile(table: Array, factors: Array) -> Array:
    """Share of tasks within each factor of the best: (tasks, optimizers) → (optimizers, factors)."""
    ratio = table / table.min(1, keepdims=True)
    return (ratio[:, :, None] <= factors * (1 + 1e-12)).mean(0)


def bootstrap(
    groups: Iterable[Sequence[float]], draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean over groups of their means, and its 95 % interval: groups resampled, then their members."""
    parts = [np.asarray(group, dtype=float) for group in groups if len(group)]
    if not parts:
        return math.nan, math.nan, math.nan
    generator = np.random.default_rng(seed)
    # Every group's own resampled mean, then which groups are drawn; one column a drawn group.
    resampled = np.stack(
        [p[generator.integers(len(p), size=(draws, len(parts), len(p)))].mean(-1) for p in parts]
    )
    chosen = generator.integers(len(parts), size=(draws, len(parts)))
    means = np.take_along_axis(resampled, chosen[None], 0)[0].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(np.mean([p.mean() for p in parts])), float(low), float(high)


def _log_ratio(a: float, b: float) -> float:
    if not math.isfinite(a) or not math.isfinite(b):
        ratio = 1.0 if math.isfinite(a) == math.isfinite(b) else math.inf if a > b else 0.0
    else:
        ratio = a / max(b, 1e-30)
    return math.log(min(max(ratio, 1 / WORST_RATIO), WORST_RATIO))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _last(record: Record, name: str) -> float:
    return record["curves"][name][-1] if record["curves"] else math.nan
