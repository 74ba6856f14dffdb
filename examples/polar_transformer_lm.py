"""Does the Polar Transformer help? Language modelling, length extrapolation, irregular noisy tracks.

    python examples/polar_transformer_lm.py [--quick] [--seeds 3] [--output runs/polar_transformer_lm.png]

Three contenders of the same widths: the standard pre-norm transformer with rotary positions (every
correction switched off), the Polar Transformer (all of them on), and the Polar Transformer with its
extra parameters but without decay. Each trained with AdamW and with RPT, same batches, same budget.

Text: characters of Python's standard library, trained on 128 characters, validated on 128 and on
512. Tracks: noisy observations of a rotating state at irregular times with outliers; estimate the
state at each time; trained on 48 observations, tested on 48 and on 192. Printed: mean and standard
deviation over seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path

import matplotlib
import torch
from quick import RUNS, announce, writable
from rpt.geometry.rt_filter import (
    PolarTransformer,
    PolarTransformerBlock,
    geodesic_angle,
    simulate_trajectories,
    unit_direction,
)
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import rpt
from rpt.demo.text import VOCABULARY_SIZE, load_corpus

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WIDTH, HEADS, LAYERS = 64, 4, 2
SAME_WIDTH = {"head_dim": WIDTH // (2 * HEADS)}
MODELS = {
    "standard": {"standard": True},
    "polar": SAME_WIDTH,
    "polar, no decay": {**SAME_WIDTH, "decay": False},
}
FREQUENCIES = torch.tensor([0.4, -1.3, 0.11, 0.7], dtype=torch.float64)


class Tracker(nn.Module):
    """Observations (batch, tokens, 8) at real times to states (batch, tokens, 8)."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.read = nn.Linear(2 * len(FREQUENCIES), WIDTH)
        self.blocks = nn.ModuleList(
            PolarTransformerBlock(WIDTH, HEADS, **options) for _ in range(LAYERS)
        )
        self.norm = nn.RMSNorm(WIDTH)
        self.write = nn.Linear(WIDTH, 2 * len(FREQUENCIES))

    def forward(self, observations: Tensor, times: Tensor) -> Tensor:
        z = self.read(observations)
        for block in self.blocks:
            z = block(z, times=times)
        return self.write(self.norm(z))


def make_optimizer(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01)
    optimizer = rpt.ResidualPolarTransport(
        model.named_parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    optimizer.attach_model(model)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, loss_of, bar) -> float:
    """Warm up over a twentieth, then a cosine to zero. Returns seconds of processor time."""
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: min(1.0, 20 * (k + 1) / steps) * 0.5 * (1 + math.cos(math.pi * k / steps)),
    )
    started = time.process_time()
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.update()
    return time.process_time() - started


def windows(text: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - length - 1, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length + 1)].long()


def text_task(options: dict, optimizer: str, rate: float, seed: int, steps: int, bar) -> dict:
    corpus = load_corpus()
    torch.manual_seed(seed)
    model = PolarTransformer(VOCABULARY_SIZE, WIDTH, HEADS, LAYERS, **options)
    generator = torch.Generator().manual_seed(seed)

    def loss_of(_: int) -> Tensor:
        batch = windows(corpus.train, 128, 16, generator)
        return F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])

    seconds = train(model, make_optimizer(optimizer, model, rate), steps, loss_of, bar)
    found = {"CPU seconds": seconds}
    model.eval()
    with torch.no_grad():
        held_out = torch.Generator().manual_seed(1234)
        long = windows(corpus.validation, 512, 24, held_out)
        for length in (128, 512):
            batch = long[:, : length + 1]
            losses = F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:], reduction="none")
            found[f"nats at {length}"] = float(losses.mean())
        # Characters beyond the trained length alone, where nothing was ever learned.
        found["nats past 384"] = float(losses[:, 384:].mean())
    return found


