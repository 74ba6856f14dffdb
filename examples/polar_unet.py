"""Polar U-Net against its ambient twin: handwritten digits segmented from photographs.

    python examples/polar_unet.py [--seeds 3] [--steps 150]

Masks made from real images at hand: scikit-learn's scanned digits, enlarged, are drawn with low
contrast onto crops of its two photographs; the mask is where the pen was. Digits and regions of the
photographs in the test set are not among those trained on. `--data PATH` trains on a directory with
`images/` and `masks/` of the same file names instead (PNG or JPEG; white is foreground), resized to
`--side`, with the paper's recipe: Dice and cross-entropy loss, Riemannian AdamW, cosine schedule.

Printed: test Dice (mean of foreground and background) over seeds, and a picture of predictions.
Every run is one line of `--runs`, and is not repeated when found there.
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
import numpy as np
import torch
from baselines import AmbientUNet
from quick import announce, writable
from rpt.geometry import lorentz
from run_log import RunLog
from torch import Tensor, nn
from tqdm import tqdm

import rpt

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MODELS: dict[str, type[nn.Module]] = {
    "ambient Lorentz U-Net": AmbientUNet,
    "polar U-Net": lorentz.PolarUNet,
}


def photographs() -> list[Tensor]:
    """scikit-learn's two photographs, (3, height, width) in [0, 1]."""
    from sklearn.datasets import load_sample_images

    return [torch.tensor(image).permute(2, 0, 1) / 255.0 for image in load_sample_images().images]


