"""Training far from the origin in float32, without clipping: Polar-ViT and its ambient twin.

    python examples/polar_vit_stability.py [--steps 150] [--radii 2 4 6 8 10 12 14]

Each class of scikit-learn's digits has a target point at distance R from the origin, one direction
each; a small vision transformer maps an image to a point, all of whose layers are calibrated to
radius R, and the loss is the cross-entropy of −distance to the targets. The twin has the same
parameters, drawn alike, the same batches and, in exact arithmetic, the same function; it computes in
ambient coordinates. Nothing is clipped or capped in either. The customary clamps of ambient code
(arcosh of at least 1, centroids divided by a root of at least 1e-4) turn NaN into wrong finite
numbers, so that its failure is silent: "textbook" is the twin without them, and the trained weights
of every model are evaluated once more in float64, where all three are the same function.

Printed: test accuracy (nearest target), float32 and float64, the geodesic distance between the points
the two give (median over test images), and the step at which a loss or gradient stopped being
finite, if any; plotted: accuracy and distance against R, and the losses at two radii.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from baselines import AmbientViT, TextbookViT, ambient
from quick import announce, writable
from rpt.geometry import lorentz
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
# Distance of clustered targets from their middle: they are 2.6 times this apart or less.
SPREAD = 2.0
MODELS: dict[str, type[Any]] = {
    "polar": lorentz.PolarViT,
    "ambient": AmbientViT,
    "textbook": TextbookViT,
}


def targets(radius: float, layout: str) -> lorentz.Point:
    """Ten points about this radius: in orthogonal directions, or SPREAD around one point."""
    directions = torch.linalg.qr(
        torch.randn(32, 11, generator=torch.Generator().manual_seed(5)), mode="reduced"
    ).Q.mT.double()
    if layout == "spread":
        goal = lorentz.Point(torch.full((10,), radius, dtype=torch.float64), directions[:10])
    else:
        middle = lorentz.Point(torch.full((10,), radius).double(), directions[10:].expand(10, -1))
        step = lorentz.Tangent(torch.zeros(10).double(), SPREAD * directions[:10])
        goal = lorentz.exp_map(middle, step)
    return lorentz.Point(goal.a.float(), goal.u.float().contiguous())


def distances(features: Any, goal: lorentz.Point, guarded: bool = True) -> Tensor:
    """Distances of features to the targets (batch, 10), in the arithmetic the features came in."""
    if isinstance(features, Tensor):
        points = lorentz.to_ambient(goal)
        eps = 1e-6 if guarded else None
        return ambient.ambient_distance(features.unsqueeze(1), points, eps=eps)
    return lorentz.pairwise_distance(features, goal)


def exact_points(features: Any) -> lorentz.Point:
    """Features as points in polar form, in float64."""
    if isinstance(features, Tensor):
        return lorentz.from_ambient(features.double())
    return lorentz.Point(features.a.double(), features.u.double())


@torch.no_grad()
def evaluate(model: Any, goal: lorentz.Point, batches: Any, guarded: bool) -> dict[str, float]:
    """Accuracy in float32, accuracy of the same weights in float64, and how far apart the points are.

    The float64 model is polar, whatever the model: exact at every radius here.
    """
    exact = lorentz.PolarViT(model.config).double()
    exact.load_state_dict(model.state_dict())
    exact_goal = lorentz.Point(goal.a.double(), goal.u.double())
    right = right_exact = total = 0
    apart, radii, away, claimed = [], [], [], []
    for images, labels in batches:
        features = model.features(images)
        d = distances(features, goal, guarded)
        guess = torch.where(d.isnan(), math.inf, d).argmin(-1)
        # A row of NaN has no nearest target.
        right += int(((guess == labels) & ~d.isnan().all(-1)).sum())
        true = exact.features(images.double())
        d_exact = distances(true, exact_goal)
        right_exact += int((d_exact.argmin(-1) == labels).sum())
        error = lorentz.distance(exact_points(features), true)
        apart.append(torch.where(d.isnan().any(-1), math.nan, error))
        radii.append(true.a)
        own = d_exact.gather(1, labels[:, None])[:, 0]
        away.append(own)
        claimed.append(d.gather(1, labels[:, None])[:, 0])
        total += len(labels)
    return {
        "accuracy": right / total,
        "accuracy64": right_exact / total,
        "apart": float(torch.cat(apart).median()),
        "radius": float(torch.cat(radii).median()),
        "distance": float(torch.cat(away).median()),
        "claimed": float(torch.cat(claimed).median()),
    }


def run(
    name: str, radius: float, seed: int, steps: int, rate: float, objective: str, layout: str
) -> dict:
    torch.manual_seed(seed)
    data = load("digits", 64, seed)
    model = MODELS[name](lorentz.ViTConfig(10, 8, **SIZES))
    images, _ = next(iter(load("digits", 64, 999).train))
    # Calibrated as the polar model in both cases: the twin starts from the same numbers.
    first = lorentz.PolarViT(model.config)
    first.load_state_dict(model.state_dict())
    lorentz.calibrate_(first, images, target_radius=radius)
    model.load_state_dict(first.state_dict())
    goal, guarded = targets(radius, layout), name != "textbook"
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
        d = distances(model.features(batch[0]), goal, guarded)
        if objective == "classes":
            loss = nn.functional.cross_entropy(-d, batch[1])
        else:
            loss = d.gather(1, batch[1][:, None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        finite = all(bool(p.grad.isfinite().all()) for p in parameters)
        losses.append(float(loss.detach()))
        if failed is None and not (math.isfinite(losses[-1]) and finite):
            failed = step
            break
        optimizer.step()
    return {**evaluate(model, goal, data.test, guarded), "failed": failed, "losses": losses}


def plot(results: dict[str, dict[float, list[dict]]], path: Path, classes: bool) -> None:
    """What was aimed at and the float32 error against radius, losses at the first and the last."""
    in_float32, in_float64 = ("accuracy", "accuracy64") if classes else ("claimed", "distance")
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for colour, (name, by_radius) in enumerate(results.items()):
        radii = sorted(by_radius)
        for axis, figures, style in (
            (axes[0], in_float32, "o-"),
            (axes[0], in_float64, "x:"),
            (axes[1], "apart", "o-"),
        ):
            mean = [statistics.mean(run[figures] for run in by_radius[x]) for x in radii]
            label = name + (", float64" if figures == in_float64 else "")
            axis.plot(radii, mean, style, color=f"C{colour}", label=label)
        for radius, style in ((radii[0], "-"), (radii[-1], ":")):
            losses = by_radius[radius][0]["losses"]
            axes[2].plot(losses, style, color=f"C{colour}", label=f"{name}, R = {radius:g}")
    if classes:
        axes[0].axhline(0.1, color="grey", linestyle=":", label="chance")
    what = "test accuracy" if classes else "median distance to the target"
    axes[0].set(xlabel="radius R of targets and layers", ylabel=what)
    axes[1].set(xlabel="radius R", ylabel="distance of float32 from float64 points", yscale="log")
    axes[2].set(xlabel="step", ylabel="loss", yscale="log")
    for axis in axes:
        axis.legend(fontsize=8)
    figure.savefig(writable(path), dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--radii", type=float, nargs="+", default=[2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--objective", default="classes", choices=["classes", "distance"])
    parser.add_argument("--layout", default="spread", choices=["spread", "cluster"])
    parser.add_argument(
        "--quick", action="store_true", help="three radii, two steps; figures mean nothing"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/polar_vit_stability.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("runs/polar_vit_stability.png"))
    arguments = parser.parse_args()
    announce(arguments.quick)
    if arguments.quick:
        arguments.radii, arguments.steps = [2.0, 8.0, 12.0], 2
    torch.set_num_threads(1)
    log = RunLog(arguments.runs)
    results: dict[str, dict[float, list[dict]]] = {name: {} for name in MODELS}
    jobs = [(n, r, s) for s in range(arguments.seeds) for r in arguments.radii for n in MODELS]
    for name, radius, seed in tqdm(jobs, unit="run"):
        job = (
            name,
            radius,
            seed,
            arguments.steps,
            arguments.rate,
            arguments.objective,
            arguments.layout,
        )
        found = log.get(json.dumps(job), partial(run, *job))
        results[name].setdefault(radius, []).append(found)
    print("| R | " + " | ".join(MODELS) + " |\n|---|" + "---|" * len(MODELS))
    for radius in arguments.radii:
        cells = []
        for name in MODELS:
            runs = results[name][radius]
            accuracy, exact = (
                " ".join(f"{100 * run[figure]:.0f}" for run in runs)
                for figure in ("accuracy", "accuracy64")
            )
            apart = statistics.median(run["apart"] for run in runs)
            middle = {
                figure: statistics.median(run[figure] for run in runs)
                for figure in ("radius", "distance", "claimed")
            }
            stops = [str(run["failed"]) for run in runs if run["failed"] is not None]
            note = f"; not finite at step {', '.join(stops)}" if stops else ""
            cells.append(
                f"{accuracy} % (float64: {exact}), apart {apart:.1e}; "
                f"radius {middle['radius']:.1f}, to target {middle['distance']:.1f}, "
                f"claimed {middle['claimed']:.1f}{note}"
            )
        print(f"| {radius:g} | " + " | ".join(cells) + " |")
    plot(results, arguments.output, arguments.objective == "classes")
    print(f"Saved {arguments.output}; runs in {arguments.runs}")


if __name__ == "__main__":
    main()
