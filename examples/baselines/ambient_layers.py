"""The layers of Polar-ViT in ambient arithmetic: the twin, for comparison only.

Each layer has the parameters of its polar counterpart, by the same names, and computes the same
function with the formulas of the literature on (…, 1 + n) tensors, time first. In double precision
and at small radii the two agree; in float32 these lose all accuracy at radius 8.
"""

from __future__ import annotations

from typing import Any

import torch
from rpt.geometry.lorentz.attention.multihead import HeadGain, PolarMultiheadAttention
from rpt.geometry.lorentz.attention.position import BoostEncoding, HorosphericalEncoding
from rpt.geometry.lorentz.layers.classifier import LorentzMLR, TangentLinear
from rpt.geometry.lorentz.layers.curvature import Curvature
from rpt.geometry.lorentz.layers.embedding import PatchEmbedding, PositionTable
from rpt.geometry.lorentz.layers.linear import PolarLinear, PolarMLP
from rpt.geometry.lorentz.layers.norm import GyroLayerNorm, SpaceLayerNorm
from rpt.geometry.lorentz.layers.residual import BoostResidual, GyroResidual, SpaceResidual
from rpt.geometry.lorentz.models.vit import PolarLayers
from rpt.geometry.lorentz.ops.coordinates import from_ambient, to_ambient
from rpt.geometry.lorentz.ops.gyro import boost_step
from torch import Tensor, nn

from .ambient import (
    ambient_attention,
    ambient_centroid,
    ambient_exp_map_origin,
    ambient_gyro_add,
    ambient_gyro_scale,
    ambient_horospherical_shift,
    ambient_log_map_origin,
    ambient_squared_distance,
    ambient_time_boost,
    with_time,
)

__all__ = [
    "AmbientLayers",
    "AmbientLinear",
    "AmbientMultiheadAttention",
    "TextbookLayers",
]


class AmbientLinear(PolarLinear):
    """`PolarLinear` in ambient arithmetic: (…, 1 + n) → (…, 1 + n′)."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Map ambient points."""
        k = self.curvature().to(x.dtype)
        root = k.sqrt()
        h = self.direction(x)
        if self.activation is not None:
            h = self.activation(h)
        if self.radius_rule == "lorentz":
            return with_time(h * torch.exp(self.radius_offset.to(x.dtype)), k)
        norm = (h.square().sum(-1) + 1e-30).sqrt()
        a = torch.acosh((x[..., 0] / root).clamp(min=1.0 + 1e-7))
        chi = x[..., 1:] / x[..., :1]
        space = x[..., 1:]
        u = space / space.norm(dim=-1, keepdim=True).clamp(min=1e-8)
        log_norm = torch.log(norm / root)
        log_radius = self.log_radius(log_norm, a, chi, u)
        return with_time(h * torch.exp(log_radius - log_norm).unsqueeze(-1), k)


class AmbientMLP(PolarMLP):
    """`PolarMLP` of ambient layers."""

    layer = AmbientLinear


class AmbientPatchEmbedding(PatchEmbedding):
    """`PatchEmbedding` in ambient arithmetic."""

    layer = AmbientLinear

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """(batch, channels, height, width) → (batch, patches, 1 + n)."""
        pixels = self.pixels(images)
        return self.projection(ambient_exp_map_origin(pixels, self.curvature().to(pixels.dtype)))


