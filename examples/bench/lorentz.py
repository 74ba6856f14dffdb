"""Lorentz layers against ambient arithmetic, geoopt and hypll: accuracy, reach, time, memory.

    python examples/bench/lorentz.py                       # everything, into ./runs/lorentz
    python examples/bench/lorentz.py --parts accuracy      # one part: accuracy, expressivity,
                                                           # attention
geoopt and hypll take part where they are installed and have the operation. Times are ratios'
worth: all contestants run interleaved in one process, medians of 15.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import rpt.geometry.lorentz as lorentz
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from baselines import ambient
from bench.lorentz_libraries import DOUBLE, SINGLE, Library, cluster, libraries

Cluster = tuple[lorentz.Point, lorentz.Point]

# --- accuracy against radius (the paper's Table 7) -----------------------------------------------

BOUNDS = {
    "squared distance": (4e-7, 1.5e-5, 8e-4),
    "centroid": (2e-6, 8e-5, 4.5e-3),
    "gyro centring": (2e-6, 1e-4, 5e-3),
}


def median_error(errors: list[Tensor]) -> float:
    """Median over all points and seeds; a point without a number counts as infinitely wrong."""
    values = torch.cat([e.detach().double().reshape(-1) for e in errors])
    return float(torch.where(values.isnan(), torch.inf, values).median())


def geodesic(found: lorentz.Point, exact: lorentz.Point) -> Tensor:
    """Distance from what was found to the truth, NaN where what was found is no point."""
    sane = found.a.isfinite() & found.u.isfinite().all(-1)
    safe = lorentz.Point(
        torch.where(sane, found.a, 0.0), torch.where(sane.unsqueeze(-1), found.u, 0.0)
    )
    return torch.where(sane, lorentz.distance(safe, exact), torch.nan)


def errors_at(radius: float, library: Library, seeds: range) -> dict[str, float | None]:
    """Median errors at one radius against float64 of the unrounded points."""
    collected: dict[str, list[Tensor]] = {name: [] for name in BOUNDS}
    for seed in seeds:
        x = cluster(radius, seed)
        left = lorentz.Point(x.a[:, None], x.u[:, None])
        right = lorentz.Point(x.a[None], x.u[None])
        apart = ~torch.eye(len(x.a), dtype=torch.bool)
        exact = lorentz.squared_distance(left, right)[apart]
        squared = library.squared_distance(left, right)
        if squared is not None:
            relative = (squared.double()[apart] - exact).abs() / exact
            collected["squared distance"].append(relative)
        mean = lorentz.centroid(x)
        found = library.centroid(x)
        if found is not None:
            collected["centroid"].append(geodesic(found, mean))
        at = lorentz.Point(mean.a.unsqueeze(0), mean.u.unsqueeze(0))
        centred = library.centring(at, x)
        if centred is not None:
            truth = lorentz.gyro_add(lorentz.gyro_negate(at), x)
            collected["gyro centring"].append(geodesic(centred, truth))
    return {name: median_error(e) if e else None for name, e in collected.items()}


def accuracy(out: Path, seeds: int) -> dict:
    """Table 7, and where each library stops being right, radius by radius."""
    radii = [0.5 * step for step in range(2, 41)]
    table: dict[str, dict[str, list[float | None]]] = {}
    for name, library in libraries().items():
        table[name] = {operation: [] for operation in BOUNDS}
        for radius in radii:
            for operation, error in errors_at(radius, library, range(seeds)).items():
                table[name][operation].append(error)
    print(f"\nAccuracy in float32 against float64: median over {seeds} clusters of 64 points")
    for operation, bounds in BOUNDS.items():
        print(f"\n{operation:24s} {'r = 4':>10s} {'8':>10s} {'12':>10s} {'17':>10s}   fails from")
        print(f"{'  must be ≤':24s} " + " ".join(f"{b:10.1e}" for b in bounds))
        for name, rows in table.items():
            row = rows[operation]
            if row[0] is None:
                print(f"  {name:22s} has no such operation")
                continue
            shown = [row[radii.index(r)] for r in (4.0, 8.0, 12.0, 17.0)]
            # Wrong: half of the squared distance, or half of the spread.
            wrong = [r for r, error in zip(radii, row, strict=True) if error > 0.5]
            failing = f"r = {wrong[0]}" if wrong else "not up to 20"
            print(f"  {name:22s} " + " ".join(f"{e:10.1e}" for e in shown) + f"   {failing}")
    plot_accuracy(out / "accuracy.png", radii, table)
    return {"radii": radii, "errors": table}


def plot_accuracy(path: Path, radii: list[float], table: dict) -> None:
    """Error against radius, one panel per operation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), sharex=True)
    for axis, operation in zip(axes, BOUNDS, strict=True):
        for name, rows in table.items():
            if rows[operation][0] is not None:
                shown = [min(e, 1e4) for e in rows[operation]]
                axis.semilogy(radii, shown, label=name)
        axis.semilogy([4, 8, 12], BOUNDS[operation], "k_", markersize=14, label="bound")
        axis.semilogy(
            radii, [2.0**-24 * (r + math.sinh(r)) for r in radii], "k:", label="resolution limit"
        )
        axis.set(title=operation, xlabel="radius", ylim=(1e-8, 2e4))
    axes[0].set_ylabel("median error in float32")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# --- expressivity (the paper's Figure 1) ---------------------------------------------------------


