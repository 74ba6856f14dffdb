"""Polar-ViT: a vision transformer on points in polar form (Polar-ViT paper, section 4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .attention import PolarMultiheadAttention
from .centroid import centroid
from .curvature import Curvature
from .embedding import PatchEmbedding, PositionTable
from .linear import PolarMLP
from .maps import exp_map_origin, log_map_origin
from .mlr import LorentzMLR
from .norm import GyroLayerNorm, SpaceLayerNorm
from .point import Point
from .position import BoostEncoding, HorosphericalEncoding
from .residual import BoostResidual, GyroResidual, SpaceResidual
from .vit_base import VisionTransformer
from .vit_config import ViTConfig

__all__ = ["PolarLayers", "PolarViT", "PolarViTBlock", "TangentLinear"]


class TangentLinear(nn.Linear):
    """A Euclidean linear head on log_o of the points: the baseline of `LorentzMLR`."""

    def __init__(self, features: int, num_classes: int, *, k: Curvature) -> None:
        super().__init__(features, num_classes)
        self.curvature = k

    def forward(self, x: Any) -> Tensor:
        """Points (…), (…, n) → logits (…, C)."""
        return super().forward(log_map_origin(x, k=self.curvature()))

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """It reads a new representation: the logarithm of a centroid."""
        return [self]


class PolarLayers:
    """The layers a model is built from, and the few operations between them.

    `AmbientLayers` has the same names, so that the two models have the same parameters.
    """

    attention: type[PolarMultiheadAttention] = PolarMultiheadAttention
    mlp: type[PolarMLP] = PolarMLP
    patch_embedding: type[PatchEmbedding] = PatchEmbedding
    position_table: type[PositionTable] = PositionTable
    norms: dict[str, type[nn.Module]] = {"gyro": GyroLayerNorm, "space": SpaceLayerNorm}  # noqa: RUF012
    boost_residual: type[BoostResidual] = BoostResidual
    gyro_residual: type[GyroResidual] = GyroResidual
    space_residual: type[SpaceResidual] = SpaceResidual
    mlr: type[LorentzMLR] = LorentzMLR
    tangent_linear: type[TangentLinear] = TangentLinear
    horospherical: type[HorosphericalEncoding] = HorosphericalEncoding
    boost_encoding: type[BoostEncoding] = BoostEncoding

    @staticmethod
    def from_tangent(v: Tensor, k: Tensor) -> Any:
        """exp at the origin of vectors (…, n)."""
        return exp_map_origin(v, k=k)

    @staticmethod
    def prepend(token: Any, x: Any, batch: int) -> Any:
        """Put one token (1, n) before the tokens of every sample."""
        return Point(
            torch.cat([token.a.expand(batch, 1), x.a], 1),
            torch.cat([token.u.expand(batch, 1, -1), x.u], 1),
        )

    @staticmethod
    def first(x: Any) -> Any:
        """The first token of every sample."""
        return Point(x.a[:, 0], x.u[:, 0])

    @staticmethod
    def pool(x: Any, k: Tensor) -> Any:
        """The centroid of every sample's tokens."""
        return centroid(x)


class PolarViTBlock(nn.Module):
    """x ↦ residual(x, attention(norm(x))), then the same with the MLP."""

    def __init__(
        self, config: ViTConfig, curvature: Curvature, layers: type[PolarLayers] = PolarLayers
    ) -> None:
        super().__init__()
        rule: dict[str, Any] = {"radius": config.radius, "radius_std": config.radius_std}
        self.norm1, self.norm2 = (
            layers.norms[config.norm](config.width, k=curvature) for _ in range(2)
        )
        self.attention = layers.attention(
            config.width,
            config.num_heads,
            k=curvature,
            position=_encoding(config, layers),
            **rule,
        )
        self.residual1, self.residual2 = (_residual(config, curvature, layers) for _ in range(2))
        self.mlp = layers.mlp(config.width, config.mlp_width, k=curvature, **rule)
        has_class_token = config.readout == "class_token" and config.encoding is not None
        self.register_buffer(
            "positions", _class_token_positions(config) if has_class_token else None, False
        )

    def forward(self, x: Any) -> Any:
        """Tokens (batch, P), (batch, P, n) to tokens of the same shapes."""
        x = self.residual1(x, self.attention(self.norm1(x), positions=self.positions))
        return self.residual2(x, self.mlp(self.norm2(x)))

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """What attention and MLP declare."""
        return [
            *self.attention.optimizer_observation_modules(),
            *self.mlp.optimizer_observation_modules(),
        ]


