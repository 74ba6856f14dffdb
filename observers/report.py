"""One picture of a recorded run: ranks, polar weights, coherence and root refreshes per layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .recorder import read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "write_report"]

PICTURES = (".png", ".svg", ".pdf")
PANELS = (
    ("residual_entropy_rank", "entropy rank", (-0.02, 1.02)),
    ("polar_weight", "polar weight", (-0.02, 1.02)),
    ("frame_coherence", "frame coherence q", (-1.05, 1.05)),
    ("root_refreshes", "root refreshes so far", None),
)
LEGEND_LAYERS = 20


def write_report(source: Path, target: Path, only: str | None = None) -> list[str]:
    """Draw a recorded file as a picture.

    Args:
        source: What `Recorder` wrote.
        target: Where to; the ending, one of `PICTURES`, decides.
        only: Draw the parameters whose name contains this. By default those that were ever
            observed; where none was, every matrix.

    Returns:
        The parameters drawn.

    Raises:
        ValueError: Nothing to draw, a line that is no record, or another file ending.
        ImportError: Without matplotlib.
    """
    if target.suffix not in PICTURES:
        raise ValueError(f"{target}: the name must end in one of {', '.join(PICTURES)}")
    records = list(read_records(source))
    names = _chosen(records, only)
    if not names:
        what = f"no matrix whose name contains {only!r}" if only else "no matrix"
        raise ValueError(f"{source}: {what} in {len(records)} records")
    figure = _draw(records, names, source.name)
    figure.savefig(target, dpi=130, bbox_inches="tight")
    return names


def _chosen(records: Sequence[dict[str, Any]], only: str | None) -> list[str]:
    names: dict[str, bool] = {}
    for record in records:
        for name, entry in record["parameters"].items():
            names[name] = names.get(name, False) or bool(entry.get("observations"))
    if only is not None:
        return [name for name in names if only in name]
    observed = [name for name, seen in names.items() if seen]
    return observed or list(names)


def _draw(records: Sequence[dict[str, Any]], names: Sequence[str], title: str) -> Figure:
    # The figure is built without pyplot: no global state, no display.
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(f"{title}: {len(names)} matrices, {len(records)} records")
    colors = colormaps["turbo"]
    axes = figure.subplots(2, 2, sharex=True).flat
    for axis, (key, label, limits) in zip(axes, PANELS, strict=True):
        for position, name in enumerate(names):
            points = [
                (record["step"], record["parameters"][name].get(key))
                for record in records
                if name in record["parameters"]
            ]
            steps = [step for step, value in points if value is not None]
            values = [value for _, value in points if value is not None]
            color = colors((position + 0.5) / len(names))
            # A single record is a point, not an invisible line.
            marker = "o" if len(steps) < 2 else None
            axis.plot(steps, values, color=color, lw=1.2, label=name, marker=marker)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        if limits:
            axis.set_ylim(*limits)
        if axis.get_subplotspec().is_last_row():
            axis.set_xlabel("step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > LEGEND_LAYERS:
        keep = [round(i * (len(labels) - 1) / (LEGEND_LAYERS - 1)) for i in range(LEGEND_LAYERS)]
        handles, labels = [handles[i] for i in keep], [labels[i] for i in keep]
        labels[-1] += f"  (and {len(names) - LEGEND_LAYERS} between)"
    figure.legend(handles, labels, loc="outside right center", fontsize="x-small")
    return figure
