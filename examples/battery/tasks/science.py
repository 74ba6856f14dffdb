"""Operators and equations: ill-conditioned maps, factorisation, operator learning, a PINN."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..task import Batch, Problem, Task, minibatches

DIMENSION, CONDITION = 32, 1e4


def ill_conditioned(seed: int) -> Problem:
    """Identify a 32×32 operator from inputs whose covariance has condition 1e4.

    The held-out loss is exact: E‖(W−A)x‖² / E‖Ax‖².
    """
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(DIMENSION, DIMENSION, generator=generator))[0] for _ in range(2)
    )
    root = right * torch.logspace(0, -0.5 * math.log10(CONDITION), DIMENSION)  # x = root @ z
    torch.manual_seed(seed)
    model = nn.Linear(DIMENSION, DIMENSION, bias=False)

    def batches() -> Iterator[Batch]:
        while True:
            x = torch.randn(64, DIMENSION, generator=generator) @ root.T
            yield x, x @ left.T

    scale = (left @ root).square().sum()

    def loss(net: nn.Module, rows: Batch) -> Tensor:
        return (net(rows[0]) - rows[1]).square().sum(-1).mean() / scale

    def measure(net: nn.Module) -> dict[str, float]:
        error = (net.weight - left) @ root  # type: ignore[operator]
        return {"loss": (error.square().sum() / scale).item()}

    return Problem(model, batches(), loss, measure)


class Factors(nn.Module):
    """Entry (i, j) is ⟨U_i, V_j⟩."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(rows, rank), nn.Embedding(columns, rank)
        for table in (self.left, self.right):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        return (self.left(i) * self.right(j)).sum(-1)


def matrix_factorisation(seed: int) -> Problem:
    """Complete a 120×90 matrix of rank 5 from 40 % of its entries, seen with noise of 5 %."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(120, 5, generator=generator) @ torch.randn(5, 90, generator=generator)
    truth = truth / truth.std()
    seen = torch.rand(120, 90, generator=generator) < 0.4
    noisy = truth + 0.05 * torch.randn(120, 90, generator=generator)
    i, j = seen.nonzero().unbind(-1)
    held_i, held_j = (~seen).nonzero().unbind(-1)
    torch.manual_seed(seed)
    return Problem(
        Factors(120, 90, 8),
        minibatches(seed, 512, i, j, noisy[i, j]),
        lambda net, rows: functional.mse_loss(net(rows[0], rows[1]), rows[2]),
        lambda net: {
            "loss": functional.mse_loss(net(held_i, held_j), truth[held_i, held_j]).item()
        },
    )


class DeepONet(nn.Module):
    """Branch on the sampled function, trunk on the query point, inner product."""

    def __init__(self, sensors: int, width: int = 64, basis: int = 32) -> None:
        super().__init__()

        def path(columns: int) -> nn.Module:
            return nn.Sequential(
                nn.Linear(columns, width), nn.GELU(),
                nn.Linear(width, width), nn.GELU(),
                nn.Linear(width, basis),
            )  # fmt: skip

        self.branch, self.trunk = path(sensors), path(1)

    def forward(self, function: Tensor, points: Tensor) -> Tensor:
        return self.branch(function) @ self.trunk(points).mT / math.sqrt(32)


def operator_1d(seed: int) -> Problem:
    """Learn the antiderivative: f at 32 sensors → its integral from 0 at 32 points, 1,500 functions."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.linspace(0, 1, 32)
    k = torch.arange(1, 7).float()
    a, b = (torch.randn(2000, 6, generator=generator) / k for _ in range(2))
    angle = 2 * math.pi * k[:, None] * grid
    f = a @ angle.sin() + b @ angle.cos()
    w = 2 * math.pi * k
    integral = (a / w) @ (1 - angle.cos()) + (b / w) @ angle.sin()
    scale = integral[:1500].std()
    integral = integral / scale
    torch.manual_seed(seed)
    points = grid[:, None]
    return Problem(
        DeepONet(32),
        minibatches(seed, 64, f[:1500], integral[:1500]),
        lambda net, rows: functional.mse_loss(net(rows[0], points), rows[1]),
        lambda net: {"loss": functional.mse_loss(net(f[1500:], points), integral[1500:]).item()},
    )


class Ansatz(nn.Module):
    """(1 - x²) times a small tanh network: zero at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return (1 - x * x) * self.net(x)


def pinn(seed: int) -> Problem:
    """Solve -u″ = f on [-1, 1], u = 0 at both ends, from the equation's residual at random points.

    u = sin πx + ½ sin 3πx; the held-out loss is the relative squared error of u itself.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Ansatz()
    grid = torch.linspace(-1, 1, 201)[:, None]
    exact = torch.sin(math.pi * grid) + 0.5 * torch.sin(3 * math.pi * grid)

    def batches() -> Iterator[Batch]:
        while True:
            x = 2 * torch.rand(128, 1, generator=generator) - 1
            f = math.pi**2 * (torch.sin(math.pi * x) + 4.5 * torch.sin(3 * math.pi * x))
            yield x, f

    def loss(net: nn.Module, rows: Batch) -> Tensor:
        x = rows[0].requires_grad_()
        (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return functional.mse_loss(-second, rows[1]) / math.pi**4

    def measure(net: nn.Module) -> dict[str, float]:
        return {"loss": ((net(grid) - exact).square().mean() / exact.square().mean()).item()}

    return Problem(model, batches(), loss, measure)


TASKS = [
    Task("ill_conditioned", "operators", ill_conditioned, 500, weight_decay=0.0),
    Task("matrix_factorisation", "operators", matrix_factorisation, 600),
    Task("operator_1d", "operators", operator_1d, 500),
    Task("pinn", "operators", pinn, 500),
]
