"""The report's main numbers as Markdown, for RESULTS.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .analysis import Results, bootstrap, mean_ranks
from .peers import PEERS
from .store import Store
from .suites import CORE, TWO_FIFTHS, Suite
from .tasks import TASKS

__all__ = ["write_summary"]

Row = Sequence[object]


def write_summary(store: Store, suite: Suite, out: Path) -> Path:
    """Write `summary.md`: standing, language models, default rates, peers, ablations."""
    results = Results(store, suite)
    parts = [
        _standing(results, suite),
        _targets(results, suite),
        _two_fifths(results, suite),
        _defaults(results, suite),
        _same_rate(results, suite),
        _candidates(results, suite),
        _constant(results, suite),
        _peers(results),
        _ablations(results, suite),
        _losses(results, suite),
        _classifications(results, suite),
        _failures(results),
    ]
    path = out / "summary.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def _standing(results: Results, suite: Suite) -> str:
    tasks = results.complete(suite.tasks, CORE)
    if not tasks:
        return ""
    table = np.array([results.finals(t, CORE) for t in tasks])
    columns = [mean_ranks(table)]
    timed = np.array([[results.at_equal_time(t, n) for n in CORE] for t in tasks])
    columns.append(mean_ranks(timed[~np.isnan(timed).any(1)]))
    columns.append(mean_ranks(np.array([[results.best(t, n) for n in CORE] for t in tasks])))
    rows = []
    for k, name in enumerate(CORE):
        cells = [f"{column[k]:.2f}" for column in columns]
        ratio = "1"
        if name != "adamw":
            ratio = interval(bootstrap(results.log_ratios(tasks, name, "adamw").values()))
        wins = int((table[:, k] == table.min(1)).sum())
        share = [results.cost(t, name) for t in tasks]
        rows.append((name, *cells, wins, ratio, f"{np.exp(np.mean(np.log(share))):.2f}"))
    return f"## Tuned, {len(tasks)} tasks\n\n" + markdown(
        ("", "mean rank, equal steps", "equal time", "lowest loss", "best on",
         "loss / AdamW's (95 %)", "CPU time a run / AdamW's"),
        rows,
    )  # fmt: skip


def _targets(results: Results, suite: Suite) -> str:
    tasks = [t for t in results.complete(suite.tasks, CORE) if TASKS[t].group == "text"]
    rows = []
    for task in tasks:
        cells = []
        for yardstick in ("adamw", "muon", "soap"):
            steps, seconds = results.to_target(task, "rpt", yardstick)
            cells += [share(steps), share(seconds)]
        rows.append((task, *(f"{x:.3f}" for x in results.finals(task, CORE)), *cells))
    if not rows:
        return ""
    return "## RPT until a tuned peer's final loss, shares of its steps and CPU seconds\n\n" + (
        markdown(
            ("", *CORE, "AdamW's: steps", "seconds", "Muon's: steps", "seconds", "SOAP's: steps",
             "seconds"),
            rows,
        )
    )  # fmt: skip


def _two_fifths(results: Results, suite: Suite) -> str:
    rows = []
    for task in (t for t in suite.tasks if TASKS[t].group == "text"):
        loss, seconds = results.shortened(task, "rpt", TWO_FIFTHS)
        if not math.isnan(loss):
            theirs = results.final(task, "adamw")
            cells = (f"{theirs:.3f}", f"{loss:.3f}", f"{loss / theirs:.3f}", f"{seconds:.2f}")
            rows.append((task, *cells))
    if not rows:
        return ""
    return f"## RPT in {TWO_FIFTHS:g} of the steps, its schedule fitted to them\n\n" + markdown(
        ("", "AdamW, all steps", "RPT", "ratio", "CPU seconds / AdamW's"), rows
    )


def _defaults(results: Results, suite: Suite) -> str:
    others = [n for n in suite.untuned if n not in ("adamw", "rpt")]
    rows = []
    for task in suite.tasks:
        arms = [(n, PEERS[n].rate) for n in ("rpt", "adamw", *others)]
        ours, theirs, *rest = results.finals(task, arms)
        if not math.isnan(ours + theirs):
            losses = (ours, theirs, *rest, results.final(task, "adamw"))
            rows.append((ours / theirs, task, losses))
    if not rows:
        return ""
    rows.sort(reverse=True)
    mean = math.exp(np.mean([math.log(row[0]) for row in rows]))
    lower = sum(row[0] < 1 for row in rows)
    return (
        f"## {'All' if others else 'Both'} at their default rate\n\nRPT's loss over AdamW's: {mean:.3f} "
        f"in the geometric mean, lower on {lower} of {len(rows)}.\n\n"
    ) + markdown(
        ("", "ratio", "RPT", "AdamW", *others, "tuned AdamW"),
        [(task, f"{q:.3f}", *(f"{x:.4g}" for x in losses)) for q, task, losses in rows],
    )


def _same_rate(results: Results, suite: Suite) -> str:
    """What a script whose rate was tuned for AdamW gets by swapping the optimizer's line."""
    rows = []
    for task in suite.tasks:
        theirs = dict(results.tuning(task, "adamw"))
        ours = dict(results.tuning(task, "rpt"))
        rate, own = results.rate(task, "adamw"), results.rate(task, "rpt")
        if rate is None or own is None:
            continue
        lower = max((r for r in ours if r < 0.5 * rate), default=math.nan)
        cells = [x / theirs[rate] for x in (ours.get(rate, math.nan), ours.get(lower, math.nan))]
        rows.append((rate, *cells, task, theirs[rate], own))
    if not rows:
        return ""
    rows.sort(key=lambda row: (row[0], row[1]))
    return "## RPT at AdamW's tuned rate, tuning seed: loss over AdamW's\n\n" + markdown(
        ("", "AdamW's rate", "AdamW", "RPT there", "RPT at a third", "RPT's own rate"),
        [
            (task, f"{rate:g}", f"{loss:.4g}", _ratio(there), _ratio(third), f"{own:g}")
            for rate, there, third, task, loss, own in rows
        ],
    )


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else "diverged" if math.isinf(value) else f"{value:.3f}"


