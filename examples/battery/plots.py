"""The report's pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

from .analysis import Results, profile

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

__all__ = ["ablations", "curves", "decades", "profiles", "ratios", "sensitivity"]

COLOURS = {
    "adamw": "#777777",
    "rpt": "#c0392b",
    "muon": "#2471a3",
    "soap": "#229954",
    "heavyball_soap": "#b7950b",
}


def _grid(count: int, columns: int = 6) -> tuple[Figure, list[plt.Axes]]:
    rows = math.ceil(count / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.6 * columns, 2.1 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[count:]:
        axis.axis("off")
    return figure, list(axes.flat[:count])


def curves(
    results: Results, tasks: Sequence[str], optimizers: Sequence[str], against: str
) -> Figure:
    """Held-out loss against "step" or "cpu" seconds, geometric mean over seeds."""
    figure, axes = _grid(len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        for name in optimizers:
            runs = [r["curves"] for r in results.runs(task, name) if not r["diverged"]]
            if not runs:
                continue
            length = min(len(r["loss"]) for r in runs)
            x = np.mean([r[against][:length] for r in runs], 0)
            y = np.exp(np.mean(np.log(np.maximum([r["loss"][:length] for r in runs], 1e-12)), 0))
            axis.semilogy(x, y, color=COLOURS.get(name), label=name, lw=1.2)
        axis.set_title(task, fontsize=8)
        axis.tick_params(labelsize=6, which="both")
        axis.grid(alpha=0.2)
    if axes:
        axes[0].legend(fontsize=6, frameon=False)
        unit = "optimizer steps" if against == "step" else "CPU seconds, one thread"
        figure.supxlabel(unit, fontsize=9)
        figure.supylabel("held-out loss", fontsize=9)
    return figure


def sensitivity(results: Results, tasks: Sequence[str], optimizers: Sequence[str]) -> Figure:
    """Final loss on the tuning seed against the multiple of the documented default rate."""
    from .peers import PEERS

    figure, axes = _grid(len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        top = 0.0
        for name in optimizers:
            found = [(r / PEERS[name].rate, x) for r, x in results.tuning(task, name)]
            found = [(m, x) for m, x in found if math.isfinite(x)]
            if found:
                axis.loglog(*zip(*found, strict=True), "o-", ms=2.5, lw=1, label=name,
                            color=COLOURS.get(name))  # fmt: skip
                top = max(top, *(x for _, x in found))
        axis.set_title(task, fontsize=8)
        axis.tick_params(labelsize=6, which="both")
        axis.grid(alpha=0.2)
    if axes:
        axes[0].legend(fontsize=6, frameon=False)
        figure.supxlabel("learning rate over documented default", fontsize=9)
        figure.supylabel("final held-out loss, tuning seed", fontsize=9)
    return figure


def decades(found: Mapping[str, Mapping[str, Mapping[float, float]]]) -> Figure:
    """Final loss over the multiples of the default rate: task → optimizer → multiple → loss."""
    figure, axes = _grid(len(found), columns=min(len(found), 5))
    for axis, (task, curves) in zip(axes, found.items(), strict=True):
        for name, losses in curves.items():
            if losses:
                axis.semilogx(*zip(*sorted(losses.items()), strict=True), "o-", ms=3, lw=1.3,
                              label=name, color=COLOURS.get(name))  # fmt: skip
        axis.axvline(1, color="black", lw=0.6, ls=":")
        axis.set_title(task, fontsize=9)
        axis.tick_params(labelsize=7, which="both")
        axis.grid(alpha=0.2)
    axes[0].legend(fontsize=7, frameon=False)
    figure.supxlabel("learning rate over the documented default", fontsize=9)
    figure.supylabel("final held-out loss", fontsize=9)
    return figure


def ratios(results: Results, tasks: Sequence[str], optimizers: Sequence[str]) -> Figure:
    """Final loss over tuned AdamW's, one row a task."""
    order = sorted(tasks, key=lambda t: -_ratio(results, t, "rpt"))
    figure, axis = plt.subplots(figsize=(7, 0.25 * len(order) + 1.2), layout="constrained")
    for name in optimizers:
        values = [_ratio(results, t, name) for t in order]
        axis.plot(
            np.clip(values, 0.1, 10), range(len(order)), "o", ms=4.5, color=COLOURS.get(name),
            label=name, alpha=0.85,
        )  # fmt: skip
    axis.axvline(1, color=COLOURS["adamw"], lw=1)
    axis.set_xscale("log")
    axis.set_yticks(range(len(order)), order, fontsize=7)
    axis.set_xlabel("final held-out loss / tuned AdamW's (log; left is better)")
    axis.grid(alpha=0.2, which="both")
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    return figure


def _ratio(results: Results, task: str, optimizer: str) -> float:
    found = results.log_ratios([task], optimizer, "adamw")
    return math.exp(np.mean(found[task])) if found else math.nan


def profiles(table: np.ndarray, timed: np.ndarray, optimizers: Sequence[str]) -> Figure:
    """Share of tasks within a factor of the best, at equal steps and at equal time."""
    factors = np.geomspace(1, 10, 200)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, values, title in zip(
        axes, (table, timed), ("equal steps", "AdamW's CPU time"), strict=True
    ):
        for name, share in zip(optimizers, profile(values, factors), strict=True):
            axis.step(factors, share, where="post", color=COLOURS.get(name), label=name)
        axis.set(xscale="log", title=title, xlabel="within a factor of the best", ylim=(0, 1.02))
        axis.grid(alpha=0.2, which="both")
    axes[0].set_ylabel("share of tasks")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def ablations(rows: Sequence[tuple[str, float, float, float]]) -> Figure:
    """(name, mean log ratio to RPT, low, high): one bar each."""
    figure, axis = plt.subplots(figsize=(7, 0.24 * len(rows) + 1), layout="constrained")
    for y, (_, mean, low, high) in enumerate(rows):
        axis.plot(np.exp([low, high]), [y, y], color="#999999", lw=2)
        axis.plot(math.exp(mean), y, "o", color=COLOURS["rpt"], ms=4)
    axis.axvline(1, color="black", lw=0.8)
    axis.set_xscale("log")
    axis.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=7)
    axis.set_xlabel("final held-out loss / RPT's default (right: worse)")
    axis.grid(alpha=0.2, which="both")
    return figure
