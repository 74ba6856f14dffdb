"""Cost of a whole ViT-Tiny step: Euclidean, ambient Lorentz, polar; eager and compiled.

    python examples/bench/polar_vit.py [--batch 8] [--repeats 15] [--no-compile]

One forward and backward pass on 32 × 32 images (64 tokens), all contestants interleaved, medians.
CPU milliseconds of one thread (or device milliseconds on CUDA). "ambient twin" computes Polar-ViT's
own function in ambient coordinates, with the gyro residual; "ambient, plain" is the starting point
of the paper's ablation: space-coordinate norms and residuals, no relative positions. Blocks are
compiled one by one, so that equal blocks compile once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rpt.geometry import lorentz
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from baselines import AmbientViT, EuclideanViT

# Numbers per token are kept, not computed again for every vector that they scale: for all models.
OPTIONS = {"realize_opcount_threshold": 8}
START = lorentz.ABLATION["split-head Lorentz ViT, class token"][1]


def contestants(size: str, device: str) -> dict[str, Any]:
    """The models, built alike."""
    torch.manual_seed(0)
    models: dict[str, Any] = {
        "euclidean": EuclideanViT.sized(size, 100, 32, patch_size=4),
        "ambient, plain": AmbientViT.sized(size, 100, 32, patch_size=4, **START),
        "ambient twin": AmbientViT.sized(size, 100, 32, patch_size=4, residual="gyro"),
        "polar": lorentz.PolarViT.sized(size, 100, 32, patch_size=4),
    }
    return {name: model.to(device) for name, model in models.items()}


def step_time(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Milliseconds of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    on_device = images.is_cuda
    if on_device:
        torch.cuda.synchronize()
    start = time.perf_counter() if on_device else time.process_time()
    nn.functional.cross_entropy(model(images), labels).backward()
    if on_device:
        torch.cuda.synchronize()
    return 1e3 * ((time.perf_counter() if on_device else time.process_time()) - start)


def measure(models: dict[str, Any], batch: int, repeats: int, device: str) -> dict[str, float]:
    """Medians, interleaved, after two steps of warm-up each."""
    images = torch.randn(batch, 3, 32, 32, device=device)
    labels = torch.randint(100, (batch,), device=device)
    for name, model in models.items():
        for _ in range(2):
            step_time(model, images, labels)
        print(f"  {name} ready", flush=True)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            times[name].append(step_time(model, images, labels))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="tiny", choices=list(lorentz.SIZES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = contestants(arguments.size, arguments.device)
    images = torch.randn(arguments.batch, 3, 32, 32, device=arguments.device)
    for model in list(models.values())[1:]:
        lorentz.calibrate_(model, images)
    rows = {"eager": measure(models, arguments.batch, arguments.repeats, arguments.device)}
    if not arguments.no_compile:
        for model in models.values():
            for block in model.blocks:
                block.compile(fullgraph=True, options=OPTIONS)
        rows["compiled"] = measure(models, arguments.batch, arguments.repeats, arguments.device)
    print("\n| ms | " + " | ".join(models) + " | polar : twin | polar : euclidean |")
    print("|---|" + "---|" * (len(models) + 2))
    for label, row in rows.items():
        values = " | ".join(f"{value:.0f}" for value in row.values())
        twin, flat = row["polar"] / row["ambient twin"], row["polar"] / row["euclidean"]
        print(f"| {label} | {values} | {twin:.2f} | {flat:.2f} |")


if __name__ == "__main__":
    main()
