"""Training far from the origin in float32, without clipping: Polar-ViT and its ambient twin.

    python examples/polar_vit_stability.py [--steps 150] [--radii 2 4 6 8 10 12 14]

Each class of scikit-learn's digits has a target point at distance R from the origin, one direction
each; a small vision transformer maps an image to a point, all of whose layers are calibrated to
radius R, and the loss is the cross-entropy of −distance to the targets. The twin has the same
parameters, drawn alike, the same batches and, in exact arithmetic, the same function; it computes in
ambient coordinates. Nothing is clipped or capped in either.

Printed: test accuracy (nearest target) and the step at which a loss stopped being finite, if any;
plotted: both against R, and the losses at two radii.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rpt.geometry import lorentz
from rpt.geometry.lorentz import ambient
from run_log import RunLog
from torch import Tensor, nn
from tqdm import tqdm
from vision_data import load

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES = {
    "patch_size": 2,
    "in_channels": 1,
    "width": 32,
    "depth": 2,
    "num_heads": 4,
    "mlp_width": 64,
}
MODELS: dict[str, type[Any]] = {"polar": lorentz.PolarViT, "ambient": lorentz.AmbientViT}


def targets(radius: float) -> lorentz.Point:
    """Ten points at this radius in orthogonal directions."""
    directions = torch.linalg.qr(
        torch.randn(32, 10, generator=torch.Generator().manual_seed(5)), mode="reduced"
    ).Q.mT
    return lorentz.Point(torch.full((10,), radius), directions.contiguous())


def distances(features: Any, goal: lorentz.Point) -> Tensor:
    """Distances of features to the targets (batch, 10), in the arithmetic the features came in."""
    if isinstance(features, Tensor):
        points = lorentz.to_ambient(goal)
        return ambient.ambient_distance(features.unsqueeze(1), points, eps=1e-6)
    return lorentz.pairwise_distance(features, goal)


def run(name: str, radius: float, seed: int, steps: int, rate: float) -> dict:
    torch.manual_seed(seed)
    data = load("digits", 64, seed)
    model = MODELS[name](lorentz.ViTConfig(10, 8, **SIZES))
    images, _ = next(iter(load("digits", 64, 999).train))
    # Calibrated as the polar model in both cases: the twin starts from the same numbers.
    first = lorentz.PolarViT(model.config)
    first.load_state_dict(model.state_dict())
    lorentz.calibrate_(first, images, target_radius=radius)
    model.load_state_dict(first.state_dict())
    goal = targets(radius)
    parameters = [p for n, p in model.named_parameters() if not n.startswith("head.")]
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    losses: list[float] = []
    failed = None
    batches = iter(())
    for step in range(steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(data.train)
            batch = next(batches)
        d = distances(model.features(batch[0]), goal)
        loss = nn.functional.cross_entropy(-d, batch[1])
        optimizer.zero_grad()
        loss.backward()
        finite = all(bool(p.grad.isfinite().all()) for p in parameters)
        losses.append(float(loss.detach()))
        if failed is None and not (math.isfinite(losses[-1]) and finite):
            failed = step
            break
        optimizer.step()
    right = total = 0
    with torch.no_grad():
        for held_out, labels in data.test:
            d = distances(model.features(held_out), goal)
            guess = torch.where(d.isnan(), math.inf, d).argmin(-1)
            right += int((guess == labels).sum())
            total += len(labels)
    return {"accuracy": right / total, "failed": failed, "losses": losses}


def plot(results: dict[str, dict[float, list[dict]]], path: Path) -> None:
    """Accuracy against radius, and losses at the middle and the largest shown radius."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for colour, (name, by_radius) in enumerate(results.items()):
        radii = sorted(by_radius)
        mean = [sum(100 * r["accuracy"] for r in by_radius[x]) / len(by_radius[x]) for x in radii]
        axes[0].plot(radii, mean, "o-", color=f"C{colour}", label=name)
        for radius, style in ((radii[len(radii) // 2], "-"), (radii[-2], ":")):
            losses = by_radius[radius][0]["losses"]
            axes[1].plot(losses, style, color=f"C{colour}", label=f"{name}, R = {radius:g}")
    axes[0].axhline(10, color="grey", linestyle=":", label="chance")
    axes[0].set(xlabel="radius R of targets and layers", ylabel="test accuracy, %")
    axes[1].set(xlabel="step", ylabel="loss", yscale="log")
    for axis in axes:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--radii", type=float, nargs="+", default=[2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--quick", action="store_true", help="three radii, two steps")
    parser.add_argument("--runs", type=Path, default=Path("runs/polar_vit_stability.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("polar_vit_stability.png"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.radii, arguments.steps = [2.0, 8.0, 12.0], 2
    torch.set_num_threads(1)
    log = RunLog(arguments.runs)
    results: dict[str, dict[float, list[dict]]] = {name: {} for name in MODELS}
    jobs = [(n, r, s) for s in range(arguments.seeds) for r in arguments.radii for n in MODELS]
    for name, radius, seed in tqdm(jobs, unit="run"):
        key = json.dumps([name, radius, seed, arguments.steps, arguments.rate])
        found = log.get(key, partial(run, name, radius, seed, arguments.steps, arguments.rate))
        results[name].setdefault(radius, []).append(found)
    print("| R | " + " | ".join(MODELS) + " |\n|---|" + "---|" * len(MODELS))
    for radius in arguments.radii:
        cells = []
        for name in MODELS:
            runs = results[name][radius]
            mean = 100 * sum(run["accuracy"] for run in runs) / len(runs)
            stops = [str(run["failed"]) for run in runs if run["failed"] is not None]
            note = f" (not finite at step {', '.join(stops)})" if stops else ""
            cells.append(f"{mean:.1f} %, loss {runs[0]['losses'][-1]:.2f}{note}")
        print(f"| {radius:g} | " + " | ".join(cells) + " |")
    plot(results, arguments.output)
    print(f"Saved {arguments.output}; runs in {arguments.runs}")


if __name__ == "__main__":
    main()
