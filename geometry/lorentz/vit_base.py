"""What the three vision transformers share: sizes by name, files, new heads, checkpointing."""

from __future__ import annotations

from dataclasses import asdict, replace
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .vit_config import SIZES, ViTConfig

__all__ = ["VisionTransformer"]

_Self = TypeVar("_Self", bound="VisionTransformer")


class VisionTransformer(nn.Module):
    """Base of `PolarViT`, `AmbientViT` and `EuclideanViT`; not used by itself.

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
