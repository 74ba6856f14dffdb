"""Polar-ViT against the Euclidean and the ambient Lorentz ViT, trained on real images.

    python examples/polar_vit_digits.py [--study compare] [--data digits] [--seeds 3]

Studies: `compare` (three models, each with AdamW and with RPT), `ablation` (the rows of the paper's
Table 5), `radius` (Table 6). Every run is one line of `--runs`, and is not repeated when found
there. Needs no download: scikit-learn's digits, or `--data mnist5k`. With `--data PATH` it trains
on CIFAR-100, Tiny-ImageNet or any image folder with the paper's recipe (`--size tiny --epochs 100
--batch 128 --rate 3e-3 --device cuda`), to repeat Tables 1 to 3.

Printed: a table of test accuracies, mean and standard deviation over seeds, and the picture of the
training curves with the mean radius of the tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from baselines import AmbientViT, EuclideanViT
from quick import announce, writable
from rpt.geometry import lorentz
from run_log import RunLog
from torch import Tensor, nn
from tqdm import tqdm
from vision_data import load

import rpt

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DIGIT_SIZES = {"width": 48, "depth": 3, "num_heads": 4, "mlp_width": 96}
MODELS: dict[str, type[Any]] = {
    "euclidean": EuclideanViT,
    "ambient": AmbientViT,
    "polar": lorentz.PolarViT,
}
START = "split-head Lorentz ViT, class token"


def arms(study: str) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Label → (arithmetic, options, optimizer) of every arm of a study."""
    if study == "compare":
        built: dict[str, tuple[str, dict[str, Any]]] = {
            "Euclidean ViT": ("euclidean", {}),
            "ambient Lorentz ViT": lorentz.ABLATION[START],
            "Polar-ViT": ("polar", {}),
        }
        return {
            f"{name}, {optimizer}": (*model, optimizer)
            for name, model in built.items()
            for optimizer in ("AdamW", "RPT")
        }
    if study == "ablation":
        return {name: (*row, "AdamW") for name, row in lorentz.ABLATION.items()}
    return {name: ("polar", row, "AdamW") for name, row in lorentz.RADIUS_ABLATION.items()}


def build(arithmetic: str, options: dict[str, Any], data: Any, arguments: Any) -> Any:
    """The model of an arm."""
    sizes: dict[str, Any] = {"in_channels": data.channels}
    if arguments.size == "digits":
        sizes |= {**DIGIT_SIZES, "patch_size": 2 if data.side == 8 else 4}
    else:
        sizes |= {**lorentz.SIZES[arguments.size], "patch_size": 4 if data.side <= 64 else 16}
    config = lorentz.ViTConfig(data.num_classes, data.side, **{**sizes, **options})
    return MODELS[arithmetic](config)


def make_optimizer(name: str, model: nn.Module, rate: float, compiled: bool) -> Any:
    """Scales, rates and tables are spared from weight decay, in every arm."""
    groups = lorentz.parameter_groups(model, weight_decay=0.05)
    if name == "AdamW":
        return lorentz.RiemannianAdamW(groups, lr=rate)
    optimizer = rpt.ResidualPolarTransport(groups, lr=rate)
    optimizer.attach_model(model, strategy="compiled" if compiled else "hook")
    return optimizer


@torch.no_grad()
def mean_radius(model: Any, images: Tensor) -> float:
    """Mean distance of the tokens from the origin after the last block; nan in flat space."""
    if isinstance(model, EuclideanViT):
        return math.nan
    tokens = model.tokens(images)
    if isinstance(tokens, Tensor):
        tokens = lorentz.from_ambient(tokens, k=model.curvature())
    return float((tokens.a * model.curvature().sqrt()).mean())


@torch.no_grad()
def accuracy(model: Any, batches: Any, device: str) -> float:
    right = total = 0
    for images, labels in batches:
        guess = model(images.to(device)).argmax(-1)
        right += int((guess == labels.to(device)).sum())
        total += len(labels)
    return right / total


