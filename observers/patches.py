"""A convolution is a linear map of patches: a bounded sample of its rows, for observation."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "MAX_PATCHES",
    "Convolution",
    "sampled_cotangents",
    "sampled_patches",
    "unsupported_convolution",
]

MAX_PATCHES = 1024
_SAMPLE_SEED = 0xC0


class Convolution(NamedTuple):
    """Which entries of its input a convolution contracts; `padding` as F.pad takes it."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: list[int]
    padding_mode: str

    @classmethod
    def of(cls, module: Any) -> Convolution:
        """The geometry of an nn.Conv1d, nn.Conv2d or nn.Conv3d."""
        padding = list(module._reversed_padding_repeated_twice)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return cls(module.kernel_size, module.stride, module.dilation, padding, mode)


def unsupported_convolution(module: nn.Module) -> str | None:
    """Why this convolution cannot be observed, or None where it can."""
    if getattr(module, "transposed", False):
        return "a transposed convolution does not contract patches of its input"
    if getattr(module, "groups", 1) != 1:
        return "a grouped convolution is several separate matrices in one weight"
    return None


@lru_cache(maxsize=256)
def _positions(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Fixed random output positions (batch, *spatial): the same whenever the shape is."""
    total = 1
    for size in shape:
        total *= size
    if total <= MAX_PATCHES:
        flat = torch.arange(total)
    else:
        generator = torch.Generator().manual_seed(_SAMPLE_SEED)
        flat = torch.randint(total, (MAX_PATCHES,), generator=generator)
    return tuple(index.to(device) for index in torch.unravel_index(flat, shape))


@torch.no_grad()
def sampled_patches(layer: Convolution, inputs: Tensor, output_shape: torch.Size) -> Tensor:
    """Rows (patches, in·kernel) which a layer contracts at sampled positions of its output.

    Args:
        layer: Its geometry; one group.
        inputs: (batch, in, *spatial) or (in, *spatial).
        output_shape: Shape of what the layer returned for `inputs`.
    """
    axes = len(layer.kernel_size)
    inputs = inputs.detach()
    if inputs.ndim == axes + 1:
        inputs, output_shape = inputs[None], torch.Size((1, *output_shape))
    if any(layer.padding):
        inputs = F.pad(inputs, layer.padding, mode=layer.padding_mode)
    batch, *places = _positions((output_shape[0], *output_shape[2:]), inputs.device)
    index: list[Tensor] = [batch.view(-1, *[1] * axes)]
    for axis, place in enumerate(places):
        taps = torch.arange(layer.kernel_size[axis], device=inputs.device)
        along = [1] * axes
        along[axis] = -1
        start = place.view(-1, *[1] * axes) * layer.stride[axis]
        index.append(start + taps.view(1, *along) * layer.dilation[axis])
    channels_last = inputs.movedim(1, -1)
    patches = channels_last[tuple(index)]  # (patches, *kernel, in)
    return patches.movedim(-1, 1).flatten(1)


@torch.no_grad()
def sampled_cotangents(cotangents: Tensor, axes: int) -> Tensor:
    """The matching rows (patches, out) of (batch, out, *spatial) or (out, *spatial)."""
    if cotangents.ndim == axes + 1:
        cotangents = cotangents[None]
    shape = (cotangents.shape[0], *cotangents.shape[2:])
    return cotangents.movedim(1, -1)[_positions(shape, cotangents.device)]