class AmbientPositionTable(PositionTable):
    """`PositionTable` in ambient arithmetic."""

    curvature: Curvature

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(batch, P, 1 + n) to the same shape."""
        k = self.curvature().to(x.dtype)
        return with_time(x[..., 1:] + k.sqrt() * self.table.to(x.dtype), k)


class AmbientGyroLayerNorm(GyroLayerNorm):
    """`GyroLayerNorm` in ambient arithmetic."""

    guarded = True

    def forward(self, x: Tensor, key_padding_mask: None = None) -> Tensor:  # type: ignore[override]
        """(batch, P, 1 + n) to the same shape."""
        k = self.curvature().to(x.dtype)
        weights = torch.full_like(x[..., 0], 1.0 / x.shape[-2])
        mean = ambient_centroid(x, weights, k=k, guarded=self.guarded).unsqueeze(-2)
        eps = 1e-7 if self.guarded else None
        variance = ambient_squared_distance(x, mean, k=k, eps=eps).mean(-1, keepdim=True)
        inverse = torch.cat([mean[..., :1], -mean[..., 1:]], -1)
        centred = ambient_gyro_add(inverse, x, k=k)
        gain = torch.exp(self.log_gain.to(x.dtype) + self.initial_log_gain.to(x.dtype))
        scaled = ambient_gyro_scale(gain * torch.rsqrt(variance + self.eps), centred, k=k)
        return ambient_gyro_add(ambient_exp_map_origin(self.bias.to(x.dtype), k), scaled, k=k)


class AmbientSpaceLayerNorm(SpaceLayerNorm):
    """`SpaceLayerNorm` in ambient arithmetic."""

    def __init__(self, features: int, *, k: Any = None, eps: float = 1e-5) -> None:
        super().__init__(features, eps=eps)
        self.curvature = k

    def forward(self, x: Tensor, key_padding_mask: None = None) -> Tensor:  # type: ignore[override]
        """(…, 1 + n) to the same shape."""
        k = self.curvature().to(x.dtype)
        return with_time(k.sqrt() * nn.LayerNorm.forward(self, x[..., 1:] / k.sqrt()), k)


class AmbientSpaceResidual(SpaceResidual):
    """`SpaceResidual` in ambient arithmetic."""

    curvature: Curvature

    def forward(self, x: Tensor, update: Tensor) -> Tensor:  # type: ignore[override]
        """Sum of the space coordinates, time recomputed."""
        return with_time(x[..., 1:] + update[..., 1:], self.curvature().to(x.dtype))


class AmbientGyroResidual(GyroResidual):
    """`GyroResidual` in ambient arithmetic."""

    curvature: Curvature

    def forward(self, x: Tensor, update: Tensor) -> Tensor:  # type: ignore[override]
        """x ⊕ (α ⊗ update)."""
        k = self.curvature().to(x.dtype)
        return ambient_gyro_add(x, ambient_gyro_scale(self.alpha.to(x.dtype), update, k=k), k=k)


class AmbientBoostResidual(BoostResidual):
    """Eq. 12 on points stored in ambient coordinates: converted, moved, converted back."""

    curvature: Curvature

    def forward(self, x: Tensor, update: Tensor) -> Tensor:  # type: ignore[override]
        """Move the tokens x by `update`."""
        k = self.curvature().to(x.dtype)
        point = from_ambient(x, k=k)
        weights = torch.full_like(point.a, 1.0 / point.a.shape[-1]) if self.center else None
        return to_ambient(boost_step(point, from_ambient(update, k=k), self.alpha, weights), k=k)


class AmbientHorosphericalEncoding(HorosphericalEncoding):
    """Eq. 10 as it stands: heads (batch, H, N, 1 + m) to the same shape."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Shift the heads at their positions."""
        steps = self.steps(x.shape[-2], x.dtype, positions, 0)
        if self.scheme == "paper" and len(self.sizes) == 2:
            x = ambient_horospherical_shift(x, steps[0], 0, 1)
            return ambient_horospherical_shift(x, steps[1], 2, 3)
        for axis, step in enumerate(steps):
            x = ambient_horospherical_shift(x, step, 0, 1 + axis)
        return x


class AmbientBoostEncoding(BoostEncoding):
    """Boosts along space axes: heads (batch, H, N, 1 + m) to the same shape."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Boost the heads at their positions."""
        for axis, step in enumerate(self.steps(x.shape[-2], x.dtype, positions, 0)):
            x = ambient_time_boost(x, step, 2 * axis)
        return x


