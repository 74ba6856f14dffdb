"""How a step's cost and state grow with width, for each root backend: a table, a plot, and two large models.

    python -m examples.bench.scale [--measured 1024] [--out scale.png]
    python -m examples.bench.scale --models | --flops | --launches | --paper | --mlp

For a square matrix of every width: nanoseconds and bytes per parameter. A step is put together from its
parts, each timed alone as the best of three on one thread: the rule without a metric, the metric's running
statistics and its application, and one refresh of its roots divided by the steps between two refreshes
(37 on average by default, of at most 50). Widths above `--measured` are computed from the largest
measured one: products and decompositions grow as the cube of the block's or factor's size times how many
there are, the rest as the number of entries.

`--models` adds two transformers on paper, of 1.3 and 7 billion parameters: state bytes from the backends'
own account of it, work from the cost model that shares matrices over ranks, for the busiest rank of 1, 8
and 64. Nothing is allocated for them. The other four are `examples.bench.operations`: operations per
matrix beside those of Muon, SOAP and AdamW; kernel launches of a GPT; a step's time on one H200, on paper;
and the training step of an MLP over AdamW's, measured.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

import rpt
from rpt.distributed import CostModel, Item, make_plan
from rpt.roots import Damping, RootBackend, resolve_roots

from .distributed import llama
from .operations import BETWEEN, flops_table, launch_table, mlp_table, paper_table

WIDTHS = (128, 256, 512, 1024, 2048, 4096)


def backends(width: int) -> dict[str, RootBackend]:
    names = {
        "full": "full(drift_from='age')",
        "blocked 64": "blocked(block_size=64, drift_from='age')",
        "blocked 128": "blocked(block_size=128, drift_from='age')",
        "blocked 256": "blocked(block_size=256, drift_from='age')",
        "low rank 32": "low_rank(rank=32)",
        "low rank n/8": f"low_rank(rank={width // 8})",
        "auto": "auto(drift_from='age')",
        "none": "none",
    }
    return {name: resolve_roots(text) for name, text in names.items()}


def best(function: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return min(times)


def rule_seconds(width: int) -> float:
    """A step without a metric: transport, closure, polar share, certificate, weights."""
    parameter = nn.Parameter(torch.randn(width, width) / width**0.5)
    parameter.grad = torch.randn(width, width)
    optimizer = rpt.ResidualPolarTransport([parameter], roots="none")
    optimizer.step()
    return best(optimizer.step)


def metric_seconds(backend: RootBackend, width: int) -> tuple[float, float]:
    """Statistics and application, and one refresh."""
    gradient = torch.randn(1, width, width) @ torch.diag(torch.linspace(0.05, 1, width))
    state = backend.create(1, width, width, dtype=torch.float32, device=gradient.device)
    correction, damping = torch.ones(1), Damping(1e-4, torch.zeros(1))

    def use() -> None:
        backend.accumulate(state, gradient, 0.95)
        backend.apply(state, gradient)

    use()
    refresh = best(lambda: backend.refresh(state, (width, width), correction, damping), 1)
    return best(use), refresh


class Grown:
    """Times at the widths that were measured, and what follows from the largest beyond them."""

    def __init__(self) -> None:
        self.rule: dict[int, float] = {}
        self.use: dict[tuple[str, int], float] = {}
        self.refresh: dict[tuple[str, int], float] = {}

    def measure(self, width: int) -> None:
        self.rule[width] = rule_seconds(width)
        for name, backend in backends(width).items():
            self.use[name, width], self.refresh[name, width] = metric_seconds(backend, width)

    def extrapolate(self, width: int) -> None:
        last = max(self.rule)
        self.rule[width] = self.rule[last] * (width / last) ** 3
        for name in backends(width):
            # Blocks, a fixed rank and no metric grow with the entries; a factor or n/8 with their cube.
            fixed = name not in ("full", "low rank n/8")
            growth = (width / last) ** (2 if fixed else 3)
            self.use[name, width] = self.use[name, last] * growth
            blocks = (width / last) ** (1 if fixed else 3)
            self.refresh[name, width] = self.refresh[name, last] * blocks

    def nanoseconds(self, name: str, width: int) -> float:
        seconds = self.rule[width] + self.use[name, width] + self.refresh[name, width] / BETWEEN
        return 1e9 * seconds / width**2


def state_bytes(backend: RootBackend, width: int) -> float:
    """Per parameter: momentum, frame and metric."""
    return 8 + backend.state_bytes(width, width) / width**2


def width_table(measured: int) -> Grown:
    grown = Grown()
    for width in WIDTHS:
        if width <= measured:
            grown.measure(width)
    largest = max(grown.rule)
    for width in WIDTHS:
        if width > largest:
            grown.extrapolate(width)
    names = list(backends(WIDTHS[0]))
    heading = "".join(f"{w:>10}{'*' if w > largest else ' '}" for w in WIDTHS)
    print(
        f"nanoseconds per parameter and step, refreshes spread out (* computed)\n{'':14}{heading}"
    )
    for name in names:
        row = "".join(f"{grown.nanoseconds(name, w):11.0f}" for w in WIDTHS)
        print(f"{name:14}{row}")
    print(f"\none refresh, nanoseconds per parameter\n{'':14}{heading}")
    for name in names:
        print(
            f"{name:14}" + "".join(f"{1e9 * grown.refresh[name, w] / w**2:11.0f}" for w in WIDTHS)
        )
    print(f"\nstate, bytes per parameter (AdamW: 8)\n{'':14}{heading}")
    for name in names:
        row = "".join(f"{state_bytes(backends(w)[name], w):11.1f}" for w in WIDTHS)
        print(f"{name:14}{row}")
    for name in names[1:-2]:
        cheaper = [w for w in WIDTHS if grown.nanoseconds(name, w) < grown.nanoseconds("full", w)]
        print(f"{name} is faster than full from width {min(cheaper) if cheaper else '—'}")
    return grown


def plot(grown: Grown, output: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for name in backends(WIDTHS[0]):
        style = "k--" if name == "none" else "-"
        speed.plot(WIDTHS, [grown.nanoseconds(name, w) for w in WIDTHS], style, label=name)
        memory.plot(WIDTHS, [state_bytes(backends(w)[name], w) for w in WIDTHS], style, label=name)
    memory.axhline(8, color="gray", linestyle=":", label="AdamW")
    for axes, title in ((speed, "time of a step"), (memory, "state")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("width of a square matrix")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    speed.set_ylabel("nanoseconds per parameter, one core")
    memory.set_ylabel("bytes per parameter")
    memory.legend(fontsize=8)
    figure.savefig(output, dpi=120)
    print(f"\nwrote {output}")


def model_table() -> None:
    models = {
        "1.3 B (2048 × 24 layers)": llama(2048, 24, 5504, 2048, 32_000),
        "7 B (4096 × 32 layers)": llama(4096, 32, 11008, 4096, 32_000),
    }
    names = ("full", "blocked 128", "low rank n/8", "auto")
    costs = CostModel(staleness=BETWEEN)
    print("\nper device, busiest rank: state in GB | multiply-adds of a step in units of AdamW's")
    for title, shapes in models.items():
        entries = sum(r * c for _, r, c in shapes)
        print(f"{title}, {entries / 1e9:.2f} B entries; AdamW's state {8 * entries / 1e9:.1f} GB")
        print(f"{'':14}" + "".join(f"{f'{ranks} ranks':>24}" for ranks in (1, 8, 64)))
        for name in names:
            cells = ""
            for ranks in (1, 8, 64):
                items, state = [], []
                for kind, *shape in shapes:
                    backend = backends(min(shape))[name]
                    if kind == "embedding":
                        # A vocabulary: no factor on its long side, no polar share.
                        backend = resolve_roots("auto(drift_from='age')")
                    cost = costs.matrix(*shape, backend, 0 if kind == "embedding" else 3)
                    items.append(Item(cost, 4 * shape[0] * shape[1], tuple(shape)))
                    state.append(8 * shape[0] * shape[1] + backend.state_bytes(*shape))
                plan = make_plan(items, ranks)
                held = [0.0] * ranks
                for owner, nbytes in zip(plan.owner, state, strict=True):
                    held[owner] += nbytes
                cells += f"{max(held) / 1e9:12.2f} |{max(plan.work) / (20 * entries / ranks):9.0f}"
            print(f"{name:14}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=int, default=1024, help="largest width timed (1024)")
    parser.add_argument("--out", default="scale.png", help="the plot (scale.png)")
    tables = {
        "models": (model_table, "two models on paper, shared over ranks"),
        "flops": (flops_table, "operations per matrix, counted"),
        "launches": (launch_table, "kernel launches of a GPT's step, counted"),
        "paper": (paper_table, "a step on one H200, from operations and bytes"),
        "mlp": (mlp_table, "training step of an MLP over AdamW's, measured"),
    }
    for name, (_, words) in tables.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"only: {words}")
    options = parser.parse_args()
    if options.measured < WIDTHS[0]:
        parser.error(f"--measured must be at least {WIDTHS[0]}")
    torch.set_num_threads(1)
    chosen = [table for name, (table, _) in tables.items() if getattr(options, name)]
    if not chosen:
        plot(width_table(options.measured), options.out)
        chosen = [model_table]
    for table in chosen:
        table()


if __name__ == "__main__":
    main()