def iterations_to_target(
    radius: float, dtype: torch.dtype, start: str, seed: int, clip: float | None, limit: int
) -> int:
    """SGD steps (rate 1e-3) of one PolarLinear until its output is within 0.1 of the target.

    The "aligned" start has input and target on e₁ and W = [0 | ½I]; "random" draws the input (at
    radius 1), the target's direction and W. The loss is the polar distance.
    """
    n = 8
    generator = torch.Generator().manual_seed(seed)
    layer = lorentz.PolarLinear(n, n).to(dtype)
    u, goal = torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)
    if start == "aligned":
        u[0] = goal[0] = 1.0
        with torch.no_grad():
            layer.direction.weight.zero_()
            layer.direction.weight[:, 1:] = 0.5 * torch.eye(n, dtype=dtype)
    else:
        u, goal = (torch.randn(n, generator=generator, dtype=DOUBLE) for _ in range(2))
        u, goal = (u / u.norm()).to(dtype), (goal / goal.norm()).to(dtype)
        with torch.no_grad():
            weight = torch.randn(n, n + 1, generator=generator, dtype=DOUBLE) / math.sqrt(n)
            layer.direction.weight.copy_(weight)
    x = lorentz.Point(torch.ones((), dtype=dtype), u)
    target = lorentz.Point(torch.tensor(radius, dtype=dtype), goal)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for step in range(limit):
        optimizer.zero_grad()
        loss = lorentz.squared_distance(layer(x), target)
        # One read per step: this experiment counts steps, it does not time them.
        if float(loss.detach()) < 0.01:
            return step
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(layer.parameters(), clip)
        optimizer.step()
    return limit


def expressivity(out: Path, limit: int, seeds: int) -> dict:
    """Iterations against target radius."""
    radii = list(range(1, 19))
    rows = {}
    print("\nIterations until a layer is within 0.1 of a target at radius 1 … 18 (SGD, 1e-3)")
    for start, count in (("aligned", 1), ("random", seeds)):
        for dtype in (SINGLE, DOUBLE):
            means = []
            for radius in radii:
                runs = [
                    iterations_to_target(radius, dtype, start, seed, None, limit)
                    for seed in range(count)
                ]
                means.append(statistics.mean(runs))
            name = f"{start}, {str(dtype).split('.')[-1]}"
            rows[name] = means
            print(
                f"  {name:18s} " + " ".join(f"{m:.0f}" for m in means) + f"   max {max(means):.0f}"
            )
    (out / "expressivity.json").write_text(json.dumps({"radii": radii, "iterations": rows}))
    plot_expressivity(out / "expressivity.png", radii, rows)
    return {"radii": radii, "iterations": rows}


