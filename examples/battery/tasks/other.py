"""Eight tasks that no default was chosen on: fine-tuning, diffusion, recurrence, graphs, a bandit, fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from rpt.demo.model import LanguageModel
from rpt.demo.text import CHARACTERS, VOCABULARY_SIZE

from ..task import Batch, Problem, Task, classification, minibatches, regression, split
from .images import digits
from .text import characters, language_problem

PI = math.pi

# Fine-tuning


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of rank `rank`, zero at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * (x @ self.down.mT) @ self.up.mT


def _upper_case() -> Tensor:
    """Code of every character's upper case."""
    return torch.tensor([CHARACTERS.index(c.upper()) for c in CHARACTERS] + [VOCABULARY_SIZE - 1])


@lru_cache
def _pretrained() -> dict[str, Tensor]:
    """150 steps of AdamW on the text as it is; the same for every optimizer and seed."""
    problem = language_problem(
        77, lambda: LanguageModel(VOCABULARY_SIZE, 64, 48, 2), characters(), 16, 64
    )
    optimizer = torch.optim.AdamW(problem.model.parameters(), 3e-3)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 15) * (1 - step / 150)
        optimizer.zero_grad()
        problem.loss(problem.model, next(problem.batches)).backward()
        optimizer.step()
    return problem.model.state_dict()


def lora_char(seed: int) -> Problem:
    """A small GPT learns to continue upper-case text through adapters of rank 4 alone."""
    table = _upper_case()
    train, held_out = (table[part.long()] for part in characters())

    def model() -> nn.Module:
        gpt = LanguageModel(VOCABULARY_SIZE, 64, 48, 2)
        gpt.load_state_dict(_pretrained())
        gpt.requires_grad_(False)
        torch.manual_seed(seed)
        for block in gpt.blocks:
            for name in ("qkv", "attention_output", "mlp_up", "mlp_down"):
                setattr(block, name, LowRank(getattr(block, name), 4))
        return gpt

    return language_problem(seed, model, (train, held_out), 16, 64)


# Diffusion


class Denoiser(nn.Module):
    """Noise in a noisy 8×8 image, from the image and its time in [0, 1]."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.enter, self.time = nn.Linear(64, width), nn.Linear(16, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.leave = nn.Linear(width, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None] * PI * 2.0 ** torch.arange(8)
        h = self.enter(x) + self.time(torch.cat((angle.sin(), angle.cos()), -1))
        for layer in self.hidden:
            h = h + layer(functional.silu(h))
        return self.leave(functional.silu(h))


def _noised(x: Tensor, generator: torch.Generator) -> Batch:
    """(noisy, time, noise), variance preserved on a cosine schedule."""
    t = torch.rand(len(x), generator=generator)
    noise = torch.randn(x.shape, generator=generator)
    angle = (t * PI / 2)[:, None]
    return angle.cos() * x + angle.sin() * noise, t, noise


def diffusion_digits(seed: int) -> Problem:
    images = 2 * digits()[0] - 1
    (train, _), (held_out, _) = split(images, images, seed)
    generator = torch.Generator().manual_seed(30_000 + seed)
    fixed = _noised(held_out.repeat(4, 1), torch.Generator().manual_seed(5))
    torch.manual_seed(seed)

    def batches() -> Iterator[Batch]:
        for rows in minibatches(seed, 128, train):
            yield _noised(rows[0], generator)

    def loss(net: nn.Module, rows: Batch) -> Tensor:
        return functional.mse_loss(net(rows[0], rows[1]), rows[2])

    return Problem(Denoiser(), batches(), loss, lambda net: {"loss": loss(net, fixed).item()})


# Recurrence


class Recurrent(nn.Module):
    """A GRU over the eight rows of a digit, from top to bottom."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.gru = nn.GRU(8, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.gru(images.view(-1, 8, 8))[0][:, -1])


def gru_digits(seed: int) -> Problem:
    return classification(seed, Recurrent, *split(*digits(), seed), batch=64)


# Graphs


class GraphNetwork(nn.Module):
    """Three rounds of messages on dense adjacency matrices, then a sum over nodes."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.enter = nn.Linear(1, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.sent = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.leave = nn.Linear(width, 1)

    def forward(self, adjacency: Tensor) -> Tensor:
        h = self.enter(adjacency.sum(-1, keepdim=True) / 4)
        for own, sent in zip(self.own, self.sent, strict=True):
            h = h + functional.gelu(own(h) + adjacency @ sent(h) / 4)
        return self.leave(h.mean(1))


def graph_paths(seed: int) -> Problem:
    """The logarithm of how many walks of five steps a random graph of 14 nodes has."""
    generator = torch.Generator().manual_seed(seed)
    density = 0.15 + 0.35 * torch.rand(2000, 1, 1, generator=generator)
    upper = (torch.rand(2000, 14, 14, generator=generator) < density).float().triu(1)
    graphs = upper + upper.mT
    walks = torch.linalg.matrix_power(graphs.double(), 5).sum((1, 2)).log1p().float()[:, None]
    y = (walks - walks[:1500].mean()) / walks[:1500].std()
    rows = ((graphs[:1500], y[:1500]), (graphs[1500:], y[1500:]))
    return regression(seed, GraphNetwork, *rows, batch=64)


# Reward


def bandit_digits(seed: int) -> Problem:
    """Policy gradient: ten arms, reward 1 for a digit's own class. Held out: 1 − expected reward."""
    (x1, y1), (x2, y2) = split(*digits(), seed)
    generator = torch.Generator().manual_seed(40_000 + seed)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )

    def loss(net: nn.Module, rows: Batch) -> Tensor:
        log_policy = net(rows[0]).log_softmax(-1)
        arms = torch.multinomial(log_policy.detach().exp(), 1, generator=generator)
        reward = (arms == rows[1][:, None]).float()
        return -((reward - reward.mean()) * log_policy.gather(1, arms)).mean()

    def measure(net: nn.Module) -> dict[str, float]:
        policy = net(x2).softmax(-1)
        return {"loss": 1 - policy.gather(1, y2[:, None]).mean().item()}

    return Problem(model, minibatches(seed, 128, x1, y1), loss, measure)


