"""The RT-Filter against an isotropic filter and softmax attention, on the model's own trajectories.

    python examples/rt_filter_tracking.py [--quick] [--output runs/rt_filter_tracking.png]

States rotate at known rates and shrink; observations carry radial and tangential noise of different
size, some are outliers, and times may have gaps. Every estimator knows the true rotation and decay,
takes three reweighting iterations from its own unweighted consensus, and may choose the best of three
settings in hindsight, by angle: softmax attention its temperature; both filters Gaussian, exponential
or Student-t weights. Printed and plotted: mean angle error in degrees and mean
relative magnitude error, over tokens with at least a dozen predecessors.
"""

from __future__ import annotations

import argparse
import math

import matplotlib
import torch
from quick import RUNS, announce, writable
from rpt.geometry.rt_filter import (
    Trajectories,
    geodesic_angle,
    isotropic_filter,
    rt_filter,
    simulate_trajectories,
    transport_state,
    unit_direction,
)
from torch import Tensor
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FREQUENCIES = torch.tensor([0.4, -1.3, 0.11, 2.2], dtype=torch.float64)
REAL_TANGENTIAL = 2 * len(FREQUENCIES) - 1
ITERATIONS, WARM_UP = 3, 12


def softmax_filter(data: Trajectories, decay: float, scale: float) -> Tensor:
    """Softmax attention over truly transported observations: exp(scale·cos) weights, their mean."""
    lag = (data.times[:, None] - data.times[None]).expand(data.states.shape[0], -1, -1)
    moved = transport_state(
        data.observations.unsqueeze(1).expand(-1, lag.shape[1], -1, -1), lag.clamp_min(0),
        FREQUENCIES, decay,
    )  # fmt: skip
    hidden = lag < 0
    state = moved.masked_fill(hidden.unsqueeze(-1), 0).sum(2)
    for _ in range(ITERATIONS):
        cosine = (unit_direction(state)[1].unsqueeze(2) * unit_direction(moved)[1]).sum(-1)
        weights = torch.softmax((scale * cosine).masked_fill(hidden, -math.inf), -1)
        state = (weights.unsqueeze(-1) * moved.masked_fill(hidden.unsqueeze(-1), 0)).sum(2)
    return state


def errors(data: Trajectories, direction: Tensor, magnitude: Tensor) -> tuple[float, float]:
    true_magnitude, true_direction = unit_direction(data.states)
    angle = geodesic_angle(true_direction, unit_direction(direction)[1])
    relative = (magnitude - true_magnitude).abs() / true_magnitude
    return (
        math.degrees(float(angle[:, WARM_UP:].mean())),
        float(relative[:, WARM_UP:].mean()),
    )


def compare(data: Trajectories, decay: float, radial: float, tangential: float) -> dict:
    common = {"decay": decay, "iterations": ITERATIONS, "start": "consensus"}
    found = {"observation": errors(data, data.observations, unit_direction(data.observations)[0])}
    attempts = []
    for scale in (0.5, 2.0, 8.0):
        state = softmax_filter(data, decay, scale)
        attempts.append(errors(data, state, unit_direction(state)[0]))
    found["softmax attention"] = min(attempts)
    mean = (radial**2 + REAL_TANGENTIAL * tangential**2) / (REAL_TANGENTIAL + 1)
    attempts = []
    # The first has no influence weights: they are 1 where ν is large.
    for weights, nu in (("exponential", 1e12), ("exponential", 4.0), ("student_t", 4.0)):
        state = isotropic_filter(
            data.observations, data.times, FREQUENCIES, variance=mean, weights=weights, nu=nu,
            **common,
        )  # fmt: skip
        attempts.append(errors(data, state, unit_direction(state)[0]))
    found["isotropic filter"] = min(attempts)
    for name, radial_weights in (("RT-Filter", "own"), ("RT-Filter, joint weights", "joint")):
        attempts = []
        for weights in ("none", "exponential", "student_t"):
            result = rt_filter(
                data.observations, data.times, FREQUENCIES, tangential_variance=tangential**2,
                radial_variance=radial**2, resultant_scaling=False, weights=weights,
                radial=radial_weights, **common,
            )  # fmt: skip
            attempts.append(errors(data, result.direction, result.magnitude))
        found[name] = min(attempts)
    return found


