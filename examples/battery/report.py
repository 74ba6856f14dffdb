"""One self-contained HTML page, and its pictures as PNG files."""

from __future__ import annotations

import base64
import html
import math
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from . import plots
from .analysis import Results, bootstrap, mean_ranks
from .peers import PEERS
from .store import Store
from .suites import CORE, Suite
from .tasks import TASKS

__all__ = ["write_report"]

STYLE = """body{font:14px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.15rem .6rem;text-align:right}
td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f5f5f5}
b{color:#c0392b}img{max-width:100%}"""

Row = Sequence[object]


def write_report(store: Store, suite: Suite, out: Path) -> Path:
    """Write `report.html` and the PNGs into `out`; what has not been run yet is left out."""
    results = Results(store, suite)
    out.mkdir(parents=True, exist_ok=True)
    parts = [f"<h1>Battery, suite {suite.name}</h1>", _about(store)]
    tasks = results.complete(suite.tasks, CORE)
    if tasks:
        parts += _core(results, tasks, out)
    parts += _defaults(results, suite)
    parts += _without_schedule(results, suite)
    parts += _others(results)
    parts += _ablations(results, suite, out)
    parts += _failures(store)
    page = out / "report.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><title>Battery</title><style>{STYLE}</style>"
        + "\n".join(parts)
    )
    return page


def _about(store: Store) -> str:
    count = sum(1 for _ in store.current())
    return (
        f"<p>{count} runs, PyTorch {torch.__version__}, {html.escape(platform.machine())}, one CPU "
        "thread each. Seconds are the process's own CPU time, evaluations left out: they do not grow "
        "when the machine is shared. Every optimizer gets the same initialisation, batches, warm-up, "
        "schedule, clipping and budget, a grid of rates of the same size around its documented "
        "default, and one more beyond an end that won; rates are chosen on one seed and reported on "
        "others. Equal time: runs of as many steps as fit into AdamW's seconds, the schedule fitted to "
        "them. Held-out loss, lower is better.</p>"
    )


def _core(results: Results, tasks: list[str], out: Path) -> list[str]:
    table = np.array([results.finals(t, CORE) for t in tasks])
    timed = np.array([[results.at_equal_time(t, n) for n in CORE] for t in tasks])
    timed = timed[~np.isnan(timed).any(1)]
    best = np.array([[results.best(t, n) for n in CORE] for t in tasks])
    ranks = [mean_ranks(x) for x in (table, timed, best)]
    rows = [
        (name, *(f"{rank[k]:.2f}" for rank in ranks), *_relative(results, tasks, name))
        for k, name in enumerate(CORE)
    ]
    parts = [
        f"<h2>Tuned, {len(tasks)} tasks</h2>",
        _table(
            ("", "mean rank, equal steps", "equal time", "lowest loss on the way",
             "loss / AdamW's, geometric mean", "95 % interval"),
            rows,
        ),
        _losses(results, tasks, CORE),
        *_classifications(results, tasks),
        "<h2>Until AdamW's final loss</h2><p>Shares of tuned AdamW's steps and CPU seconds; – where "
        "it is not reached. The last two columns: until tuned Muon's and SOAP's, of their own.</p>",
        _table(
            ("", "RPT: steps", "seconds", "Muon: steps", "seconds", "SOAP: steps", "seconds",
             "RPT to Muon's: steps", "seconds", "RPT to SOAP's: steps", "seconds"),
            [
                (
                    t,
                    *(_share(x) for n in CORE[1:] for x in results.to_target(t, n)),
                    *(_share(x) for n in CORE[2:] for x in results.to_target(t, "rpt", n)),
                )
                for t in tasks
            ],
        ),
        "<h2>Pictures</h2>",
    ]  # fmt: skip
    pictures = {
        "ratios": plots.ratios(results, tasks, CORE[1:]),
        "profile": plots.profiles(table, timed if len(timed) else table, CORE),
        "curves_steps": plots.curves(results, tasks, CORE, "step"),
        "curves_seconds": plots.curves(results, tasks, CORE, "cpu"),
        "sensitivity": plots.sensitivity(results, tasks, CORE),
    }
    return parts + [_picture(figure, name, out) for name, figure in pictures.items()]


def _classifications(results: Results, tasks: Iterable[str]) -> list[str]:
    rows = results.classifications(tasks)
    if not rows:
        return []
    note = "<h2>Classifications</h2><p>Final loss / lowest on the way / final accuracy in per cent.</p>"
    return [note, _table(("", *CORE), rows)]


