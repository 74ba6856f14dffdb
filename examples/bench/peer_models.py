"""The networks of the step benchmark: two lists of matrices, a GPT, a ResNet-18 and four tiny networks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rpt.geometry.self_context import ContextMLP
from torch import Tensor, nn
from torch.nn import functional

from rpt.demo.model import LanguageModel

__all__ = ["MODELS", "Workload"]

Gradients = Callable[[nn.Module], None]


@dataclass
class Workload:
    """A model and how it gets its gradients.

    Attributes:
        name, title: for the command line and for the table.
        model: what each arm copies.
        batch: for a round's number, a function that puts gradients on any copy of the model.
        trains: whether that is a real forward and backward pass.
    """

    name: str
    title: str
    model: nn.Module
    batch: Callable[[int], Gradients]
    trains: bool = True

    @property
    def tensors(self) -> int:
        return len(list(self.model.parameters()))


def matrices(width: int, pairs: int, device: torch.device) -> Workload:
    """`pairs` square matrices and as many four times as tall, with correlated synthetic gradients."""
    shapes = [(width, width)] * pairs + [(4 * width, width)] * pairs
    model = nn.ParameterList(nn.Parameter(torch.randn(s, device=device) * 0.02) for s in shapes)
    left = [torch.randn(r, 32, device=device) for r, _ in shapes]
    right = [torch.randn(32, c, device=device) for _, c in shapes]

    def batch(round_: int) -> Gradients:
        noise = [torch.randn(s, device=device) for s in shapes]
        found = [a @ b + n for a, b, n in zip(left, right, noise, strict=True)]

        def put(copy: nn.Module) -> None:
            for parameter, gradient in zip(copy.parameters(), found, strict=True):
                parameter.grad = gradient.clone()

        return put

    title = f"{pairs} × ({width}×{width}) + {pairs} × ({4 * width}×{width})"
    return Workload(f"matrices{width}", title, model, batch, trains=False)


def supervised(
    name: str,
    title: str,
    model: nn.Module,
    sample: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
) -> Workload:
    def batch(round_: int) -> Gradients:
        x, y = sample()

        def put(copy: nn.Module) -> None:
            copy.zero_grad()
            loss(copy, x, y).backward()

        return put

    return Workload(name, title, model, batch)


def gpt(device: torch.device, width: int = 256) -> Workload:
    """The demo's plain GPT at width 256, 4 layers, 2,048 tokens a step."""
    vocabulary, context = 128, 128
    model = LanguageModel(vocabulary, context, width, 4, 4, block="plain").to(device)

    def sample() -> tuple[Tensor, Tensor]:
        codes = torch.randint(vocabulary, (16, context + 1), device=device)
        return codes[:, :-1], codes[:, 1:]

    title = f"GPT, width {width}, 4 layers, 2,048 tokens"
    return supervised("gpt256", title, model, sample, lambda m, x, y: m.loss(x, y))


def context_mlp(device: torch.device) -> Workload:
    """A ContextMLP of width 24 at batch 256: many tiny tensors."""
    model = ContextMLP(2, 1, 24).to(device)

    def sample() -> tuple[Tensor, Tensor]:
        x = torch.rand(256, 2, device=device) * 2 - 1
        return x, torch.sin(7 * x).prod(-1, keepdim=True)

    title = "ContextMLP, width 24, batch 256"
    return supervised(
        "contextmlp", title, model, sample, lambda m, x, y: functional.mse_loss(m(x), y)
    )


def mlp(
    name: str, title: str, widths: tuple[int, ...], batch: int, device: torch.device
) -> Workload:
    """A tanh MLP on a smooth target of its first inputs."""
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh()))).to(device)

    def sample() -> tuple[Tensor, Tensor]:
        x = torch.rand(batch, widths[0], device=device) * 2 - 1
        return x, torch.sin(3 * x[:, :1]).expand(batch, widths[-1])

    return supervised(name, title, model, sample, lambda m, x, y: functional.mse_loss(m(x), y))


class Residual(nn.Module):
    """ResNet's basic block: two 3×3 convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(device: torch.device) -> Workload:
    """ResNet-18 with a stem for small images, at 16 images of 32×32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        for block in range(2):
            layers.append(Residual(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    model = nn.Sequential(*layers).to(device)

    def sample() -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 3, 32, 32, device=device)
        return x, torch.randint(10, (16,), device=device)

    title = "ResNet-18, 16 images of 32×32"
    return supervised(
        "resnet18", title, model, sample, lambda m, x, y: functional.cross_entropy(m(x), y)
    )


MODELS: dict[str, Callable[[torch.device], Workload]] = {
    "matrices256": lambda device: matrices(256, 12, device),
    "matrices512": lambda device: matrices(512, 6, device),
    "gpt256": gpt,
    "contextmlp": context_mlp,
    "mlp64": lambda device: mlp("mlp64", "MLP 2-64-64-3, batch 256", (2, 64, 64, 3), 256, device),
    "mlp10": lambda device: mlp("mlp10", "MLP 64-64-64-10, batch 64", (64, 64, 64, 10), 64, device),
    "autoencoder": lambda device: mlp(
        "autoencoder", "Autoencoder 64-96-8-96-64, batch 128", (64, 96, 8, 96, 64), 128, device
    ),
    "resnet18": resnet18,
}
