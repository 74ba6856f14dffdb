"""What several processes cost and save: measured on this machine, and simulated for large ones.

    python examples/bench/distributed.py --measure 1 2 4      # step() time, bytes, state per process
    python examples/bench/distributed.py --simulate           # 8-1024 ranks, 1.3 B and 70 B models
    python examples/bench/distributed.py --costs              # the constants of the planner's cost model

The simulation runs the library's own planner on the shapes of the model. Times are the plan's work
divided by `--rate` multiply-adds per second, and bytes divided by `--bandwidth`: what they say is how
work and traffic divide, not how fast a particular machine is.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import rpt
from rpt.demo.model import LanguageModel
from rpt.demo.text import VOCABULARY_SIZE
from rpt.distributed import CostModel, Item, Plan, make_plan
from rpt.options import preset_options

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


# -- measured ---------------------------------------------------------------------------------------


def _build(mode: str, width: int, layers: int) -> tuple[nn.Module, rpt.ResidualPolarTransport]:
    torch.manual_seed(0)
    model: nn.Module = LanguageModel(VOCABULARY_SIZE, 64, width, layers, 8)
    if mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    ownership = "replicated" if mode == "replicated" else "auto"
    return model, rpt.ResidualPolarTransport(model.parameters(), 3e-3, ownership=ownership)


def _time_steps(mode: str, width: int, layers: int, steps: int) -> dict[str, float]:
    """Seconds of `step()` with given gradients; no model is run, so nothing else is timed.

    By the clock (median over steps, which holds the waiting for other ranks) and of this process's own
    processor time (mean over steps, so that root refreshes count with their share).
    """
    model, optimizer = _build(mode, width, layers)
    seconds, work = [], []
    for n in range(steps + 2):
        generator = torch.Generator().manual_seed(n)
        for p in model.parameters():
            local = p.to_local() if hasattr(p, "to_local") else p
            gradient = torch.randn(local.shape, generator=generator)
            p.grad = torch.zeros_like(p)
            (p.grad.to_local() if hasattr(p, "to_local") else p.grad).copy_(gradient)
        if dist.is_initialized():
            dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        optimizer.step()
        work.append(time.process_time() - worked)
        if dist.is_initialized():
            dist.barrier()
        seconds.append(time.perf_counter() - started)
    from rpt.distributed import report

    mine = report(optimizer) if dist.is_initialized() else {"wire_bytes": 0}
    state = [v for r in optimizer.state.values() for v in r.values() if isinstance(v, torch.Tensor)]
    ordered = sorted(seconds[2:])
    return {
        "seconds": ordered[len(ordered) // 2],
        "mean": sum(seconds[2:]) / len(seconds[2:]),
        "work": sum(work[2:]) / len(work[2:]),
        "state": sum(t.numel() * t.element_size() for t in state),
        "wire": mine["wire_bytes"],
        "balance": mine["teams"][0]["balance"] if mine.get("teams") else 1.0,
    }


def _rank(rank: int, size: int, folder: str, *args: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=5),
    )
    torch.save(_time_steps(*args), Path(folder) / f"{rank}")  # type: ignore[arg-type]
    dist.destroy_process_group()


def measure(counts: list[int], width: int, layers: int, steps: int) -> None:
    torch.set_num_threads(1)
    alone = _time_steps("single", width, layers, steps)
    size = sum(p.numel() for p in _build("single", width, layers)[0].parameters())
    print(f"width {width}, {layers} layers, {size / 1e6:.1f} M parameters, {os.cpu_count()} cores")
    print(
        f"{'mode':12}{'processes':>10}{'step':>9}{'mean':>9}{'ratio':>7}{'CPU':>9}{'ratio':>7}"
        f"{'state/rank':>12}{'sent/rank':>11}{'planned':>9}"
    )

    def show(mode: str, count: int, results: list[dict[str, float]]) -> None:
        mean, work = (max(r[key] for r in results) for key in ("mean", "work"))
        print(
            f"{mode:12}{count:>10}{max(r['seconds'] for r in results) * 1e3:>7.0f}ms{mean * 1e3:>7.0f}ms"
            f"{mean / alone['mean']:>7.2f}{work * 1e3:>7.0f}ms{work / alone['work']:>7.2f}"
            f"{max(r['state'] for r in results) / 2**20:>9.1f}MiB"
            f"{max(r['wire'] for r in results) / 2**20:>8.1f}MiB{results[0]['balance']:>9.2f}",
            flush=True,
        )

    show("single", 1, [alone])
    for mode in ("owner", "fsdp", "replicated"):
        for count in counts:
            if count == 1 or (mode == "replicated" and count != 2):
                continue
            with tempfile.TemporaryDirectory() as folder:
                args = (count, folder, mode, width, layers, steps)
                mp.start_processes(_rank, args, nprocs=count, start_method="fork")
                results = [torch.load(Path(folder) / f"{r}") for r in range(count)]
            show(mode, count, results)


# -- simulated --------------------------------------------------------------------------------------

Shape = tuple[str, int, int]


def gpt(width: int, layers: int, vocabulary: int) -> list[Shape]:
    """GPT-2/3 style: query, key and value in one matrix, four-fold MLP, tied embedding."""
    block = [
        ("qkv", 3 * width, width),
        ("out", width, width),
        ("up", 4 * width, width),
        ("down", width, 4 * width),
    ]
    return [("embedding", vocabulary, width)] + block * layers


def llama(width: int, layers: int, hidden: int, key_width: int, vocabulary: int) -> list[Shape]:
    """LLaMA style: separate matrices, gated MLP, untied embedding and head."""
    block = [
        ("q", width, width),
        ("k", key_width, width),
        ("v", key_width, width),
        ("o", width, width),
        ("gate", hidden, width),
        ("up", hidden, width),
        ("down", width, hidden),
    ]
    ends = [("embedding", vocabulary, width), ("embedding", vocabulary, width)]
    return ends + block * layers


MODELS = {
    "1.3 B, GPT": gpt(2048, 24, 50257),
    "1.3 B, LLaMA": llama(2048, 24, 5504, 2048, 32000),
    "70 B, LLaMA": llama(8192, 80, 28672, 1024, 32000),
}


def items_of(shapes: list[Shape], polar_embeddings: bool) -> list[Item]:
    from rpt.roots import resolve_roots

    options = preset_options("drop_in")
    backend = resolve_roots(options["roots"])
    if options["root_drift_threshold"] is None:
        backend = backend.without_drift()
    costs = CostModel(staleness=float(options["max_root_staleness"]))
    known: dict[tuple[int, int, int], float] = {}
    items = []
    for name, rows, cols in shapes:
        steps = options["polar_steps"] if polar_embeddings or name != "embedding" else 0
        key = (rows, cols, steps)
        if key not in known:
            known[key] = costs.matrix(rows, cols, backend, steps)
        items.append(Item(known[key], 4 * rows * cols, (min(rows, cols), max(rows, cols))))
    return items


def state_bytes(shapes: list[Shape]) -> list[int]:
    """Momentum, frame and metric of every matrix, in bytes."""
    from rpt.roots import resolve_roots

    backend = resolve_roots(preset_options("drop_in")["roots"]).without_drift()
    known: dict[tuple[int, int], int] = {}
    for _, rows, cols in shapes:
        if (rows, cols) not in known:
            known[rows, cols] = 8 * rows * cols + backend.state_bytes(rows, cols)
    return [known[rows, cols] for _, rows, cols in shapes]


def least_work(items: list[Item], ranks: int) -> float:
    """A bound that no plan of whole matrices can beat, for the busiest rank.

    Of the k·ranks + 1 dearest matrices some rank has k + 1, at least as dear as the cheapest of them.
    """
    costs = sorted((item.cost for item in items), reverse=True)
    bound = max(sum(costs) / ranks, costs[0])
    for count in range(1, (len(costs) - 1) // ranks + 1):
        last = count * ranks
        bound = max(bound, sum(costs[last - count : last + 1]))
    return bound


def schedule(
    items: list[Item], plan: Plan, rate: float, bandwidth: float
) -> tuple[float, float, float]:
    """(compute of the busiest rank, traffic alone, end of the last collective), in seconds.

    A bucket's results travel once its slowest rank has computed them and the bucket before is through;
    every rank receives the whole of it.
    """
    ranks = len(plan.work)
    done = [0.0] * ranks
    sent = end = 0.0
    for bucket in range(plan.buckets):
        nbytes = 0
        for index, item in enumerate(items):
            if plan.bucket[index] == bucket:
                done[plan.owner[index]] += item.cost / rate
                nbytes += item.nbytes
        # Sharded parameters (FSDP2): a rank receives its shards of all updates and sends its own
        # updates' shards; gradients travel the other way, beforehand.
        seconds = 2 * nbytes / ranks / bandwidth
        sent += seconds
        end = max(end, max(done)) + seconds
    return max(done), sent, end


def simulate(rate: float, bandwidth: float, output: str | None) -> None:
    print(
        f"{rate / 1e12:.0f} T multiply-adds/s per rank, {bandwidth / 1e9:.0f} GB/s per rank, FSDP2"
    )
    header = f"{'model':16}{'embeddings':>12}{'ranks':>7}{'balance':>9}{'limit':>8}{'busy':>7}"
    header += f"{'sent/rank':>11}{'state/rank':>12}{'compute':>10}{'traffic':>9}{'step':>9}"
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for name, shapes in MODELS.items():
        print(header)
        held = state_bytes(shapes)
        for polar in (True, False):
            items = items_of(shapes, polar)
            total = sum(item.cost for item in items)
            label = f"{name}, {'polar' if polar else 'plain'} embeddings"
            balances, steps = curves.setdefault(label, ([], []))
            for ranks in RANKS:
                plan = make_plan(items, ranks)
                compute, traffic, end = schedule(items, plan, rate, bandwidth)
                most = [0] * ranks
                for index, owner in enumerate(plan.owner):
                    most[owner] += held[index]
                limit = least_work(items, ranks) / (total / ranks)
                busy = sum(work > 0 for work in plan.work)
                sent = 2 * sum(item.nbytes for item in items) / ranks
                balances.append(plan.balance)
                steps.append(end)
                print(
                    f"{name:16}{'polar' if polar else 'plain':>12}{ranks:>7}{plan.balance:>9.2f}"
                    f"{limit:>8.2f}{busy:>7}{sent / 2**20:>8.0f}MiB{max(most) / 2**30:>9.2f}GiB"
                    f"{compute * 1e3:>8.1f}ms{traffic * 1e3:>7.1f}ms{end * 1e3:>7.1f}ms"
                )
    if output:
        plot(curves, output)


def plot(curves: dict[str, tuple[list[float], list[float]]], output: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for label, (balances, steps) in curves.items():
        style = "-" if "polar" in label else "--"
        left.plot(RANKS, balances, style, marker="o", ms=3, label=label)
        right.plot(RANKS, [1e3 * s for s in steps], style, marker="o", ms=3, label=label)
    left.axhline(1.1, color="grey", lw=0.8)
    left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="largest rank's work / mean")
    right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="critical path of step(), ms")
    left.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(output, dpi=150)
    print(f"wrote {output}")


# -- the cost model ---------------------------------------------------------------------------------


def _best(function: object, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()  # type: ignore[operator]
        times.append(time.perf_counter() - started)
    return min(times)


def measure_costs() -> None:
    """Time products, decompositions and elementwise passes, in the cost model's own units."""
    torch.set_num_threads(1)
    from torch import optim

    a = torch.randn(1, 512, 512)
    unit = _best(lambda: torch.bmm(a, a)) / 512**3
    gram = torch.bmm(a, a.mT)[0]
    eigh = _best(lambda: torch.linalg.eigh(gram), 3) / 512**3 / unit
    print(f"one multiply-add: {unit * 1e12:.1f} ps")
    print(f"eigh: {eigh:.1f} multiply-adds per n³ (the planner uses {CostModel().eigh})")
    weight = nn.Parameter(torch.randn(256, 2048))
    weight.grad = torch.randn(256, 2048)
    plain = rpt.ResidualPolarTransport([weight], 1e-3, roots="none", polar_prior=0.0)
    plain.step()
    element = _best(plain.step) / weight.numel() / unit
    print(
        f"elementwise: {element:.0f} multiply-adds per entry (the planner uses {CostModel().element})"
    )
    vector = nn.Parameter(torch.randn(64))
    vector.grad = torch.randn(64)
    small: optim.Optimizer = rpt.ResidualPolarTransport([vector], 1e-3)
    small.step()
    print(
        f"one call: {_best(small.step) / unit:.1e} multiply-adds (the planner uses {CostModel().call:.0e})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measure", type=int, nargs="*", metavar="PROCESSES")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--costs", action="store_true")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", type=float, default=2e14)
    parser.add_argument("--bandwidth", type=float, default=5e10)
    parser.add_argument("--output", help="file of the simulation's plot")
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure or [1, 2, 4], options.width, options.layers, options.steps)
    if options.simulate:
        simulate(options.rate, options.bandwidth, options.output)
    if options.costs:
        measure_costs()


if __name__ == "__main__":
    main()