def train(arm: tuple[str, dict[str, Any], str], seed: int, arguments: Any, label: str) -> dict:
    """Warm up over a tenth, then a cosine to zero; label smoothing 0.1 (the paper's recipe)."""
    device = arguments.device
    torch.manual_seed(seed)
    data = load(arguments.data, arguments.batch, seed)
    arithmetic, options, optimizer_name = arm
    model = build(arithmetic, options, data, arguments).to(device)
    if arithmetic != "euclidean":
        images = next(iter(load(arguments.data, arguments.batch, 1234).train))[0]
        lorentz.calibrate_(model, images.to(device), target_radius=1.0)
    optimizer = make_optimizer(optimizer_name, model, arguments.rate, arguments.compile)
    if arguments.compile:
        # Every arm is a program of its own: after eight in one process blocks would run eagerly.
        torch.compiler.reset()
        for block in model.blocks:
            block.compile()
    total = arguments.epochs * data.steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: min(1.0, 10 * (k + 1) / total) * 0.5 * (1 + math.cos(math.pi * k / total)),
    )
    curve: dict[str, list[float]] = {"loss": [], "accuracy": [], "radius": []}
    started, cpu = time.perf_counter(), time.process_time()
    progress = tqdm(range(arguments.epochs), desc=f"{label} #{seed}", leave=False)
    for epoch in progress:
        model.train()
        losses = []
        for images, labels in data.train:
            images, labels = images.to(device), labels.to(device)
            with torch.autocast(device, torch.bfloat16, enabled=arguments.bf16):
                loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        model.eval()
        curve["loss"].append(float(torch.stack(losses).mean()))
        if epoch % arguments.every == 0 or epoch == arguments.epochs - 1:
            curve["accuracy"].append(accuracy(model, data.test, device))
            curve["radius"].append(mean_radius(model, images))
            progress.set_postfix(loss=curve["loss"][-1], accuracy=curve["accuracy"][-1])
    return {
        "accuracy": curve["accuracy"][-1],
        "parameters": model.num_parameters(),
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "curve": curve,
    }


def key_of(arm: tuple[str, dict[str, Any], str], seed: int, arguments: Any) -> str:
    """What identifies a run; studies share the runs they have in common."""
    recipe = (arguments.data, arguments.size, arguments.epochs, arguments.batch, arguments.rate)
    arithmetic, options, optimizer = arm
    return json.dumps(
        [arithmetic, sorted(options.items()), optimizer, seed, *recipe, arguments.bf16]
    )


def table(results: dict[str, list[dict]]) -> str:
    """Accuracies in percent, parameters, and process seconds a run."""
    lines = ["| | parameters | test accuracy | worst seed | CPU s a run |", "|---|---|---|---|---|"]
    for label, runs in results.items():
        values = [100 * run["accuracy"] for run in runs]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        seconds = statistics.median(run["cpu_seconds"] for run in runs)
        lines.append(
            f"| {label} | {runs[0]['parameters']:,} | {statistics.mean(values):.2f} ± {spread:.2f}"
            f" | {min(values):.2f} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def plot(results: dict[str, list[dict]], path: Path, every: int) -> None:
    """Loss, test error and radius against epochs; bands span the seeds."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for colour, (label, runs) in enumerate(results.items()):
        for axis, name in zip(axes, ("loss", "accuracy", "radius"), strict=True):
            curves = torch.tensor([run["curve"][name] for run in runs], dtype=torch.float64)
            if curves.isnan().all():
                continue
            if name == "accuracy":
                curves = 100 * (1 - curves)
            epochs = torch.arange(curves.shape[1]) * (1 if name == "loss" else every) + 1
            axis.plot(epochs, curves.mean(0), color=f"C{colour}", label=label)
            axis.fill_between(
                epochs, curves.amin(0), curves.amax(0), color=f"C{colour}", alpha=0.15
            )
    axes[0].set(xlabel="epoch", ylabel="training loss")
    axes[1].set(xlabel="epoch", ylabel="test error, %", yscale="log")
    axes[2].set(xlabel="epoch", ylabel="mean radius of the tokens")
    axes[0].legend(fontsize=7)
    figure.savefig(writable(path), dpi=110)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--study", default="compare", choices=["compare", "ablation", "radius"])
    parser.add_argument("--data", default="digits", help="digits, mnist5k or a directory")
    parser.add_argument("--size", default="digits", choices=["digits", *lorentz.SIZES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--every", type=int, default=2, help="epochs between evaluations")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate of both optimizers")
    parser.add_argument("--arms", nargs="+", help="only the arms whose label contains one of these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action="store_true", help="train under bfloat16 autocast")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, two epochs; figures mean nothing"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/polar_vit.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("runs/polar_vit.png"))
    arguments = parser.parse_args()
    announce(arguments.quick)
    if arguments.quick:
        arguments.seeds, arguments.epochs = 1, 2
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    log = RunLog(arguments.runs)
    chosen = arms(arguments.study)
    if arguments.arms:
        chosen = {n: arm for n, arm in chosen.items() if any(part in n for part in arguments.arms)}
    results: dict[str, list[dict]] = {label: [] for label in chosen}
    jobs = [(label, seed) for seed in range(arguments.seeds) for label in chosen]
    for label, seed in tqdm(jobs, unit="run"):
        key = key_of(chosen[label], seed, arguments)
        found = log.get(key, partial(train, chosen[label], seed, arguments, label))
        results[label].append(found)
        tqdm.write(f"{label:45s} seed {seed}: {100 * found['accuracy']:.2f} %")
    print(table(results))
    plot(results, arguments.output, arguments.every)
    print(f"Saved {arguments.output}; runs in {arguments.runs}")


if __name__ == "__main__":
    main()
