"""The demonstration's picture: losses against steps and seconds, ranks and polar weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .train import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_race"]

COLOURS = ("#7f7f7f", "#c0392b", "#2471a3", "#1e8449")


def plot_race(histories: Mapping[str, History], path: Path, title: str) -> None:
    """Write the picture to `path` (its suffix chooses the format).

    Args:
        histories: by arm; the first is the baseline, the last one's matrices are shown below.
        path: where to write.
        title: above the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title)
    _losses(axes[0, 0], histories, "step", "optimizer steps")
    _losses(axes[0, 1], histories, "seconds", "training seconds, evaluations not counted")
    last = list(histories.values())[-1]
    observed = {name for name, ranks in last.entropy_rank.items() if any(map(math.isfinite, ranks))}
    ranks = {name: ranks for name, ranks in last.entropy_rank.items() if name in observed}
    _matrices(axes[1, 0], last.step, ranks, observed, "residual entropy rank")
    _matrices(axes[1, 1], last.step, last.polar_weight, observed, "polar weight")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _losses(axis: Axes, histories: Mapping[str, History], key: str, label: str) -> None:
    for colour, (name, history) in zip(COLOURS, histories.items(), strict=False):
        curve = history.validation_loss
        axis.plot(getattr(history, key), curve, color=colour, label=f"{name}: {curve[-1]:.3f}")
    baseline = next(iter(histories.values())).validation_loss[-1]
    if math.isfinite(baseline):
        axis.axhline(baseline, color=COLOURS[0], linewidth=0.8, linestyle=":")
    finite = [
        value
        for history in histories.values()
        for value in history.validation_loss[1:]
        if math.isfinite(value)
    ]
    if finite:
        margin = 0.05 * (max(finite) - min(finite)) + 0.01
        axis.set_ylim(min(finite) - margin, max(finite) + margin)
    axis.set_xlabel(label)
    axis.set_ylabel("validation loss (nats per character)")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)


def _kind_and_layer(name: str) -> tuple[str, int]:
    """'blocks.2.mlp_down.weight' → ('mlp_down', 2); outside a block the layer is 0."""
    name = name.removesuffix(".weight")
    inside = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return (inside.group(2), int(inside.group(1))) if inside else (name, 0)


def _matrices(
    axis: Axes,
    steps: list[int],
    curves: Mapping[str, list[float]],
    observed: set[str],
    label: str,
) -> None:
    """Observed matrices by kind (colour) and layer (line style); all others in grey."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(_kind_and_layer(name)[0] for name in curves if name in observed))
    palette = plt.get_cmap("tab10")
    labelled = set()
    for name, curve in curves.items():
        kind, layer = _kind_and_layer(name)
        if name not in observed:
            kind, layer = "not observed", 0
        axis.plot(
            steps[-len(curve) :],
            curve,
            color=palette(kinds.index(kind) % 10) if kind in kinds else COLOURS[0],
            linestyle=("-", "--", ":", "-.")[layer % 4],
            linewidth=1.2,
            label=None if kind in labelled else kind,
        )
        labelled.add(kind)
    axis.set_xlabel("optimizer steps (line style: layer)")
    axis.set_ylabel(label)
    axis.set_xlim(axis.get_xlim()[0], steps[-1])
    axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.25)
    if curves:
        axis.legend(frameon=False, fontsize=8)
    else:
        axis.text(0.5, 0.5, "nothing observed", ha="center", transform=axis.transAxes)
