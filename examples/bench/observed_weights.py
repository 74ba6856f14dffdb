"""Does an observation earn its place? Observed polar weights against the constant weight 1.

    python examples/bench/observed_weights.py [--seeds 3] [--steps 120] [--updates 750] [--arms ...]

The default preset throughout; arms differ in nothing but where polar weights come from: constant 1,
or observed by the published entropy rank, or by the calibrated one, each at the sites that the model
declares and at every linear layer, in every step, or in every fourth. Tasks are the demonstration's
plain GPT (validation loss in nats per character, cosine schedule) and Ripple (held-out mean squared
error; score-AUC). All arms of a seed share initialisation and batches, and take their updates in turn.
Differences are paired by seed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import rpt
from rpt.demo.text import load_corpus
from rpt.demo.train import Batches, Run, TrainConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ripple

Factory = Callable[[nn.Module], torch.optim.Optimizer]


def build(observe: str, null: str, every: int, rate: float, **options: object) -> Factory:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = rpt.ResidualPolarTransport(
            model.named_parameters(),
            lr=rate,
            observer_null=null,
            **options,  # type: ignore[arg-type]
        )
        if observe == "sites":
            optimizer.attach_model(model, observe_every=every)
        elif observe == "linear":
            optimizer.attach_model(
                model, lambda module: isinstance(module, nn.Linear), observe_every=every
            )
        return optimizer

    return make


ARMS = {
    "constant 1": ("none", "none", 1),
    "paper rank, sites": ("sites", "none", 1),
    "paper rank, sites, 4th step": ("sites", "none", 4),
    "paper rank, every linear": ("linear", "none", 1),
    "calibrated, sites": ("sites", "analytic", 1),
    "calibrated, every linear": ("linear", "analytic", 1),
}


def mean_weight(optimizer: torch.optim.Optimizer) -> float:
    """Mean polar weight of the matrices that were observed, or of all where none was."""
    states = [s for s in optimizer.state.values() if "root_refreshes" in s]
    seen = [s for s in states if s.get("observations", 0)] or states
    return statistics.mean(float(s["polar_weight"]) for s in seen)


def gpt(seed: int, steps: int) -> dict[str, dict[str, float]]:
    corpus = load_corpus()
    config = TrainConfig(steps=steps, seed=seed)
    runs = {
        name: Run(config, build(*arm, 3e-3, betas=(0.9, 0.95)), corpus)
        for name, arm in ARMS.items()
    }
    seconds = dict.fromkeys(runs, 0.0)
    batches = Batches(corpus, config)
    for _ in range(steps):
        codes, targets = batches.next()
        for name, run in runs.items():
            started = time.process_time()
            run.train_step(codes, targets)
            seconds[name] += time.process_time() - started
    return {
        name: {
            "nats": run.evaluate(),
            "weight": mean_weight(run.optimizer),
            "ms": 1e3 * seconds[name] / steps,
        }
        for name, run in runs.items()
    }


def folded(seed: int, updates: int) -> dict[str, dict[str, float]]:
    for name, arm in ARMS.items():
        ripple.ARMS[name] = (build(*arm, ripple.RATE, weight_decay=ripple.DECAY), "cosine")
    results = ripple.run_seed(seed, updates, list(ARMS))
    return {
        name: {
            "MSE": result.errors[-1],
            "score-AUC": result.score_auc,
            "weight": result.polar_weight or 0.0,
            "ms": 1e3 * result.seconds / updates,
        }
        for name, result in results.items()
    }


def report(task: str, by_seed: list[dict[str, dict[str, float]]]) -> None:
    print(f"\n{task}, {len(by_seed)} seeds (mean ± deviation; difference from constant 1, paired)")
    for name in ARMS:
        cells = []
        for key in by_seed[0][name]:
            values = [found[name][key] for found in by_seed]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{key} {statistics.mean(values):.4f} ± {spread:.4f}")
            if key in ("nats", "MSE", "score-AUC"):
                gaps = [found[name][key] - found["constant 1"][key] for found in by_seed]
                better = sum(g > 0 if key == "score-AUC" else g < 0 for g in gaps)
                cells.append(f"({statistics.mean(gaps):+.4f}, better in {better})")
        print(f"  {name:28s}" + "  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of the GPT; 0 leaves it out")
    parser.add_argument("--updates", type=int, default=750, help="of Ripple; 0 leaves it out")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="beside constant 1; all")
    options = parser.parse_args()
    for name in list(ARMS):
        if options.arms and name not in ("constant 1", *options.arms):
            del ARMS[name]
    torch.set_num_threads(1)
    if options.updates:
        report("Ripple", [folded(seed, options.updates) for seed in range(options.seeds)])
    if options.steps:
        report("GPT", [gpt(seed, options.steps) for seed in range(options.seeds)])


if __name__ == "__main__":
    main()
