"""Polar-ViT: a vision transformer on points in polar form (Polar-ViT paper, section 4).

`VisionTransformer` holds what its comparison models share: sizes by name, files, new heads,
checkpointing.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention.multihead import PolarMultiheadAttention
from ..attention.position import BoostEncoding, HorosphericalEncoding
from ..layers.classifier import LorentzMLR, TangentLinear
from ..layers.curvature import Curvature
from ..layers.embedding import PatchEmbedding, PositionTable
from ..layers.linear import PolarMLP
from ..layers.norm import GyroLayerNorm, SpaceLayerNorm
from ..layers.residual import BoostResidual, GyroResidual, SpaceResidual
from ..layers.sites import NoSites
from ..ops.centroid import centroid
from ..ops.maps import exp_map_origin
from ..ops.point import Point
from .config import SIZES, ViTConfig

_Self = TypeVar("_Self", bound="VisionTransformer")


class VisionTransformer(nn.Module):
    """Base of `PolarViT` and of the models it is compared with; not used by itself.

    Set `gradient_checkpointing = True` to recompute each block in the backward instead of keeping
    its activations.
    """

    config: ViTConfig
    head: nn.Module
    blocks: nn.ModuleList

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False

    @classmethod
    def sized(
        cls: type[_Self], size: str, num_classes: int, image_size: int, **options: Any
    ) -> _Self:
        """The model of a named size; `options` are those of `ViTConfig`."""
        if size not in SIZES:
            raise ValueError(f"size must be one of {tuple(SIZES)}, got {size!r}")
        sizes: dict[str, Any] = {**SIZES[size], **options}
        return cls(ViTConfig(num_classes, image_size, **sizes))

    @classmethod
    def tiny(cls: type[_Self], num_classes: int, image_size: int, **options: Any) -> _Self:
        """9 layers, width 192, MLP width 384, 12 heads; patches of 4 by default."""
        return cls.sized("tiny", num_classes, image_size, **options)

    @classmethod
    def small(cls: type[_Self], num_classes: int, image_size: int, **options: Any) -> _Self:
        """12 layers, width 384, MLP width 1536, 6 heads; patches of 16 and a fixed sine-cosine
        table by default, as the paper trains it on ImageNet."""
        options = {"patch_size": 16, "position_table": "sine_cosine", **options}
        return cls.sized("small", num_classes, image_size, **options)

    @classmethod
    def base(cls: type[_Self], num_classes: int, image_size: int, **options: Any) -> _Self:
        """12 layers, width 768, MLP width 3072, 12 heads; patches of 4 by default."""
        return cls.sized("base", num_classes, image_size, **options)

    def features(self, images: Tensor) -> Any:
        """What the head reads: one representation (a point, or a vector) per image."""
        raise NotImplementedError

    def new_head(self) -> nn.Module:
        """A freshly drawn head for `config.num_classes` classes."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) → logits (batch, C), float32 at least."""
        return self.head(self.features(images))

    def check_images(self, images: Tensor) -> None:
        """Refuse images of another size than the configuration's."""
        config = self.config
        expected = (config.in_channels, config.image_size, config.image_size)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"expected images (batch, {', '.join(map(str, expected))}), got "
                f"{tuple(images.shape)}"
            )

    def run_blocks(self, x: Any) -> Any:
        """Apply all blocks, checkpointed in training where that is switched on."""
        for block in self.blocks:
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x

    def reset_head(self: _Self, num_classes: int) -> _Self:
        """Put a new head for another number of classes in place, for fine-tuning.

        Build the optimizer, or give it the new parameters, afterwards. Returns the model.
        """
        like = next(self.head.parameters())
        self.config = replace(self.config, num_classes=num_classes)
        self.head = self.new_head().to(device=like.device, dtype=like.dtype)
        return self

    def num_parameters(self, *, head: bool = True) -> int:
        """Number of parameters, with or without the head (the paper counts without)."""
        total = sum(p.numel() for p in self.parameters())
        return total if head else total - sum(p.numel() for p in self.head.parameters())

    def save(self, path: str | PathLike[str]) -> None:
        """Write configuration and weights to a file that `load` reads."""
        torch.save({"config": asdict(self.config), "state": self.state_dict()}, path)

    @classmethod
    def load(
        cls: type[_Self],
        path: str | PathLike[str],
        *,
        map_location: str | torch.device | None = None,
    ) -> _Self:
        """Read a model written by `save`; nothing but tensors and plain values is unpickled."""
        stored = torch.load(path, map_location=map_location, weights_only=True)
        model = cls(ViTConfig(**stored["config"]))
        model.load_state_dict(stored["state"])
        return model


class PolarLayers:
    """The layers a model is built from, and the operations between them; a subclass makes a twin."""

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


class PolarViT(NoSites, VisionTransformer):
    """Polar-ViT, in whole or with any component replaced (`ViTConfig`).

    Patches → polar fully connected layer → absolute positions on the space coordinates → blocks →
    centroid of the tokens → hyperbolic multinomial logistic regression. There is no norm after the
    last block: it would centre the tokens at the very centroid that is read out.

    Before training, `calibrate_(model, images)` sets all radii once (App. D.2).

    Args:
        config: sizes and components; or use `PolarViT.tiny(num_classes, image_size, …)`.

    For the optimizer: the `direction.weight` of every polar layer is a Euclidean matrix and an
    observation site; `parameter_groups` spares scales, rates and tables from decay.

    Raises:
        ValueError: a size that has no name, or images of another size than the configuration's.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> model = lorentz.PolarViT.tiny(num_classes=10, image_size=8, depth=1)
        >>> model(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 10])
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