def drawn_digits(count: int, side: int, train: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Images (count, 3, side, side) and masks (count, side, side)."""
    from sklearn.datasets import load_digits

    generator = torch.Generator().manual_seed(seed)
    pictures = photographs()
    strokes = torch.tensor(load_digits().images, dtype=torch.float32) / 16.0
    # The first 1,400 digits and the left two thirds of the photographs are for training.
    strokes = strokes[:1400] if train else strokes[1400:]
    size = 3 * side // 4
    images, masks = torch.empty(count, 3, side, side), torch.zeros(count, side, side)
    for index in range(count):
        picture = pictures[_draw(len(pictures), generator)]
        height, width = picture.shape[1:]
        border = 2 * width // 3
        low, high = (0, border - 2 * side) if train else (border, width - 2 * side)
        row = _draw(height - 2 * side, generator)
        column = low + _draw(high - low, generator)
        crop = picture[:, row : row + 2 * side : 2, column : column + 2 * side : 2]
        digit = strokes[_draw(len(strokes), generator)][None, None]
        digit = nn.functional.interpolate(digit, size=(size, size), mode="bilinear")[0, 0]
        top, left = _draw(side - size + 1, generator), _draw(side - size + 1, generator)
        ink = torch.zeros(side, side)
        ink[top : top + size, left : left + size] = digit
        colour = torch.rand(3, 1, 1, generator=generator)
        strength = 0.35 + 0.35 * float(torch.rand((), generator=generator))
        images[index] = crop + strength * ink * (colour - crop)
        masks[index] = (ink > 0.4).float()
    return images, masks.long()


def _draw(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))


def from_directory(path: Path, side: int) -> tuple[Tensor, Tensor]:
    """All pairs of a directory, zero-padded to squares as in the paper."""
    from PIL import Image

    files = sorted((path / "images").iterdir())
    if not files:
        raise SystemExit(f"{path}/images is empty")
    images, masks = [], []
    for file in files:
        for kind, found in (("images", images), ("masks", masks)):
            with Image.open(path / kind / file.name) as image:
                image = image.convert("RGB" if kind == "images" else "L")
                square = Image.new(image.mode, (max(image.size),) * 2)
                square.paste(image, (0, 0))
                found.append(np.asarray(square.resize((side, side))))
    pixels = torch.tensor(np.stack(images)).permute(0, 3, 1, 2) / 255.0
    return pixels, (torch.tensor(np.stack(masks)) > 127).long()


def load(arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and masks, test images and masks."""
    if arguments.data is None:
        train = drawn_digits(arguments.images, arguments.side, True, 1)
        return (*train, *drawn_digits(128, arguments.side, False, 2))
    images, masks = from_directory(arguments.data, arguments.side)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[: len(order) // 5], order[len(order) // 5 :]
    return images[rest], masks[rest], images[held_out], masks[held_out]


@torch.no_grad()
def predict(model: nn.Module, images: Tensor, device: str) -> Tensor:
    model.eval()
    return torch.cat([model(part.to(device)).cpu() for part in images.split(32)])


def train(name: str, optimizer_name: str, seed: int, data: Any, arguments: Any) -> tuple[dict, Any]:
    """The paper's recipe on random batches; warm-up over a twentieth of the steps."""
    images, masks, test_images, test_masks = data
    torch.manual_seed(seed)
    device, steps = arguments.device, arguments.steps
    model = MODELS[name](images.shape[1], 2).to(device)
    groups = lorentz.parameter_groups(model, weight_decay=0.05)
    if optimizer_name == "RPT":
        optimizer: Any = rpt.ResidualPolarTransport(groups, lr=arguments.rate)
        optimizer.attach_model(model)
    else:
        optimizer = lorentz.RiemannianAdamW(groups, lr=arguments.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: min(1.0, 20 * (k + 1) / steps) * 0.5 * (1 + math.cos(math.pi * k / steps)),
    )
    losses, started, cpu = [], time.perf_counter(), time.process_time()
    progress = tqdm(range(steps), desc=f"{name}, {optimizer_name} #{seed}", leave=False)
    for step in progress:
        model.train()
        index = torch.randint(len(images), (arguments.batch,))
        loss = lorentz.segmentation_loss(model(images[index].to(device)), masks[index].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 20 == 0:
            progress.set_postfix(loss=losses[-1])
    logits = predict(model, test_images, device)
    return {
        "dice": float(lorentz.dice_score(logits, test_masks)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "losses": losses,
    }, logits[:6].argmax(1)


def record(*run: Any) -> dict[str, Any]:
    """What is kept of a run: its figures and its predictions on the first test images."""
    figures, predictions = train(*run)
    return {**figures, "predictions": predictions.tolist()}


def plot(
    data: Any, predictions: dict[str, Tensor], results: dict[str, list[dict]], path: Path
) -> None:
    """Test images, masks and predictions, and the training losses beside them."""
    rows = 2 + len(predictions)
    figure = plt.figure(figsize=(14, 1.9 * rows), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots(rows, 6)
    strips = [("image", data[2][:6].movedim(1, -1)), ("mask", data[3][:6]), *predictions.items()]
    for line, (label, strip) in zip(axes, strips, strict=True):
        for axis, picture in zip(line, strip, strict=True):
            axis.imshow(picture.clamp(0, 1), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        line[0].set_title(label, fontsize=8, loc="left")
    axis = right.subplots()
    for label, runs in results.items():
        losses = torch.tensor([run["losses"] for run in runs]).mean(0)
        smooth = losses.unfold(0, min(10, len(losses)), 1).mean(-1)
        axis.plot(smooth, label=label)
    axis.set(xlabel="step", ylabel="Dice and cross-entropy loss")
    axis.legend(fontsize=8)
    figure.savefig(writable(path), dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="a directory with images/ and masks/")
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--images", type=int, default=512, help="drawn training images")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--optimizers", nargs="+", default=["AdamW", "RPT"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, four steps; figures mean nothing"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/polar_unet.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("runs/polar_unet.png"))
    arguments = parser.parse_args()
    announce(arguments.quick)
    if arguments.quick:
        arguments.seeds, arguments.steps, arguments.images = 1, 4, 32
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    log = RunLog(arguments.runs)
    data = load(arguments)
    results: dict[str, list[dict]] = {}
    predictions: dict[str, Tensor] = {}
    jobs = [(n, o, s) for s in range(arguments.seeds) for n in MODELS for o in arguments.optimizers]
    for name, optimizer, seed in tqdm(jobs, unit="run"):
        recipe = (str(arguments.data), arguments.side, arguments.images, arguments.steps)
        key = json.dumps([name, optimizer, seed, *recipe, arguments.batch, arguments.rate])
        found = log.get(key, partial(record, name, optimizer, seed, data, arguments))
        label = f"{name}, {optimizer}"
        results.setdefault(label, []).append(found)
        predictions.setdefault(label, torch.tensor(found["predictions"]))
        tqdm.write(f"{label} seed {seed}: Dice {found['dice']:.4f}")
    print("| | parameters | test Dice | CPU s a run |\n|---|---|---|---|")
    for label, runs in results.items():
        dice = [run["dice"] for run in runs]
        spread = statistics.stdev(dice) if len(dice) > 1 else 0.0
        seconds = statistics.median(run["cpu_seconds"] for run in runs)
        print(
            f"| {label} | {runs[0]['parameters']:,} | {statistics.mean(dice):.4f} ± {spread:.4f} | "
            f"{seconds:.0f} |"
        )
    plot(data, predictions, results, arguments.output)
    print(f"Saved {arguments.output}; runs in {arguments.runs}")


if __name__ == "__main__":
    main()
