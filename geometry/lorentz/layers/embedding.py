"""From tokens, images and features to points."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import check_count, check_number
from ..ops.coordinates import from_unit_space, unit_space
from ..ops.maps import exp_map_origin
from ..ops.point import Point, PointLike, promote
from ..ops.scalar import norm_and_direction
from ..optim.manifold import KeepsManifold, LorentzManifold, LorentzParameter, pack, unpack
from .curvature import Curvature, as_curvature_module
from .linear import PolarLinear
from .sites import NoSites


class LorentzEmbedding(NoSites, KeepsManifold):
    """A table of points, one per token: the parameter lives on the manifold.

    Args:
        num_embeddings: size of the vocabulary.
        features: n.
        k: curvature −1/k, a number or a shared `Curvature`.
        padding_idx: a token that is the origin and never moves.
        std: initial points are exp_o of normal vectors of this standard deviation.
        decay: what weight decay does, see `LorentzManifold`.

    `weight` is a `LorentzParameter` (num_embeddings, 1 + n). Reading it makes directions unit
    again, so that an average of parameters (EMA) is read as points, too. Where an optimizer of flat
    space has moved the points off the manifold, `forward` warns once. A state dict holds k beside
    the points.

    Raises:
        ValueError: sizes, `padding_idx` or `decay` that make no sense.
        RuntimeError: from `load_state_dict`, for points of another fixed k.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.LorentzEmbedding(1000, 5)(torch.tensor([[3, 7]])).u.shape
        torch.Size([1, 2, 5])
    """

    weight: LorentzParameter

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        k: float | Curvature = 1.0,
        padding_idx: int | None = None,
        std: float = 0.02,
        decay: str = "centroid",
    ) -> None:
        super().__init__()
        check_count("num_embeddings", num_embeddings)
        check_count("features", features)
        check_number("std", std, 0.0)
        self.num_embeddings, self.features, self.std = num_embeddings, features, std
        self.curvature = as_curvature_module(k)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx {padding_idx} is out of range")
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        manifold = LorentzManifold(self.curvature, decay=decay)
        self.weight = LorentzParameter(torch.zeros(num_embeddings, 1 + features), manifold)
        self._changes_seen, self._version, self._warned = 0, -1, False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the points anew."""
        with torch.no_grad():
            v = self.std * torch.randn(
                self.num_embeddings,
                self.features,
                dtype=torch.promote_types(self.weight.dtype, torch.float32),
                device=self.weight.device,
            )
            if self.padding_idx is not None:
                v[self.padding_idx] = 0.0
            self.weight.copy_(pack(exp_map_origin(v, k=self.curvature())))

    def forward(self, tokens: Tensor) -> Point:
        """Integer tokens (…) → points (…), (…, n)."""
        if not torch.compiler.is_compiling():
            self._look_for_strays()
        rows = nn.functional.embedding(tokens, self.weight, self.padding_idx)
        ((a, u),) = promote(unpack(rows))
        return Point(a.clamp(min=0.0), norm_and_direction(u)[1])

    def _look_for_strays(self) -> None:
        """Warn, once, where an optimizer has left the manifold. Shards are not looked at."""
        if type(self.weight.detach()) is not Tensor:
            return
        if self._warned or self.weight._version == self._version or not self.weight.numel():
            return
        self._version = self.weight._version
        self._changes_seen += 1
        # Reading the answer waits for a device: there, only after 1, 2, 4, 8, … changes.
        count = self._changes_seen
        if self.weight.device.type == "meta" or (
            self.weight.device.type != "cpu" and count & (count - 1)
        ):
            return
        a, u = unpack(self.weight.detach())
        lowest, longest = a.min(), torch.linalg.vector_norm(u, dim=-1).max()
        slack = 1e-3 if self.weight.dtype in (torch.float32, torch.float64) else 2e-2
        if bool((lowest < -slack) | (longest > 1.0 + slack)):
            self._warned = True
            warnings.warn(
                f"the points of this LorentzEmbedding have left the manifold (smallest radius"
                f" {float(lowest):.3g}, longest direction {float(longest):.3g}): step them with"
                " lorentz.RiemannianAdamW or rpt.ResidualPolarTransport, not with an optimizer of"
                " flat space",
                stacklevel=5,
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "k"] = self.curvature().detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        key = prefix + "k"
        *_, unexpected_keys, error_msgs = arguments
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        # A learned k is loaded as a parameter; files of before k was saved have no such entry.
        if key not in state_dict or self.curvature.log_k is not None:
            return
        # One number read on the host, at loading time.
        saved, own = float(state_dict[key]), self.curvature.initial
        if not math.isclose(saved, own, rel_tol=1e-6):
            error_msgs.append(
                f"{key}: the points were saved with k = {saved:g}, this embedding has k = {own:g};"
                " build it with the k they were trained with"
            )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.features}"