def plot_expressivity(path: Path, radii: list[int], rows: dict[str, list[float]]) -> None:
    """Iterations against radius."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 4))
    for name, means in rows.items():
        axis.semilogy(radii, means, "o-", label=name)
    axis.axhline(650, color="k", linestyle=":", label="650")
    axis.set(xlabel="target radius", ylabel="iterations")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# --- attention: time and peak memory -------------------------------------------------------------

SHAPES = [(8, 12, 65, 16), (4, 4, 512, 32)]


def attention_functions(
    shape: tuple[int, int, int, int],
) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions and inputs: polar blocked and dense, ambient, Euclidean, on the same vectors."""
    batch, heads, tokens, n = shape
    generator = torch.Generator().manual_seed(0)
    vectors = [0.6 * torch.randn(batch, heads, tokens, n, generator=generator) for _ in range(3)]
    points = [lorentz.exp_map_origin(v) for v in vectors]
    gain = torch.tensor(n**-0.5)

    def polar(function: Callable[..., lorentz.Point]) -> Callable[..., Tensor]:
        def run(qa: Tensor, qu: Tensor, ka: Tensor, ku: Tensor, va: Tensor, vu: Tensor) -> Tensor:
            query = lorentz.polar_score_coordinates((qa, qu))
            key = lorentz.polar_score_coordinates((ka, ku))
            out = function(query, key, (va, vu), gain)
            return out.a.sum() + out.u.sum()

        return run

    def ambient_run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ambient.ambient_attention(q, k, v, gain).sum()

    def euclidean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).sum()

    flat = [t.detach().requires_grad_() for point in points for t in point]
    coordinates = [lorentz.to_ambient(point).detach().requires_grad_() for point in points]
    plain = [v.requires_grad_() for v in vectors]
    return {
        "polar blocked": (polar(lorentz.blocked_attention), flat),
        "polar dense": (polar(lorentz.dense_attention), flat),
        "ambient": (ambient_run, coordinates),
        "euclidean": (euclidean, plain),
    }


def once(function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Forward and backward, gradients thrown away."""
    torch.autograd.grad(function(*inputs), inputs)


def attention_times(shape: tuple[int, int, int, int], compiled: bool, repeats: int) -> dict:
    """Median CPU milliseconds of forward and backward, all contestants interleaved.

    One thread, so CPU time is run time, whatever else the machine does.
    """
    functions = attention_functions(shape)
    if compiled:
        functions.pop("polar dense")
        functions = {
            name: (torch.compile(f, fullgraph=True), inputs)
            for name, (f, inputs) in functions.items()
        }
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function, inputs in functions.values():
        for _ in range(3):
            once(function, inputs)
    for _ in range(repeats):
        for name, (function, inputs) in functions.items():
            start = time.process_time()
            once(function, inputs)
            times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_memory(name: str, shape: tuple[int, int, int, int]) -> float:
    """Peak MB above the inputs of one forward and backward, in a fresh process (Linux)."""
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import lorentz as bench\n"
        "def read(name):\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith(name))\n"
        f"f, inputs = bench.attention_functions({shape})[{name!r}]\n"
        "small = bench.attention_functions((1, 1, 8, 4))\n"
        f"bench.once(*small[{name!r}])\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"
        "before = read('VmRSS')\n"
        "bench.once(f, inputs)\n"
        "print(read('VmHWM') - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    return float(result.stdout.strip().splitlines()[-1]) / 1024.0


def attention(out: Path, repeats: int, compile_too: bool) -> dict:
    """Time and peak memory at both shapes."""
    results = {}
    for shape in SHAPES:
        for compiled in (False, True) if compile_too else (False,):
            times = attention_times(shape, compiled, repeats)
            label = f"{shape} {'compiled' if compiled else 'eager'}"
            ratio = times["polar blocked"] / times["ambient"]
            against = times["polar blocked"] / times["euclidean"]
            results[label] = times
            shown = ", ".join(f"{name} {value:.1f} ms" for name, value in times.items())
            print(f"\nAttention forward + backward {label}: {shown}")
            print(f"  polar : ambient = {ratio:.2f}, polar : euclidean = {against:.2f}")
        peaks = {
            name: peak_memory(name, shape)
            for name in ("polar blocked", "polar dense", "ambient", "euclidean")
        }
        results[f"{shape} peak MB"] = peaks
        print("  peak memory: " + ", ".join(f"{name} {mb:.0f} MB" for name, mb in peaks.items()))
    return results


def main() -> None:
    """Parse arguments and run the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="accuracy,expressivity,attention")
    parser.add_argument("--out", type=Path, default=Path("runs/lorentz"))
    parser.add_argument("--seeds", type=int, default=20, help="clusters per radius")
    parser.add_argument("--limit", type=int, default=10_000, help="SGD steps at most")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results = {}
    parts = options.parts.split(",")
    if "accuracy" in parts:
        results["accuracy"] = accuracy(options.out, options.seeds)
    if "expressivity" in parts:
        results["expressivity"] = expressivity(options.out, options.limit, seeds=3)
    if "attention" in parts:
        results["attention"] = attention(options.out, options.repeats, not options.no_compile)
    (options.out / "results.json").write_text(json.dumps(results))
    print(f"\nWritten to {options.out}")


if __name__ == "__main__":
    main()
