"""The polar U-Net (Polar-ViT paper, App. F) and the Dice score and loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import check_count
from ..layers.convolution import PolarConv2d, PolarReLU
from ..layers.curvature import Curvature
from ..layers.norm import PolarBatchNorm2d
from ..layers.sites import NoSites
from ..ops.maps import exp_map_origin, log_map_origin
from ..ops.space import channels_first, channels_last, concatenate, max_pool2d, upsample2x


class UNetLayers:
    """The layers and operations of a U-Net on polar points; `AmbientUNetLayers` has the same."""

    convolution: type[nn.Module] = PolarConv2d
    norm: type[nn.Module] = PolarBatchNorm2d
    activation: type[nn.Module] = PolarReLU

    @staticmethod
    def read(pixels: Tensor, k: Tensor) -> Any:
        """Pixels (batch, height, width, colours) as points."""
        return exp_map_origin(pixels, k=k)

    @staticmethod
    def write(x: Any, k: Tensor) -> Tensor:
        """Points as vectors (batch, height, width, n): the logarithm at the origin."""
        return log_map_origin(x, k=k)

    @staticmethod
    def pool(x: Any, k: Tensor) -> Any:
        """Half the height and width."""
        return max_pool2d(x, 2)

    @staticmethod
    def upsample(x: Any, k: Tensor) -> Any:
        """Twice the height and width."""
        return upsample2x(x)

    @staticmethod
    def join(x: Any, y: Any, k: Tensor) -> Any:
        """Lorentz direct concatenation."""
        return concatenate(x, y)


class PolarUNetStage(nn.Module):
    """Twice: 3 × 3 convolution, batch norm, ReLU."""

    def __init__(
        self, in_channels: int, out_channels: int, curvature: Curvature, layers: type[UNetLayers]
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for n in (in_channels, out_channels):
            parts += [
                layers.convolution(n, out_channels, 3, padding=1, k=curvature),
                layers.norm(out_channels, k=curvature),
                layers.activation(),
            ]
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Any) -> Any:
        """Points (batch, height, width), … to points of the same size."""
        return self.parts(x)


class PolarUNet(NoSites):
    """The U-Net of the paper's segmentation benchmark: 215.9 K parameters at its defaults.

    Encoder stages of `channels`, max pooling after each, a bottom stage of the last width;
    decoder stages: centroid upsampling, concatenation with the skip, convolutions to the width of
    the next higher level; a 1 × 1 convolution whose logarithm at the origin are the logits.

    Args:
        in_channels: colours.
        num_classes: output classes.
        channels: widths of the encoder's levels.
        k: initial curvature −1/k, shared by all layers.
        learnable_curvature: whether k is learned.

    Raises:
        ValueError: widths that make no sense, or images whose sides are not divisible by 2 to the
            number of levels.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.PolarUNet(in_channels=3, channels=(4, 8))(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 2, 8, 8])
    """

    layers: type[UNetLayers] = UNetLayers

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 2,
        *,
        channels: Sequence[int] = (8, 16, 32, 64),
        k: float = 1.0,
        learnable_curvature: bool = False,
    ) -> None:
        super().__init__()
        check_count("in_channels", in_channels)
        check_count("num_classes", num_classes)
        if not channels or min(channels) < 1:
            raise ValueError(f"channels must be positive widths, one per level, got {channels!r}")
        self.in_channels, self.num_classes, self.channels = in_channels, num_classes, list(channels)
        self.curvature = Curvature(k, learnable=learnable_curvature)
        layers, widths = self.layers, self.channels
        self.encoder = nn.ModuleList(
            PolarUNetStage(n, m, self.curvature, layers)
            for n, m in zip([in_channels, *widths[:-1]], widths, strict=True)
        )
        self.bottom = PolarUNetStage(widths[-1], widths[-1], self.curvature, layers)
        below, stages = widths[-1], []
        for level in reversed(range(len(widths))):
            out = widths[max(level - 1, 0)]
            stages.append(PolarUNetStage(below + widths[level], out, self.curvature, layers))
            below = out
        self.decoder = nn.ModuleList(stages)
        self.output = layers.convolution(below, num_classes, 1, k=self.curvature)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, colours, height, width) → logits (batch, classes, height, width)."""
        multiple = 2 ** len(self.channels)
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise ValueError(
                f"expected images (batch, {self.in_channels}, height, width), got "
                f"{tuple(images.shape)}"
            )
        if images.shape[2] % multiple or images.shape[3] % multiple:
            raise ValueError(
                f"height and width must be multiples of {multiple}, got {tuple(images.shape[2:])}"
            )
        k, layers = self.curvature(), self.layers
        images = images.to(torch.promote_types(images.dtype, torch.float32))
        x = layers.read(channels_last(images), k)
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
            x = layers.pool(x, k)
        x = self.bottom(x)
        for stage, skip in zip(self.decoder, reversed(skips), strict=True):
            x = stage(layers.join(skip, layers.upsample(x, k), k))
        return channels_first(layers.write(self.output(x), k))


def _overlaps(probabilities: Tensor, target: Tensor, smooth: float) -> Tensor:
    """Dice per class over the whole batch, (C,)."""
    one_hot = nn.functional.one_hot(target, probabilities.shape[1]).movedim(-1, 1)
    one_hot = one_hot.to(probabilities.dtype)
    dims = (0, 2, 3)
    overlap = 2.0 * (probabilities * one_hot).sum(dims) + smooth
    return overlap / (probabilities.sum(dims) + one_hot.sum(dims) + smooth)


def dice_score(logits: Tensor, target: Tensor, *, smooth: float = 1e-6) -> Tensor:
    """Mean over classes (foreground and background) of 2|A ∩ B|/(|A| + |B|), a 0-d tensor.

    The prediction is the larger logit; sums are taken over the whole batch.

    Args:
        logits: (batch, C, height, width).
        target: integer classes (batch, height, width).
        smooth: counts an absent and not predicted class as 1.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> logits, target = torch.tensor([[[[9.0]], [[-9.0]]]]), torch.zeros(1, 1, 1, dtype=torch.long)
        >>> lorentz.dice_score(logits, target)
        tensor(1.)
    """
    predicted = nn.functional.one_hot(logits.argmax(1), logits.shape[1]).movedim(-1, 1)
    return _overlaps(predicted.to(torch.float32), target, smooth).mean()


def segmentation_loss(logits: Tensor, target: Tensor, *, smooth: float = 1e-6) -> Tensor:
    """Dice loss on softmax probabilities plus cross-entropy, 0-d: the paper's training loss.

    Arguments as of `dice_score`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> logits, target = torch.tensor([[[[9.0]], [[-9.0]]]]), torch.zeros(1, 1, 1, dtype=torch.long)
        >>> round(lorentz.segmentation_loss(logits, target).item(), 3)
        0.008
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    overlaps = _overlaps(torch.softmax(logits, 1), target, smooth)
    return 1.0 - overlaps.mean() + nn.functional.cross_entropy(logits, target)