def _relative(results: Results, tasks: Iterable[str], name: str) -> tuple[str, str]:
    if name == "adamw":
        return "1", ""
    mean, low, high = bootstrap(results.log_ratios(tasks, name, "adamw").values())
    return f"{math.exp(mean):.3f}", f"{math.exp(low):.3f} to {math.exp(high):.3f}"


def _losses(results: Results, tasks: Iterable[str], names: Sequence[str]) -> str:
    rows = []
    for task in tasks:
        values = results.finals(task, names)
        lowest = min(v for v in values if not math.isnan(v))
        cells = []
        for name, value in zip(names, values, strict=True):
            edge = "*" if _at_edge(results, task, name) else ""
            text = f"{value:.4g}{edge} <small>({results.rate(task, name) or 0:g})</small>"
            cells.append(f"<b>{text}</b>" if value == lowest else text)
        rows.append((task, TASKS[task].group, *cells))
    note = "<p>Final loss (rate). *: the best rate is at an end of the grid.</p>"
    return note + _table(("", "", *names), rows)


def _at_edge(results: Results, task: str, name: str) -> bool:
    grid = [rate for rate, _ in results.tuning(task, name)]
    return bool(grid) and results.rate(task, name) in (grid[0], grid[-1])


def _defaults(results: Results, suite: Suite) -> list[str]:
    rows = []
    for task in suite.tasks:
        ours, theirs = results.finals(task, [(n, PEERS[n].rate) for n in ("rpt", "adamw")])
        if not math.isnan(ours + theirs):
            rows.append((task, f"{ours:.4g}", f"{theirs:.4g}", f"{ours / theirs:.3f}"))
    if not rows:
        return []
    rows.sort(key=lambda row: -float(row[3]))
    return [
        "<h2>Both at their default rate</h2>",
        _table(("", "RPT", "AdamW", "ratio"), rows),
    ]


def _without_schedule(results: Results, suite: Suite) -> list[str]:
    flat = [t for t in suite.tasks if TASKS[t].schedule == "constant"]
    names = [n for n in (*CORE, *suite.constant) if results.complete(flat, [n])]
    if not names:
        return []
    return ["<h2>At a constant rate</h2>", _losses(results, results.complete(flat, names), names)]


def _others(results: Results) -> list[str]:
    tasks, names, _ = results.peers()
    if not tasks:
        return []
    ranks = mean_ranks(np.array([results.finals(t, names) for t in tasks]))
    return [
        f"<h2>All peers on {len(tasks)} tasks</h2>",
        _table(
            ("", "mean rank", "says"),
            [(n, f"{r:.2f}", PEERS[n].says) for r, n in sorted(zip(ranks, names, strict=True))],
        ),
        _losses(results, tasks, names),
    ]


def ablation_rows(results: Results, suite: Suite) -> list[tuple[str, float, float, float]]:
    """(name, mean log ratio to RPT, low, high) over the subset's tasks."""
    rows = []
    for name in suite.ablations:
        found = results.log_ratios(suite.subset, name, "rpt")
        if found:
            rows.append((name, *bootstrap(found.values())))
    return sorted(rows, key=lambda row: row[1])


def _ablations(results: Results, suite: Suite, out: Path) -> list[str]:
    rows = ablation_rows(results, suite)
    if not rows:
        return []
    cells = []
    for name, mean, low, high in rows:
        ratios = results.log_ratios(suite.subset, name, "rpt")
        cells.append(
            (
                name,
                PEERS[name].says,
                f"{math.exp(mean):.3f}",
                f"{math.exp(low):.3f} to {math.exp(high):.3f}",
                *(
                    f"{math.exp(np.mean(ratios[t])):.3f}" if t in ratios else ""
                    for t in suite.subset
                ),
            )
        )
    return [
        "<h2>RPT with one thing changed</h2><p>Final loss over RPT's own at RPT's tuned rate (the "
        "paper preset at its best of three). Above 1: the change hurts.</p>",
        _table(("", "", "ratio", "95 % interval", *suite.subset), cells),
        _picture(plots.ablations(rows[::-1]), "ablations", out),
    ]


def _failures(store: Store) -> list[str]:
    rows = [
        (r["task"], r["optimizer"], f"{r['rate']:g}", r.get("error", "").strip().split("\n")[-1])
        for r in store.current()
        if r["diverged"]
    ]
    if not rows:
        return []
    return ["<h2>Diverged or failed</h2>", _table(("task", "optimizer", "rate", ""), rows)]


def _share(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "–"


def _table(header: Row, rows: Iterable[Row]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _picture(figure: Figure, name: str, out: Path) -> str:
    path = out / f"{name}.png"
    figure.savefig(path, dpi=110)
    plots.plt.close(figure)
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{name}" src="data:image/png;base64,{data}"></p>'