def _candidates(results: Results, suite: Suite) -> str:
    rows = []
    for task in suite.tasks:
        for name in suite.candidates:
            arms = [(n, PEERS[n].rate) for n in ("adamw", "rpt", name)]
            tuned = results.rate(task, "rpt")
            found = results.finals(task, arms)
            if not math.isnan(found[2]):
                found += results.finals(task, [("rpt", tuned), (name, tuned)])
                cells = ("" if math.isnan(x) else f"{x:.4g}" for x in found)
                rows.append((task, PEERS[name].says, *cells))
    if not rows:
        return ""
    return "## Candidates for the default\n\n" + markdown(
        ("", "", "AdamW, default rate", "RPT", "candidate", "RPT, its tuned rate", "candidate"),
        rows,
    )


def _constant(results: Results, suite: Suite) -> str:
    flat = [t for t in suite.tasks if TASKS[t].schedule == "constant"]
    rows = [
        (n, *(_cell(results, t, n) for t in flat))
        for n in dict.fromkeys((*CORE, *suite.constant))
        if any(results.runs(t, n) for t in flat)
    ]
    return "## At a constant rate (rate)\n\n" + markdown(("", *flat), rows) if rows else ""


def _peers(results: Results) -> str:
    """Ranks among those that ran on every task, over the seeds they share; the rest without one."""
    tasks, names, missing = results.peers()
    if not tasks:
        return ""
    table = np.array([results.finals(t, names) for t in tasks])
    ranked = sorted(zip(mean_ranks(table), names, table.T.tolist(), strict=True))
    rows = [
        (n, f"{rank:.2f}", *(_cell(results, t, n, x) for t, x in zip(tasks, losses, strict=True)))
        for rank, n, losses in ranked
    ]
    rows += [(n, "", *(_cell(results, t, n) for t in tasks)) for n in missing]
    return "## All peers (rate)\n\n" + markdown(("", "mean rank", *tasks), rows)


def _ablations(results: Results, suite: Suite) -> str:
    rows = []
    for name in suite.ablations:
        found = results.log_ratios(suite.subset, name, "rpt")
        if found:
            cells = [
                f"{math.exp(np.mean(found[t])):.3f}" if t in found else "" for t in suite.subset
            ]
            rows.append((bootstrap(found.values()), PEERS[name].says, cells))
    if not rows:
        return ""
    rows.sort(key=lambda row: row[0])
    return "## RPT with one thing changed: loss over RPT's\n\n" + markdown(
        ("", "geometric mean (95 %)", *suite.subset),
        [(says, interval(found), *cells) for found, says, cells in rows],
    )


def _losses(results: Results, suite: Suite) -> str:
    tasks = results.complete(suite.tasks, CORE)
    if not tasks:
        return ""
    rows = []
    for task in tasks:
        found = zip(CORE, results.finals(task, CORE), strict=True)
        rows.append((task, *(_cell(results, task, n, x) for n, x in found)))
    return "## Final held-out loss, tuned (rate)\n\n" + markdown(("", *CORE), rows)


def _classifications(results: Results, suite: Suite) -> str:
    rows = results.classifications(suite.tasks)
    if not rows:
        return ""
    return "## Classifications: final loss / lowest on the way / final accuracy, %\n\n" + markdown(
        ("", *CORE), rows
    )


def _failures(results: Results) -> str:
    """What raised: one line for every optimizer and message."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in results.store.current():
        if record.get("error"):
            message = record["error"].strip().split("\n")[-1].replace("|", "/")
            found.setdefault((record["optimizer"], message), []).append(record["task"])
    if not found:
        return ""
    return "## Did not run\n\n" + markdown(
        ("", "tasks", "error"),
        [(name, ", ".join(dict.fromkeys(tasks)), text) for (name, text), tasks in found.items()],
    )


def _cell(results: Results, task: str, name: str, value: float | None = None) -> str:
    value = results.final(task, name) if value is None else value
    return "" if math.isnan(value) else f"{value:.4g} ({results.rate(task, name) or 0:g})"


def interval(found: tuple[float, float, float]) -> str:
    """exp of (mean, low, high)."""
    mean, low, high = (math.exp(x) for x in found)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def share(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "–"


def markdown(header: Row, rows: Iterable[Row]) -> str:
    """A Markdown table, first column to the left."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
