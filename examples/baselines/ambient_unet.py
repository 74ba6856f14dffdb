"""The ambient Lorentz U-Net: the layers of Bdeir et al. (2024) on (…, 1 + n) tensors."""

from __future__ import annotations

from typing import Any

import torch
from rpt.geometry.lorentz.layers.curvature import Curvature
from rpt.geometry.lorentz.models.unet import PolarUNet, UNetLayers
from rpt.geometry.lorentz.ops.space import channels_first, channels_last
from torch import Tensor, nn
from torch.nn import functional

from .ambient import (
    ambient_centroid,
    ambient_distance,
    ambient_exp_map_origin,
    ambient_gyro_add,
    ambient_gyro_scale,
    ambient_log_map_origin,
    with_time,
)

__all__ = [
    "AmbientUNet",
    "soft_cap",
]


_CAP = 8.0


def soft_cap(x: Tensor, limit: float, k: Tensor) -> Tensor:
    """Bring radii r to limit · tanh(r/limit): the ambient layers' radius cap."""
    v = ambient_log_map_origin(x, k)
    r = v.norm(dim=-1, keepdim=True).clamp(min=1e-8)
    return ambient_exp_map_origin(v * (limit * torch.tanh(r / limit) / r), k)


class AmbientConv2d(nn.Module):
    """Lorentz convolution (Bdeir et al. 2024): receptive fields unfolded, then a Lorentz layer.

    As published, the linear map has an output for the time coordinate that is thrown away.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, padding: int = 0,
        k: Curvature,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel_size, self.padding, self.curvature = kernel_size, padding, k
        self.linear = nn.Linear(1 + in_channels * kernel_size**2, 1 + out_channels)
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, height, width, 1 + n) → (batch, height, width, 1 + n′)."""
        k = self.curvature().to(x.dtype)
        height, width = x.shape[1:3]
        space = channels_first(soft_cap(x, _CAP, k)[..., 1:])
        fields = functional.unfold(space, self.kernel_size, padding=self.padding).mT
        out = self.linear(with_time(fields, k))
        return with_time(out[..., 1:], k).unflatten(1, (height, width))

    def optimizer_observation_modules(self) -> list[nn.Module]:
        """Its matrix reads unfolded points."""
        return [self.linear]


class AmbientBatchNorm2d(nn.Module):
    """`PolarBatchNorm2d` in ambient arithmetic, its output capped."""

    running_mean: Tensor
    running_distance: Tensor
    undecayed_parameters = ("gain", "bias")

    def __init__(self, channels: int, *, k: Curvature, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum, self.eps, self.curvature = momentum, 1e-5, k
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(channels))
        origin = torch.zeros(1 + channels)
        origin[0] = float(k().detach().sqrt())
        self.register_buffer("running_mean", origin)
        self.register_buffer("running_distance", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """(…, 1 + n) to the same shape."""
        k = self.curvature().to(x.dtype)
        flat = x.flatten(0, -2)
        mean, distance = self.running_mean, self.running_distance
        if self.training:
            mean = ambient_centroid(flat, torch.full_like(flat[:, 0], 1.0 / len(flat)), k=k)
            distance = ambient_distance(flat, mean, k=k, eps=1e-7).mean()
            with torch.no_grad():
                weights = torch.tensor([1 - self.momentum, self.momentum])
                pair = torch.stack([self.running_mean, mean])
                self.running_mean.copy_(ambient_centroid(pair, weights.to(pair), k=k))
                self.running_distance.lerp_(distance, self.momentum)
        centred = ambient_gyro_add(torch.cat([mean[:1], -mean[1:]]), flat, k=k)
        scaled = ambient_gyro_scale(self.gain / (distance + self.eps), centred, k=k)
        moved = ambient_gyro_add(ambient_exp_map_origin(self.bias, k), scaled, k=k)
        return soft_cap(moved, _CAP, k).reshape(x.shape)


class AmbientReLU(nn.Module):
    """relu on the space coordinates, time recomputed."""

    curvature: Curvature

    def forward(self, x: Tensor) -> Tensor:
        """(…, 1 + n) to the same shape."""
        return with_time(torch.relu(x[..., 1:]), self.curvature().to(x.dtype))


class AmbientUNetLayers(UNetLayers):
    """Every layer and operation of `UNetLayers` in ambient arithmetic."""

    convolution = AmbientConv2d
    norm = AmbientBatchNorm2d
    activation = AmbientReLU

    @staticmethod
    def read(pixels: Tensor, k: Tensor) -> Tensor:
        """Pixels as points."""
        return ambient_exp_map_origin(pixels, k.to(pixels.dtype))

    @staticmethod
    def write(x: Any, k: Tensor) -> Tensor:
        """The logarithm at the origin."""
        return ambient_log_map_origin(x, k.to(x.dtype))

    @staticmethod
    def pool(x: Any, k: Tensor) -> Tensor:
        """The largest of every space coordinate."""
        space = functional.max_pool2d(channels_first(x[..., 1:]), 2)
        return with_time(channels_last(space), k.to(x.dtype))

    @staticmethod
    def upsample(x: Any, k: Tensor) -> Tensor:
        """Bilinear sums of ambient coordinates, made points again."""
        total = channels_last(
            functional.interpolate(
                channels_first(x), scale_factor=2, mode="bilinear", align_corners=False
            )
        )
        one = torch.ones_like(total[..., :1])
        return ambient_centroid(total.unsqueeze(-2), one, k=k.to(x.dtype))

    @staticmethod
    def join(x: Any, y: Any, k: Tensor) -> Tensor:
        """Lorentz direct concatenation."""
        return with_time(torch.cat([x[..., 1:], y[..., 1:]], -1), k.to(x.dtype))


class AmbientUNet(PolarUNet):
    """`PolarUNet` built from the ambient layers of Bdeir et al. (2024), radii softly capped at 8:
    216.4 K parameters. A baseline."""

    layers = AmbientUNetLayers

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for module in self.modules():
            if isinstance(module, AmbientReLU):
                module.curvature = self.curvature