def _residual(config: ViTConfig, curvature: Curvature, layers: type[PolarLayers]) -> nn.Module:
    if config.residual == "boost":
        residual: nn.Module = layers.boost_residual(config.alpha)
    elif config.residual == "gyro":
        residual = layers.gyro_residual(config.alpha)
    else:
        residual = layers.space_residual()
    residual.curvature = curvature
    return residual


def _encoding(
    config: ViTConfig, layers: type[PolarLayers]
) -> HorosphericalEncoding | BoostEncoding | None:
    rate = config.initial_rate
    if config.encoding == "horospherical":
        return layers.horospherical(
            config.num_heads, config.grid, scheme=config.encoding_scheme, initial_rate=rate
        )
    if config.encoding == "boost":
        return layers.boost_encoding(config.num_heads, config.grid, initial_rate=rate)
    return None


def _class_token_positions(config: ViTConfig) -> Tensor:
    """Grid positions with the class token in the middle of the image."""
    rows, columns = config.grid
    index = torch.arange(rows * columns)
    grid = torch.stack([index // columns, index % columns], -1).float()
    middle = torch.tensor([[(rows - 1) / 2.0, (columns - 1) / 2.0]])
    return torch.cat([middle, grid])


class PolarViT(VisionTransformer):
    """Polar-ViT, in whole or with any component replaced (`ViTConfig`).

    Patches → polar fully connected layer → absolute positions on the space coordinates → blocks →
    centroid of the tokens → hyperbolic multinomial logistic regression. There is no norm after the
    last block: it would centre the tokens at the very centroid that is read out.

    Before training, `calibrate_(model, images)` sets all radii once (App. D.2).

    Args:
        config: sizes and components; or use `PolarViT.tiny(num_classes, image_size, …)`.

    For the optimizer: the `direction.weight` of every polar layer is a Euclidean matrix and an
    observation site; `parameter_groups` spares scales, rates and tables from decay.
    """

    layers: type[PolarLayers] = PolarLayers

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        layers = self.layers
        self.curvature = Curvature(config.k, learnable=config.learnable_curvature)
        self.patch_embedding = layers.patch_embedding(
            config.in_channels,
            config.patch_size,
            config.width,
            k=self.curvature,
            radius=config.radius,
            radius_std=config.radius_std,
        )
        self.class_token: nn.Parameter | None = None
        if config.readout == "class_token":
            self.class_token = nn.Parameter(0.02 * torch.randn(1, config.width))
        self.position_table: PositionTable | None = None
        if config.position_table is not None:
            self.position_table = layers.position_table(
                config.grid, config.width, learned=config.position_table == "learned"
            )
            self.position_table.curvature = self.curvature
        self.blocks = nn.ModuleList(
            PolarViTBlock(config, self.curvature, layers) for _ in range(config.depth)
        )
        self.head = self.new_head()

    def new_head(self) -> nn.Module:
        """A freshly drawn `LorentzMLR` or linear head."""
        head = self.layers.mlr if self.config.head == "mlr" else self.layers.tangent_linear
        return head(self.config.width, self.config.num_classes, k=self.curvature)

    def tokens(self, images: Tensor) -> Any:
        """Images (batch, channels, height, width) → tokens after the last block."""
        self.check_images(images)
        x = self.patch_embedding(images)
        if self.position_table is not None:
            x = self.position_table(x)
        if self.class_token is not None:
            token = self.layers.from_tangent(self.class_token, self.curvature())
            x = self.layers.prepend(token, x, images.shape[0])
        return self.run_blocks(x)

    def features(self, images: Tensor) -> Any:
        """Images → one point per image, (batch), (batch, n)."""
        x = self.tokens(images)
        if self.class_token is not None:
            return self.layers.first(x)
        return self.layers.pool(x, self.curvature())

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """Nothing of its own: the layers declare their sites."""
        return []
