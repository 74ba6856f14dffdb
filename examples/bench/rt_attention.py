"""Polar attention beside PyTorch's scaled dot-product attention: time, memory, agreement of paths.

    python examples/bench/rt_attention.py [--quick] [--rounds 5] [--output rt_attention.png]

Causal forward + backward of the attention proper, between projections, batch 4, heads 4; contenders
take turns, and the smallest processor time of each counts. `d` is the number of real features per head:
complex dimension d/2, so that both multiply equally wide vectors. Memory is the largest sum of live
tensors in forward + backward as PyTorch's allocator counts it, batch 1, two heads of 16 features.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import matplotlib
import torch
from rpt.geometry.rt_filter import PolarAttention
from rpt.geometry.rt_filter.logits import PolarSettings
from rpt.geometry.rt_filter.parameters import FilterScalars
from rpt.geometry.rt_filter.paths.dense import PolarInputs, polar_estimate
from rpt.geometry.rt_filter.paths.slabs import slab_estimate
from rpt.geometry.rt_filter.visibility import Visibility
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH, HEADS = 4, 4


def inputs_for(
    batch: int, heads: int, tokens: int, features: int, dtype: torch.dtype = torch.float32
) -> tuple[PolarInputs, FilterScalars]:
    def unit() -> Tensor:
        x = torch.randn(batch, heads, tokens, features, dtype=dtype)
        return F.normalize(x, dim=-1).requires_grad_()

    def magnitude() -> Tensor:
        return (torch.rand(batch, heads, tokens, dtype=dtype) + 0.5).requires_grad_()

    scalars = (torch.rand(heads, dtype=dtype) + 0.5 for _ in FilterScalars._fields)
    return (
        PolarInputs(unit(), unit(), unit(), magnitude(), magnitude()),
        FilterScalars(*(s.requires_grad_() for s in scalars)),
    )


def best_times(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    for run in contenders.values():
        run()
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            # Processor time of one thread: other processes do not enter it.
            started = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - started)
    return best


def times(tokens: int, features: int, rounds: int) -> dict[str, float]:
    q, k, v = (torch.randn(BATCH, HEADS, tokens, features, requires_grad=True) for _ in range(3))
    inputs, scalars = inputs_for(BATCH, HEADS, tokens, features)
    grid = torch.arange(tokens, dtype=torch.float64)[None]
    view = Visibility(grid, grid, True)

    def standard() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    def fast(settings: PolarSettings) -> Callable[[], None]:
        def run() -> None:
            found = slab_estimate(inputs, view, scalars, settings, 0)
            (found.direction.sum() + found.magnitude.sum()).backward()

        return run

    def dense() -> None:
        found = polar_estimate(inputs, view, scalars, PolarSettings())
        (found.direction.sum() + found.magnitude.sum()).backward()

    contenders: dict[str, Callable[[], object]] = {
        "SDPA": standard,
        "polar": fast(PolarSettings()),
        "polar, shared radial weights": fast(PolarSettings(radial="shared")),
        "polar, no radial estimate": fast(PolarSettings(radial="off")),
    }
    if tokens <= 512:
        contenders["polar, dense reference"] = dense
    return best_times(contenders, rounds)


def peak_memory(tokens: int, times_given: bool) -> float:
    layer = PolarAttention(32, 2, head_dim=8)
    x = torch.randn(1, tokens, 32, requires_grad=True)
    call = {"times": torch.arange(tokens) * 0.5} if times_given else {}
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profile:
        layer(x, **call).sum().backward()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak / 2**20


def deviations(tokens: int) -> None:
    """Largest deviation of the fast path, and of the dense one, from the dense path in float64."""
    torch.manual_seed(0)
    inputs, scalars = inputs_for(2, 4, tokens, 32)
    grid = torch.arange(tokens, dtype=torch.float64)[None]
    view = Visibility(grid, grid, True)

    def run(dtype: torch.dtype, fast: bool) -> list[Tensor]:
        moved = PolarInputs(*(t.detach().to(dtype).requires_grad_() for t in inputs))
        numbers = FilterScalars(*(t.detach().to(dtype).requires_grad_() for t in scalars))
        if fast:
            found = slab_estimate(moved, view, numbers, PolarSettings(), 0)
        else:
            found = polar_estimate(moved, view, numbers, PolarSettings())
        weight = torch.linspace(-1, 2, found.direction.numel()).sin().view_as(found.direction)
        loss = (found.direction * weight.to(dtype)).sum() + found.magnitude.sum()
        # The process noise is switched on here, too: all thirteen numbers have gradients.
        grads = torch.autograd.grad(loss, [*moved, *numbers])
        return [found.direction, found.magnitude, *grads]

    exact = run(torch.float64, False)
    for name, result in (
        ("fast float64", run(torch.float64, True)),
        ("fast float32", run(torch.float32, True)),
        ("dense float32", run(torch.float32, False)),
    ):
        gaps = [float((a - b).abs().max().detach()) for a, b in zip(result, exact, strict=True)]
        sizes = [float(b.abs().max().detach()) for b in exact]
        relative = max(g / s for g, s in zip(gaps[2:], sizes[2:], strict=True))
        print(
            f"  {name:14s} against dense float64, N = {tokens}: outputs {max(gaps[:2]):.1e},"
            f" gradients {relative:.1e} of each gradient's largest entry"
        )


def agreement() -> None:
    """Full, chunked and stepwise passes of one layer."""
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32):
        layer = PolarAttention(64, 4).to(dtype)
        x = torch.randn(2, 64, 64, dtype=dtype)
        with torch.no_grad():
            full = layer(x)
            gaps = []
            for cuts in ([0, 40, 50, 64], range(65)):
                cache, parts = layer.new_cache(), []
                for start, stop in zip(cuts, list(cuts)[1:], strict=False):
                    parts.append(layer(x[:, start:stop], cache=cache))
                gaps.append(float((torch.cat(parts, 1) - full).abs().max()))
        print(f"  {dtype}: chunked {gaps[0]:.1e}, stepwise {gaps[1]:.1e} from the full pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to 512 tokens, two rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], help="time, memory, paths")
    parser.add_argument("--output", default="rt_attention.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 2 if arguments.quick else arguments.rounds
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    if "paths" not in arguments.skip:
        print("Agreement of paths:")
        deviations(128 if arguments.quick else 512)
        print("Agreement with the cache:")
        agreement()
    if "time" not in arguments.skip:
        cases = [(512, 32), (512, 64)] + ([] if arguments.quick else [(2048, 32), (2048, 64)])
        for offset, (tokens, features) in enumerate(tqdm(cases, desc="time")):
            found = times(tokens, features, rounds if tokens < 1000 else max(2, rounds - 2))
            tqdm.write(f"B{BATCH} H{HEADS} N{tokens} d{features}, forward + backward:")
            for place, (name, seconds) in enumerate(found.items()):
                ratio = seconds / found["SDPA"]
                tqdm.write(f"  {name:30s} {1e3 * seconds:8.1f} ms   {ratio:5.2f} × SDPA")
                axes[0].bar(
                    offset + 0.15 * place, ratio, 0.15, color=f"C{place}",
                    label=name if offset == 0 else None,
                )  # fmt: skip
        axes[0].set_xticks([i + 0.3 for i in range(len(cases))], [f"N{n} d{d}" for n, d in cases])
        axes[0].set_ylabel("time / time of SDPA")
        axes[0].legend(fontsize=7)
    if "memory" not in arguments.skip:
        lengths = [512, 1024] if arguments.quick else [1024, 2048, 4096, 8192]
        curves: dict[str, list[float]] = {"default positions": [], "given times": []}
        for tokens in tqdm(lengths, desc="memory"):
            for label, peaks in curves.items():
                if label == "given times" and tokens > 4096:
                    continue
                peaks.append(peak_memory(tokens, label == "given times"))
                tqdm.write(
                    f"N {tokens:5d}, {label:18s} peak {peaks[-1]:7.1f} MiB; one N×N weight"
                    f" tensor for two heads would be {2 * 4 * tokens**2 / 2**20:.0f} MiB"
                )
        for label, peaks in curves.items():
            axes[1].plot(lengths[: len(peaks)], peaks, "-o", label=label)
        axes[1].plot(lengths, [8 * n * n / 2**20 for n in lengths], "--", label="one N×N tensor")
        axes[1].set(xscale="log", yscale="log", xlabel="tokens N", ylabel="peak memory (MiB)")
        axes[1].legend()
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=120)
    print(f"Saved {arguments.output}")


if __name__ == "__main__":
    main()
