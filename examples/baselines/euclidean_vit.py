"""The Euclidean vision transformer of the same sizes: the baseline of `PolarViT`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rpt.geometry.lorentz.layers.embedding import sine_cosine_table
from rpt.geometry.lorentz.models.config import ViTConfig
from rpt.geometry.lorentz.models.vit import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "EuclideanViT",
    "EuclideanViTBlock",
]


class EuclideanViTBlock(nn.Module):
    """The pre-norm block of Dosovitskiy et al. (2021)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.first = nn.Linear(width, config.mlp_width)
        self.second = nn.Linear(config.mlp_width, width)
        for linear in (self.query, self.key, self.value, self.output, self.first, self.second):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, P, n) to tokens of the same shape."""
        y = self.norm1(x)
        query, key, value = (
            part(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        heads = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.output(heads.transpose(1, 2).flatten(-2))
        return x + self.second(functional.gelu(self.first(self.norm2(x))))

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """The matrices that first read the attention's averages and the activation's output."""
        return [self.output, self.second]


class EuclideanViT(VisionTransformer):
    """A plain vision transformer: patches, positions, pre-norm blocks, norm, mean, linear head.

    Reads sizes, `position_table` and `readout` of the configuration; "centroid" is the mean.
    """

    undecayed_parameters = ("table", "class_token")

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        width = config.width
        self.patch_embedding = nn.Conv2d(
            config.in_channels, width, config.patch_size, stride=config.patch_size
        )
        self.class_token: nn.Parameter | None = None
        if config.readout == "class_token":
            self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        if config.position_table == "learned":
            self.table: Tensor | None = nn.Parameter(0.02 * torch.randn(config.num_patches, width))
        elif config.position_table == "sine_cosine":
            self.register_buffer("table", sine_cosine_table(config.grid, width))
        else:
            self.table = None
        self.blocks = nn.ModuleList(EuclideanViTBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)
        self.head = self.new_head()

    def new_head(self) -> nn.Module:
        """A freshly drawn linear head."""
        head = nn.Linear(self.config.width, self.config.num_classes)
        nn.init.xavier_uniform_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    def features(self, images: Tensor) -> Tensor:
        """Images → one vector per image, (batch, n)."""
        self.check_images(images)
        x = self.patch_embedding(images).flatten(2).mT
        if self.table is not None:
            x = x + self.table
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        x = self.norm(self.run_blocks(x))
        return x[:, 0] if self.class_token is not None else x.mean(1)

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """Nothing beyond what the blocks declare."""
        return []