def worlds(quick: bool) -> dict[str, list[tuple[float, dict]]]:
    """Three sweeps around radial noise 0.3, tangential noise 0.03, no outliers, unit time steps."""
    pick = slice(None, None, 2) if quick else slice(None)
    base = {"radial": 0.3, "tangential": 0.03, "outliers": 0.0, "gap": 1.0, "decay": 0.01}
    return {
        "radial noise (tangential 0.03)": [
            (v, base | {"radial": v}) for v in (0.03, 0.1, 0.2, 0.4, 0.8)[pick]
        ],
        "outlier rate": [(v, base | {"outliers": v}) for v in (0.0, 0.1, 0.2, 0.3, 0.4)[pick]],
        "mean time between observations": [
            (v, base | {"gap": v, "outliers": 0.1}) for v in (0.5, 1.0, 2.0, 4.0, 6.0)[pick]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="few short trajectories; figures mean nothing"
    )
    parser.add_argument("--output", default=str(RUNS / "rt_filter_tracking.png"))
    arguments = parser.parse_args()
    announce(arguments.quick)
    torch.set_num_threads(1)
    count, tokens = (32, 40) if arguments.quick else (200, 64)
    sweeps = worlds(arguments.quick)
    progress = tqdm(total=sum(map(len, sweeps.values())), desc="worlds")
    figure, axes = plt.subplots(2, len(sweeps), figsize=(4 * len(sweeps), 6.5), squeeze=False)
    wins = {"angle": 0, "magnitude": 0}
    for column, (label, points) in enumerate(sweeps.items()):
        curves: dict[str, list[tuple[float, float]]] = {}
        for value, world in points:
            generator = torch.Generator().manual_seed(0)
            spacing = torch.ones(tokens, dtype=torch.float64) * world["gap"]
            if label.startswith("mean time"):
                spacing = world["gap"] * torch.empty_like(spacing).exponential_(generator=generator)
            data = simulate_trajectories(
                count, spacing.cumsum(0), FREQUENCIES, decay=world["decay"],
                radial_std=world["radial"], tangential_std=world["tangential"],
                outlier_rate=world["outliers"], generator=generator,
            )  # fmt: skip
            found = compare(data, world["decay"], world["radial"], world["tangential"])
            tqdm.write(f"\n{label} = {value}")
            for name, (angle, magnitude) in found.items():
                tqdm.write(f"  {name:26s} angle {angle:7.3f}°   magnitude {magnitude:.4f}")
                curves.setdefault(name, []).append((angle, magnitude))
            rivals = [found["softmax attention"], found["isotropic filter"]]
            wins["angle"] += found["RT-Filter"][0] <= min(r[0] for r in rivals)
            best = min(found["RT-Filter"][1], found["RT-Filter, joint weights"][1])
            wins["magnitude"] += best <= min(r[1] for r in rivals)
            progress.update()
        for row, quantity in enumerate(("angle error (degrees)", "relative magnitude error")):
            for name, values in curves.items():
                style = "--" if name == "observation" else "-o"
                axes[row, column].plot(
                    [v for v, _ in points], [pair[row] for pair in values], style, label=name
                )
            axes[row, column].set(xlabel=label, ylabel=quantity, yscale="log")
    progress.close()
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(writable(arguments.output), dpi=120)
    total = sum(map(len, sweeps.values()))
    print(
        f"\nRT-Filter at least as good as both rivals: angle in {wins['angle']} of {total} worlds,"
        f" magnitude in {wins['magnitude']} of {total}. Saved {arguments.output}"
    )


if __name__ == "__main__":
    main()