# Fields


class Sine(nn.Module):
    """A linear layer and sin(30 ·), initialised as published (Sitzmann and others, 2020)."""

    def __init__(self, columns: int, rows: int, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, rows)
        bound = 1 / columns if first else (6 / columns) ** 0.5 / 30
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(x))


def siren_image(seed: int) -> Problem:
    """A photograph of 64×64 from three quarters of its pixels."""
    from sklearn.datasets import load_sample_image

    photo = torch.tensor(load_sample_image("china.jpg")).float().mean(-1)[None, None, :420, :420]
    image = functional.interpolate(photo, (64, 64), mode="area")[0, 0]
    y = ((image - image.mean()) / image.std()).reshape(-1, 1)
    axis = torch.linspace(-1, 1, 64)
    x = torch.cartesian_prod(axis, axis)

    def model() -> nn.Module:
        return nn.Sequential(Sine(2, 64, first=True), Sine(64, 64), Sine(64, 64), nn.Linear(64, 1))

    return regression(seed, model, *split(x, y, seed), batch=512)


def _tanh_network(columns: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(columns, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def _derivative(values: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(values.sum(), x, create_graph=True)[0]


def _equation(
    seed: int,
    residual: Callable[[nn.Module, Tensor], Tensor],
    exact: Callable[[Tensor], Tensor],
    edges: Callable[[Tensor], Tensor],
    low: tuple[float, float],
) -> Problem:
    """Residual at 128 random points of [low, 1]², plus the misfit where `edges` puts others.

    Held out: relative squared error of the solution itself on a grid.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    start = torch.tensor(low)
    axes = [torch.linspace(a, 1, 41) for a in low]
    grid = torch.cartesian_prod(*axes)
    truth = exact(grid)

    def batches() -> Iterator[Batch]:
        while True:
            inside, border = (
                start + (1 - start) * torch.rand(128, 2, generator=generator) for _ in range(2)
            )
            yield inside, edges(border)

    def loss(net: nn.Module, rows: Batch) -> Tensor:
        misfit = net(rows[1]) - exact(rows[1])
        return residual(net, rows[0].requires_grad_()).square().mean() + misfit.square().mean()

    def measure(net: nn.Module) -> dict[str, float]:
        return {"loss": ((net(grid) - truth).square().mean() / truth.square().mean()).item()}

    return Problem(_tanh_network(2), batches(), loss, measure)


def pinn_poisson_2d(seed: int) -> Problem:
    """−Δu = f on [−1, 1]², u known on the border; u = sin πx sin πy + ½ sin 2πx sin πy."""

    def exact(x: Tensor) -> Tensor:
        a, b = (PI * x).split(1, -1)
        return a.sin() * b.sin() + 0.5 * (2 * a).sin() * b.sin()

    def residual(net: nn.Module, x: Tensor) -> Tensor:
        a, b = (PI * x.detach()).split(1, -1)
        source = PI**2 * (2 * a.sin() + 2.5 * (2 * a).sin()) * b.sin()
        first = _derivative(net(x), x)
        second = sum(_derivative(first[:, k], x)[:, k : k + 1] for k in range(2))
        return (second + source) / PI**2

    def edges(x: Tensor) -> Tensor:
        side = torch.where(x[: len(x) // 2, :1] > 0, 1.0, -1.0)
        return torch.cat((
            torch.cat((side, x[: len(x) // 2, 1:]), -1),
            torch.cat((x[len(x) // 2 :, :1], side), -1),
        ))  # fmt: skip

    return _equation(seed, residual, exact, edges, (-1.0, -1.0))


def pinn_burgers(seed: int) -> Problem:
    """u_t + u u_x = ν u_xx for x in [−1, 1], t in [0, 1]: a front of width 4ν = 0.2 that travels."""
    viscosity = 0.05

    def exact(x: Tensor) -> Tensor:
        place, time = x.split(1, -1)
        return torch.sigmoid(-(place - 0.5 * time) / (2 * viscosity))

    def residual(net: nn.Module, x: Tensor) -> Tensor:
        u = net(x)
        first = _derivative(u, x)
        second = _derivative(first[:, 0], x)[:, :1]
        return first[:, 1:] + u * first[:, :1] - viscosity * second

    def edges(x: Tensor) -> Tensor:
        begin = torch.cat((x[: len(x) // 2, :1], torch.zeros(len(x) // 2, 1)), -1)
        rest = x[len(x) // 2 :]
        return torch.cat((begin, torch.cat((rest[:, :1].sign(), rest[:, 1:]), -1)))

    return _equation(seed, residual, exact, edges, (-1.0, 0.0))


TASKS = [
    Task("lora_char", "other", lora_char, 200),
    Task("diffusion_digits", "other", diffusion_digits, 400),
    Task("gru_digits", "other", gru_digits, 300),
    Task("graph_paths", "other", graph_paths, 300),
    Task("bandit_digits", "other", bandit_digits, 400),
    Task("siren_image", "other", siren_image, 300),
    Task("pinn_poisson_2d", "other", pinn_poisson_2d, 400),
    Task("pinn_burgers", "other", pinn_burgers, 400),
]
