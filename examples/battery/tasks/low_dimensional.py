"""Ripple and twelve more low-dimensional tasks: folded, sharp, periodic and multiscale targets.

Ripple trains the self-context MLP, as published; the twelve others a plain MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from rpt.geometry.self_context import ContextMLP
from torch import Tensor, nn

from ..task import Problem, Task, classification, regression

PI = math.pi
POINTS, BATCH = 4000, 128


def _uniform(generator: torch.Generator, dims: int = 2) -> Tensor:
    return 2 * torch.rand(POINTS, dims, generator=generator) - 1


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


# Regressions: x in [-1, 1]² and a fixed generator to one value each.


def ripple(x: Tensor, _: torch.Generator) -> Tensor:
    a, b = (PI * x).unbind(-1)
    return torch.sin(3 * a) * torch.cos(3 * b) + 0.5 * torch.sin(5 * a + b)


def chirps(x: Tensor, _: torch.Generator) -> Tensor:
    a, b = ((x + 1) / 2).unbind(-1)
    return torch.sin(2 * PI * (a + 3 * a * a)) + torch.sin(2 * PI * (b + 2 * b * b))


def fourier_mixture(x: Tensor, generator: torch.Generator) -> Tensor:
    waves = torch.randint(-4, 5, (12, 2), generator=generator).float()
    phases = 2 * PI * torch.rand(12, generator=generator)
    return (torch.sin(PI * x @ waves.T + phases) / (1 + waves.norm(dim=1))).sum(-1)


def multiscale(x: Tensor, _: torch.Generator) -> Tensor:
    a, b = x.unbind(-1)
    return sum(
        (torch.sin(2**j * PI * (a + 0.3 * b)) + torch.cos(2**j * PI * (b - 0.2 * a))) / 2**j
        for j in range(4)
    )  # type: ignore[return-value]


def periodic_wells(x: Tensor, _: torch.Generator) -> Tensor:
    return -torch.exp(2.5 * (torch.cos(3 * PI * x) - 1).sum(-1))


def ring_distance(x: Tensor, _: torch.Generator) -> Tensor:
    radius = x.norm(dim=-1)
    return torch.minimum((radius - 0.35).abs(), (radius - 0.85).abs())


def localised_steps(x: Tensor, generator: torch.Generator) -> Tensor:
    centres = 1.6 * torch.rand(6, 2, generator=generator) - 0.8
    distance = (x[:, None] - centres).norm(dim=-1)
    signs = torch.tensor([1.0, -1.0, 1.5, -1.5, 0.7, -0.7])
    return (signs * torch.sigmoid((0.25 - distance) / 0.02)).sum(-1)


# Classifications: a generator to points and class indices.


def _spiral_arms(generator: torch.Generator, arms: int, turns: float) -> tuple[Tensor, Tensor]:
    label = torch.randint(arms, (POINTS,), generator=generator)
    radius = torch.rand(POINTS, generator=generator).sqrt()
    angle = 2 * PI * (turns * radius + label / arms)
    points = torch.stack((radius * angle.cos(), radius * angle.sin()), -1)
    return points + 0.015 * _random(generator, POINTS, 2), label


def spirals_2d(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _spiral_arms(generator, 3, 1.5)


def spirals_16d(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    points, label = _spiral_arms(generator, 2, 1.0)
    rotation = torch.linalg.qr(_random(generator, 16, 16))[0]
    rest = 0.3 * _random(generator, POINTS, 14)
    return torch.cat((points, rest), -1) @ rotation, label


def checkerboard(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = _uniform(generator)
    return x, torch.floor(2.5 * (x + 1)).sum(-1).long() % 2


def pinwheel(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    label = torch.randint(5, (POINTS,), generator=generator)
    radial = 1 + 0.3 * _random(generator, POINTS)
    tangential = 0.08 * _random(generator, POINTS)
    angle = 2 * PI * label / 5 + 0.9 * torch.exp(radial)
    return torch.stack(
        (
            radial * angle.cos() - tangential * angle.sin(),
            radial * angle.sin() + tangential * angle.cos(),
        ),
        -1,
    ) / 1.5, label  # fmt: skip


def radial_stripes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = _uniform(generator)
    return x, (torch.sin(4 * PI * x.norm(dim=-1)) > 0).long()


def swiss_cheese(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = _uniform(generator)
    holes = 1.7 * torch.rand(14, 2, generator=generator) - 0.85
    radii = 0.08 + 0.14 * torch.rand(14, generator=generator)
    return x, ((x[:, None] - holes).norm(dim=-1) < radii).any(-1).long()


def _mlp(dims: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(dims, 64), nn.GELU(),
        nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, outputs),
    )  # fmt: skip


def _build_regression(target: Callable[[Tensor, torch.Generator], Tensor], seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    x = _uniform(generator)
    y = target(x, torch.Generator().manual_seed(7))[:, None]
    cut = 3 * POINTS // 4
    y = (y - y[:cut].mean()) / y[:cut].std()
    context = target is ripple
    # The published Ripple lives on [-π, π]²; the plain MLPs get inputs of about unit size.
    x = (PI if context else 2) * x
    return regression(
        seed,
        lambda: ContextMLP(2, 1, width=24) if context else _mlp(2, 1),
        (x[:cut], y[:cut]),
        (x[cut:], y[cut:]),
        BATCH,
    )


def _build_classification(
    points: Callable[[torch.Generator], tuple[Tensor, Tensor]], seed: int
) -> Problem:
    x, y = points(torch.Generator().manual_seed(seed))
    cut = 3 * POINTS // 4
    classes = int(y.max()) + 1
    x = 2 * x
    return classification(
        seed, lambda: _mlp(x.shape[1], classes), (x[:cut], y[:cut]), (x[cut:], y[cut:]), BATCH
    )


REGRESSIONS = (
    chirps, fourier_mixture, multiscale, periodic_wells, ring_distance, localised_steps,
)  # fmt: skip
CLASSIFICATIONS = (
    spirals_2d, spirals_16d, checkerboard, pinwheel, radial_stripes, swiss_cheese,
)  # fmt: skip

TASKS = [
    Task("ripple", "low-dimensional", partial(_build_regression, ripple), 400, clip=5.0),
    Task(
        "ripple_constant", "constant rate", partial(_build_regression, ripple), 400,
        clip=5.0, schedule="constant", evaluations=40, tail=8,
    ),
    *(
        Task(f.__name__, "low-dimensional", partial(_build_regression, f), 400, clip=5.0)
        for f in REGRESSIONS
    ),
    *(
        Task(f.__name__, "low-dimensional", partial(_build_classification, f), 400, clip=5.0)
        for f in CLASSIFICATIONS
    ),
]  # fmt: skip
