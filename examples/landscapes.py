"""Rosenbrock and Rastrigin: RPT beside AdamW and torch-optimizer's optimizers.

    python examples/landscapes.py [--schedule constant|cosine] [--rates 8] [--steps 500] [--all]
        [--out runs/landscapes.png] [--quick]

torch-optimizer is in the `bench` extra: `pip install -e '.[bench]'`; without it, RPT and AdamW only.

torch-optimizer's own pictures: 500 steps from (-2, 2) and (-2, 3.5) on a parameter of two numbers,
every optimizer at the best of as many learning rates, judged by its last point's distance to the
minimum. The stars are the minima. Two numbers are no matrix: of RPT this shows the vector rule,
fixed-length steps along transported momentum, and nothing of its metric or its polar share.
"""

import argparse
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from quick import RUNS, announce, writable
from torch import Tensor
from tqdm import tqdm

import rpt

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS = 500
SHOWN = (
    "AdaBelief", "AdaBound", "Adahessian", "AdamP", "DiffGrad", "Lamb", "MADGRAD",
    "QHAdam", "RAdam", "Ranger", "SGDW", "Shampoo", "Yogi",
)  # fmt: skip
Factory = Callable[[list[Tensor], float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Landscape:
    """A function of the plane, where it starts, and where its minimum is."""

    name: str
    function: Callable[[Tensor], Tensor]
    start: tuple[float, float]
    minimum: tuple[float, float]
    window: tuple[float, float, float, float]


def rosenbrock(point: Tensor) -> Tensor:
    x, y = point.unbind(-1)
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def rastrigin(point: Tensor) -> Tensor:
    return 20 + (point**2 - 10 * torch.cos(2 * math.pi * point)).sum(-1)


LANDSCAPES = (
    Landscape("Rosenbrock", rosenbrock, (-2.0, 2.0), (1.0, 1.0), (-2.3, 2.3, -1.2, 3.2)),
    Landscape("Rastrigin", rastrigin, (-2.0, 3.5), (0.0, 0.0), (-4.5, 4.5, -4.5, 4.5)),
)


def optimizers(everything: bool = False) -> dict[str, Factory]:
    """RPT, AdamW, and torch-optimizer's better known ones or everything, if it is installed."""
    found: dict[str, Factory] = {
        "RPT": lambda p, lr: rpt.ResidualPolarTransport(p, lr=lr),
        "RPT, paper preset": lambda p, lr: rpt.ResidualPolarTransport(p, lr=lr, preset="paper"),
        "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    }
    try:
        import torch_optimizer
    except ImportError:
        print("torch-optimizer is missing (pip install -e '.[bench]'): RPT and AdamW only")
        return found
    for name in dir(torch_optimizer):
        kind = getattr(torch_optimizer, name)
        # Lookahead wraps another optimizer, and fails beside recent torch.
        if not isinstance(kind, type) or name in ("Optimizer", "Lookahead"):
            continue
        if issubclass(kind, torch.optim.Optimizer) and (everything or name in SHOWN):
            found[name] = lambda p, lr, kind=kind: kind(p, lr=lr)  # type: ignore[misc]
    return found


def descend(
    make: Factory, landscape: Landscape, rate: float, schedule: str, steps: int = STEPS
) -> Tensor:
    """The path, (steps + 1, 2)."""
    point = torch.nn.Parameter(torch.tensor(landscape.start))
    optimizer = make([point], rate)
    path = [point.detach().clone()]
    for step in range(steps):
        if schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        optimizer.zero_grad()
        # Adahessian differentiates the gradient once more.
        landscape.function(point).backward(create_graph="hessian" in type(optimizer).__name__)
        point.grad = point.grad / point.grad.norm().clamp_min(1.0)
        optimizer.step()
        path.append(point.detach().clone())
        if not path[-1].isfinite().all():
            break
    return torch.stack(path)


def best_path(
    make: Factory, landscape: Landscape, rates: list[float], schedule: str, steps: int = STEPS
) -> tuple[float, float, Tensor]:
    """(distance of the last point to the minimum, rate, path) of the best rate."""
    found = []
    for rate in rates:
        path = descend(make, landscape, rate, schedule, steps)
        distance = (path[-1] - torch.tensor(landscape.minimum)).norm().item()
        found.append((distance if math.isfinite(distance) else math.inf, rate, path))
    return min(found, key=lambda entry: entry[:2])


def plot(results: dict[str, dict[str, tuple[float, float, Tensor]]], out: str | Path) -> None:
    columns = 8
    rows = math.ceil(len(results) / columns)
    figure, axes = plt.subplots(
        2 * rows, columns, figsize=(1.75 * columns, 3.6 * rows), layout="constrained"
    )
    for axis in axes.flat:
        axis.axis("off")
    for block, landscape in enumerate(LANDSCAPES):
        left, right, bottom, top = landscape.window
        x, y = torch.meshgrid(
            torch.linspace(left, right, 160), torch.linspace(bottom, top, 160), indexing="xy"
        )
        height = landscape.function(torch.stack((x, y), -1))
        height = height.log1p() if landscape.name == "Rosenbrock" else height
        order = sorted(results, key=lambda name: results[name][landscape.name][0])
        for place, name in enumerate(order):
            distance, rate, path = results[name][landscape.name]
            axis = axes[block * rows + place // columns, place % columns]
            axis.contourf(x, y, height, 14, cmap="Greys", alpha=0.6)
            axis.plot(*path.T, color="#c0392b" if "RPT" in name else "#2471a3", lw=1)
            axis.plot(*path[-1], "o", color="black", ms=3)
            axis.plot(*landscape.minimum, "*", color="#f1c40f", ms=7, mec="black", mew=0.4)
            axis.set(xlim=(left, right), ylim=(bottom, top))
            axis.set_title(f"{name}\n{distance:.1g} away, rate {rate:.1g}", fontsize=6.5)
    figure.savefig(out, dpi=75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=("constant", "cosine"), default="constant")
    parser.add_argument("--rates", type=int, default=8, help="learning rates tried by each (8)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each ({STEPS})")
    parser.add_argument("--all", action="store_true", help="all that torch-optimizer has")
    parser.add_argument("--out", default=str(RUNS / "landscapes.png"), help="the picture")
    parser.add_argument(
        "--quick", action="store_true", help="two rates, 20 steps; figures mean nothing"
    )
    options = parser.parse_args()
    announce(options.quick)
    if options.quick:
        options.rates, options.steps = 2, 20
    if options.rates < 1 or options.steps < 1:
        parser.error("--rates and --steps must be at least 1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch-optimizer calls signatures that torch deprecated
    rates = torch.logspace(-3, 0.5, options.rates).tolist()
    results: dict[str, dict[str, tuple[float, float, Tensor]]] = {}
    with tqdm(optimizers(options.all).items(), unit="optimizer") as bar:
        for name, make in bar:
            bar.set_postfix_str(name)
            try:
                results[name] = {
                    scape.name: best_path(make, scape, rates, options.schedule, options.steps)
                    for scape in LANDSCAPES
                }
            except Exception as error:
                tqdm.write(f"{name} left out: {type(error).__name__}: {error}")
    print(
        f"\n{options.schedule} rate, distance to the minimum after {options.steps} steps (rate)\n"
    )
    print(f"{'':20}" + "".join(f"{landscape.name:>24}" for landscape in LANDSCAPES))
    for name in sorted(results, key=lambda n: sum(entry[0] for entry in results[n].values())):
        cells = (f"{distance:.2g} ({rate:.2g})" for distance, rate, _ in results[name].values())
        print(f"{name:20}" + "".join(f"{cell:>24}" for cell in cells))
    plot(results, writable(options.out))
    print(f"\npicture: {options.out}")


if __name__ == "__main__":
    main()