def tracks(count: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    gaps = torch.empty(tokens, dtype=torch.float64).exponential_(generator=generator)
    data = simulate_trajectories(
        count, gaps.cumsum(0), FREQUENCIES, decay=0.005, radial_std=0.3, tangential_std=0.15,
        outlier_rate=0.1, generator=generator,
    )  # fmt: skip
    return data.states.float(), data.observations.float(), data.times


def track_task(options: dict, optimizer: str, rate: float, seed: int, steps: int, bar) -> dict:
    torch.manual_seed(seed)
    # The rates of rotation are part of the world; both contenders may learn theirs.
    model = Tracker(**options, learn_frequencies=True)
    generator = torch.Generator().manual_seed(seed)

    def loss_of(_: int) -> Tensor:
        states, observations, times = tracks(32, 48, generator)
        return F.mse_loss(model(observations, times), states) / states.square().mean()

    seconds = train(model, make_optimizer(optimizer, model, rate), steps, loss_of, bar)
    found = {"CPU seconds": seconds}
    model.eval()
    with torch.no_grad():
        for tokens in (48, 192):
            held_out, angles = torch.Generator().manual_seed(4321), []
            for _ in range(8):
                states, observations, times = tracks(16, tokens, held_out)
                guess = unit_direction(model(observations, times))[1]
                angles.append(geodesic_angle(guess, unit_direction(states)[1])[:, 12:].mean())
            found[f"degrees at {tokens}"] = math.degrees(float(torch.stack(angles).mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 2 steps; figures mean nothing"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate of both optimizers")
    parser.add_argument("--tasks", nargs="+", default=["text", "tracks"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", default=["AdamW", "RPT"])
    parser.add_argument("--output", default=str(RUNS / "polar_transformer_lm.png"))
    arguments = parser.parse_args()
    announce(arguments.quick)
    torch.set_num_threads(1)
    steps, seeds = (2, 1) if arguments.quick else (arguments.steps, arguments.seeds)
    tasks = {"text": text_task, "tracks": track_task}
    arms = [
        (task, model, optimizer)
        for task in arguments.tasks
        for model in arguments.models
        for optimizer in arguments.optimizers
    ]
    results: dict[tuple[str, str, str], list[dict]] = {}
    with tqdm(total=len(arms) * seeds * steps, unit="step") as bar:
        for arm in arms:
            task, model, optimizer = arm
            bar.set_description(" ".join(arm))
            for seed in range(seeds):
                found = tasks[task](MODELS[model], optimizer, arguments.rate, seed, steps, bar)
                results.setdefault(arm, []).append(found)
            line = [f"{task:6s} {model:16s} {optimizer:6s}"]
            for key in results[arm][0]:
                values = [r[key] for r in results[arm]]
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                line.append(f"{key} {statistics.mean(values):.3f} ± {spread:.3f}")
            tqdm.write("   ".join(line))
    plot(results, writable(arguments.output))
    sizes = {
        name: sum(
            p.numel()
            for p in PolarTransformer(
                VOCABULARY_SIZE, WIDTH, HEADS, LAYERS, **MODELS[name]
            ).parameters()
        )
        for name in arguments.models
    }
    print(f"Parameters of the language models: {sizes}. Saved {arguments.output}")


def plot(results: dict, output: str | Path) -> None:
    tasks = sorted({task for task, _, _ in results}, reverse=True)
    figure, axes = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 4), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        arms = [arm for arm in results if arm[0] == task]
        keys = [k for k in results[arms[0]][0] if k != "CPU seconds"]
        for offset, arm in enumerate(arms):
            means = [statistics.mean(r[k] for r in results[arm]) for k in keys]
            places = [i + 0.8 * offset / len(arms) for i in range(len(keys))]
            axis.bar(places, means, 0.8 / len(arms), label=", ".join(arm[1:]))
        axis.set_xticks([i + 0.3 for i in range(len(keys))], keys)
        axis.set_title(task)
        axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("lower is better")
    figure.tight_layout()
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main()