class AmbientHeadGain(HeadGain):
    """`HeadGain` in ambient arithmetic: (…, 1 + n) → (…, H, 1 + n/H), time recomputed."""

    # In a tuple, so that it is no submodule: the polar layer has none, and names must agree.
    shared_curvature: tuple[Curvature]

    @property
    def curvature(self) -> Curvature:
        """The attention layer's."""
        return self.shared_curvature[0]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Split and scale the space coordinates."""
        heads = x[..., 1:].unflatten(-1, (self.num_heads, -1))
        scale = torch.exp((self.log_gain + self.log_gain_offset).to(x.dtype))
        return with_time(heads * scale[:, None], self.curvature().to(x.dtype))


class AmbientMultiheadAttention(PolarMultiheadAttention):
    """`PolarMultiheadAttention` in ambient arithmetic; no masks."""

    layer = AmbientLinear
    head_gain = AmbientHeadGain
    guarded = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for gain in (self.query_heads, self.key_heads, self.value_heads):
            assert isinstance(gain, AmbientHeadGain)
            gain.shared_curvature = (self.curvature,)

    def forward(self, x: Tensor, *, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(batch, P, 1 + n) to the same shape."""
        k = self.curvature().to(x.dtype)
        query = self.query_heads(self.query(x)).transpose(1, 2)
        key = self.key_heads(self.key(x)).transpose(1, 2)
        value = self.value_heads(self.value(x)).transpose(1, 2)
        if self.position is not None:
            query, key = self.position(query, positions), self.position(key, positions)
        gain = k * self.head_dim**-0.5 * torch.exp(-self.log_temperature.to(x.dtype))
        heads = ambient_attention(query, key, value, gain, k=k, guarded=self.guarded)
        joined = heads[..., 1:].transpose(1, 2).flatten(-2)
        return self.output(with_time(joined, k))


class AmbientMLR(LorentzMLR):
    """`LorentzMLR` in ambient arithmetic: one matrix product."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(…, 1 + n) → (…, C)."""
        root = self.curvature().to(x.dtype).sqrt()
        z, s = self.weight.to(x.dtype), self.shift.to(x.dtype)
        length = z.norm(dim=-1).clamp(min=1e-8)
        along = (x[..., 1:] / root) @ (z / length.unsqueeze(-1)).mT
        rapidity = torch.cosh(s) * along - torch.sinh(s) * (x[..., :1] / root)
        return length * root * torch.asinh(rapidity)


class AmbientTangentLinear(TangentLinear):
    """`TangentLinear` in ambient arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, 1 + n) → (…, C)."""
        return nn.Linear.forward(self, ambient_log_map_origin(x, self.curvature().to(x.dtype)))


class AmbientLayers(PolarLayers):
    """Every layer of `PolarLayers` in ambient arithmetic."""

    attention = AmbientMultiheadAttention
    mlp = AmbientMLP
    patch_embedding = AmbientPatchEmbedding
    position_table = AmbientPositionTable
    norms = {"gyro": AmbientGyroLayerNorm, "space": AmbientSpaceLayerNorm}  # noqa: RUF012
    boost_residual = AmbientBoostResidual
    gyro_residual = AmbientGyroResidual
    space_residual = AmbientSpaceResidual
    mlr = AmbientMLR
    tangent_linear = AmbientTangentLinear
    horospherical = AmbientHorosphericalEncoding
    boost_encoding = AmbientBoostEncoding
    guarded = True

    @staticmethod
    def from_tangent(v: Tensor, k: Tensor) -> Tensor:
        """exp at the origin of vectors (…, n)."""
        return ambient_exp_map_origin(v, k.to(v.dtype))

    @staticmethod
    def prepend(token: Tensor, x: Tensor, batch: int) -> Tensor:
        """Put one token (1, 1 + n) before the tokens of every sample."""
        return torch.cat([token.expand(batch, 1, -1), x], 1)

    @staticmethod
    def first(x: Tensor) -> Tensor:
        """The first token of every sample."""
        return x[:, 0]

    @classmethod
    def pool(cls, x: Tensor, k: Tensor) -> Tensor:
        """The centroid of every sample's tokens."""
        weights = torch.full_like(x[..., 0], 1.0 / x.shape[-2])
        return ambient_centroid(x, weights, k=k.to(x.dtype), guarded=cls.guarded)


class TextbookGyroLayerNorm(AmbientGyroLayerNorm):
    """`AmbientGyroLayerNorm` without clamps."""

    guarded = False


class TextbookMultiheadAttention(AmbientMultiheadAttention):
    """`AmbientMultiheadAttention` without clamps."""

    guarded = False


class TextbookLayers(AmbientLayers):
    """`AmbientLayers` by the formulas as they stand, without the customary clamps: NaN shows where
    rounding has left no point."""

    attention = TextbookMultiheadAttention
    norms = {**AmbientLayers.norms, "gyro": TextbookGyroLayerNorm}  # noqa: RUF012
    guarded = False