class PatchEmbedding(NoSites):
    """Images to points: patches of pixels, exp at the origin, a polar fully connected layer.

    Args:
        in_channels: colours.
        patch_size: side of a square patch; divides height and width.
        features: n.
        k: curvature −1/k, a number or a shared `Curvature`.
        radius, radius_std: the radius rule, see `PolarLinear`.

    Raises:
        ValueError: a size below 1, or images that patches do not tile.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> layer = lorentz.PatchEmbedding(in_channels=3, patch_size=4, features=8)
        >>> layer(torch.randn(2, 3, 8, 8)).u.shape
        torch.Size([2, 4, 8])
    """

    layer = PolarLinear

    def __init__(
        self,
        in_channels: int,
        patch_size: int,
        features: int,
        *,
        k: float | Curvature = 1.0,
        radius: str = "anchored",
        radius_std: float = 0.0,
    ) -> None:
        super().__init__()
        check_count("in_channels", in_channels)
        check_count("patch_size", patch_size)
        self.in_channels, self.patch_size = in_channels, patch_size
        self.curvature = as_curvature_module(k)
        self.projection = self.layer(
            in_channels * patch_size**2,
            features,
            k=self.curvature,
            radius=radius,
            radius_std=radius_std,
        )

    def pixels(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) → scaled patches (batch, patches, c·size²)."""
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise ValueError(
                f"expected images (batch, {self.in_channels}, height, width), got "
                f"{tuple(images.shape)}"
            )
        height, width = images.shape[2:]
        size = self.patch_size
        if height % size or width % size:
            raise ValueError(f"patches of {size} do not tile images of {height} × {width}")
        patches = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        # exp at the origin keeps the direction; the mean square keeps the radius near that of one
        # pixel's contrast whatever the patch's size.
        return patches / (patches.shape[-1] ** 0.5)

    def forward(self, images: Tensor) -> Point:
        """(batch, channels, height, width) → points (batch, patches), (batch, patches, n)."""
        return self.projection(exp_map_origin(self.pixels(images), k=self.curvature()))


def sine_cosine_table(positions: int | tuple[int, int], features: int) -> Tensor:
    """Fixed sine-cosine positions (Vaswani et al. 2017): (positions, n), or (rows·columns, n) with
    half of the components for each grid axis. n must be even, on a grid divisible by 4: ValueError.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.sine_cosine_table((2, 3), features=8).shape
        torch.Size([6, 8])
    """
    if isinstance(positions, tuple):
        if features % 4:
            raise ValueError(f"a two-dimensional table needs n divisible by 4, got {features}")
        rows = sine_cosine_table(positions[0], features // 2)
        columns = sine_cosine_table(positions[1], features // 2)
        return torch.cat(
            [rows.repeat_interleave(positions[1], 0), columns.repeat(positions[0], 1)], -1
        )
    if features % 2:
        raise ValueError(f"a sine-cosine table needs an even n, got {features}")
    frequency = 10000.0 ** (-torch.arange(0, features, 2, dtype=torch.float64) / features)
    angle = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequency
    return torch.cat([angle.sin(), angle.cos()], -1).float()


class PositionTable(NoSites):
    """Absolute positions, added to the space coordinates (in units of √k).

    Args:
        num_positions: tokens, or (rows, columns) of a grid.
        features: n.
        learned: a learned table, normal with `std`; otherwise sine-cosine times `std`, fixed.
        std: scale of the table.

    Raises:
        ValueError: a size below 1, or other tokens or features than the table's.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.PositionTable(5, 8)(lorentz.exp_map_origin(torch.randn(4, 5, 8))).u.shape
        torch.Size([4, 5, 8])
    """

    table: Tensor
    undecayed_parameters = ("table",)

    def __init__(
        self,
        num_positions: int | tuple[int, int],
        features: int,
        *,
        learned: bool = True,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        count = (
            num_positions if isinstance(num_positions, int) else num_positions[0] * num_positions[1]
        )
        check_count("num_positions", count)
        check_count("features", features)
        check_number("std", std, 0.0)
        if learned:
            self.table = nn.Parameter(std * torch.randn(count, features))
        else:
            self.register_buffer("table", std * sine_cosine_table(num_positions, features))

    def forward(self, x: PointLike) -> Point:
        """Points (…, P), (…, P, n) to points of the same shapes."""
        ((a, u),) = promote(x)
        if u.shape[-2:] != self.table.shape:
            raise ValueError(
                f"expected {tuple(self.table.shape)} tokens and features, got {tuple(u.shape[-2:])}"
            )
        return from_unit_space(unit_space(a, u) + self.table.to(u.dtype))
