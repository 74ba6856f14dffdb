"""Multi-head attention with squared-distance scores and polar centroids (Polar-ViT, Eq. 9)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..layers.curvature import Curvature, as_curvature_module
from ..layers.linear import PolarLinear
from ..ops.coordinates import klein_row
from ..ops.point import Point, PointLike, promote
from ..ops.space import join_heads, split_heads
from .block import causal_bias
from .blocked import fused_attention
from .cache import PolarCache
from .position import BoostEncoding, HorosphericalEncoding
from .scores import ScoreCoordinates, dense_attention, polar_score_coordinates

__all__ = [
    "HeadGain",
    "PolarMultiheadAttention",
]


class HeadGain(nn.Module):
    """Splits into heads and moves each head's ln sinh a by a learned gain.

    `log_gain` (H,) is the deviation from the buffer `log_gain_offset`, which `calibrate_` sets.
    """

    log_gain_offset: Tensor
    calibrated: Tensor
    undecayed_parameters = ("log_gain",)

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.log_gain = nn.Parameter(torch.zeros(num_heads))
        self.register_buffer("log_gain_offset", torch.zeros(num_heads))
        self.register_buffer("calibrated", torch.tensor(False))

    def forward(self, x: PointLike) -> Point:
        """Points (…), (…, n) → heads (…, H), (…, H, n/H)."""
        return split_heads(x, self.num_heads, self.log_gain + self.log_gain_offset)

    def shift_log_radius_(self, shift: Tensor) -> None:
        """Move the gains by (H,) numbers: what calibration does."""
        with torch.no_grad():
            self.log_gain_offset.add_(shift.to(self.log_gain_offset.dtype))
            self.calibrated.fill_(True)

    def extra_repr(self) -> str:
        """The number of heads."""
        return f"num_heads={self.num_heads}"


class PolarMultiheadAttention(nn.Module):
    """Multi-head attention on points (batch, tokens, n); the values are averaged by centroids.

    Queries, keys and values are `PolarLinear` maps split into heads, each a point of its own;
    the score is −(γ/τ) d² with γ = head_dim^−½ and a learned temperature τ; heads are joined by
    Lorentz direct concatenation and mapped once more.

    Args:
        embed_dim: n.
        num_heads: H, which divides n.
        k: curvature −1/k, a number or a shared `Curvature`.
        position: encoding of queries and keys, `HorosphericalEncoding` or `BoostEncoding`.
        radius, radius_std: the radius rule of the four maps, see `PolarLinear`.
        fused: the memory-linear path with a closed-form backward; False takes the dense
            reference, which is twice differentiable.
        is_causal: whether a query sees only tokens up to its own, by default of `forward`.

    For the optimizer: the four `direction.weight` are Euclidean matrices with a live matrix path
    and observation sites; nothing lives on the manifold.
    """

    undecayed_parameters = ("log_temperature",)
    layer = PolarLinear
    head_gain = HeadGain

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        k: float | Curvature = 1.0,
        position: HorosphericalEncoding | BoostEncoding | None = None,
        radius: str = "anchored",
        radius_std: float = 0.0,
        fused: bool = True,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide embed_dim={embed_dim}")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        if position is not None and position.min_head_dim > self.head_dim:
            raise ValueError(
                f"the positional encoding needs head dimensions ≥ {position.min_head_dim}, got "
                f"{self.head_dim}"
            )
        self.curvature = as_curvature_module(k)
        self.query, self.key, self.value, self.output = (
            self.layer(
                embed_dim,
                embed_dim,
                k=self.curvature,
                radius=radius,
                radius_std=radius_std,
                init="orthogonal",
            )
            for _ in range(4)
        )
        self.query_heads, self.key_heads, self.value_heads = (
            self.head_gain(num_heads) for _ in range(3)
        )
        self.position = position
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.fused, self.is_causal = fused, is_causal

    def forward(
        self,
        x: PointLike,
        context: PointLike | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: PolarCache | None = None,
    ) -> Point:
        """Attend from x to itself, or to `context`.

        Masks follow `torch.nn.MultiheadAttention`: True excludes. A query all of whose keys are
        excluded gives the origin, and sends no gradient anywhere.

        Args:
            x: points (batch, N), (batch, N, n).
            context: points (batch, M), (batch, M, n) that keys and values are taken from.
            key_padding_mask: (batch, M) bool, True at padding, or a float added to the scores.
                With a cache, of the new tokens only.
            attn_mask: (N, M) or (batch, N, M) or (batch, H, N, M), bool or float. Where it needs
                a gradient the dense path is taken.
            is_causal: query i sees keys up to i (the newest N of the M keys are the queries').
            positions: (N,) or (batch, N) for the encoding; by default counted from the length of
                the cache. Give them for left-padded batches.
            context_positions: the same for `context`.
            cache: keys and values of earlier tokens; the new ones are appended.

        Returns:
            Points (batch, N), (batch, N, n).
        """
        ((a, u),) = promote(x)
        if a.dim() != 2 or u.shape[-1] != self.embed_dim:
            raise ValueError(
                f"expected points (batch, tokens) and (batch, tokens, {self.embed_dim}), got "
                f"{tuple(a.shape)} and {tuple(u.shape)}"
            )
        if context is not None and cache is not None:
            raise ValueError("a cache holds the keys of x itself: give context or cache, not both")
        is_causal = self.is_causal if is_causal is None else is_causal
        if is_causal and context is not None:
            raise ValueError("causal attention to a context has no meaning")
        source = (a, u) if context is None else promote(context)[0]
        offset = 0 if cache is None else cache.length
        row = klein_row(a, u)
        query = self._encode(self.query_heads(self.query((a, u), row)), positions, offset)
        if context is None:
            context_positions = positions
        else:
            row = klein_row(*source)
        key = self._encode(self.key_heads(self.key(source, row)), context_positions, offset)
        value = _heads_first(self.value_heads(self.value(source, row)))
        if cache is not None:
            key, value, key_padding_mask = cache.append(key, value, key_padding_mask)
        bias = self._bias(key_padding_mask, attn_mask, query, key)
        scale = (
            self.curvature() * self.head_dim**-0.5 * torch.exp(-self.log_temperature.to(u.dtype))
        )
        gain = scale.to(u.dtype).reshape(1, 1, 1)
        if self.fused and not (bias is not None and bias.requires_grad):
            heads = fused_attention(query, key, value, gain, bias, is_causal=is_causal)
        else:
            if is_causal:
                n, m = query.level.shape[-1], key.level.shape[-1]
                causal = causal_bias(n, m, u, m - n)
                bias = causal if bias is None else bias + causal
            heads = dense_attention(query, key, value, gain, bias)
        joined = join_heads(Point(heads.a.transpose(1, 2), heads.u.transpose(1, 2)))
        result = self.output(joined)
        if bias is None:
            return result
        # The output map moves the origin; a token that attends to nothing adds nothing.
        reached = (joined.u != 0).any(-1)
        return Point(
            torch.where(reached, result.a, 0.0), torch.where(reached[..., None], result.u, 0.0)
        )

    def _encode(self, heads: Point, positions: Tensor | None, offset: int) -> ScoreCoordinates:
        heads = _heads_first(heads)
        if self.position is None:
            return polar_score_coordinates(heads)
        return self.position(heads, positions, offset=offset)

    def _bias(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        query: ScoreCoordinates,
        key: ScoreCoordinates,
    ) -> Tensor | None:
        batch, _, n = query.level.shape
        m = key.level.shape[-1]
        dtype = query.level.dtype
        bias = None
        if key_padding_mask is not None:
            if key_padding_mask.shape != (batch, m):
                raise ValueError(
                    f"key_padding_mask must have shape ({batch}, {m}), got "
                    f"{tuple(key_padding_mask.shape)}"
                )
            bias = _additive(key_padding_mask, dtype)[:, None, None, :]
        if attn_mask is not None:
            shapes = {2: (n, m), 3: (batch, n, m), 4: (batch, self.num_heads, n, m)}
            expected = shapes.get(attn_mask.dim())
            if expected is None or any(
                have not in (1, want) for have, want in zip(attn_mask.shape, expected, strict=True)
            ):
                raise ValueError(
                    f"attn_mask must have shape (N, M), (batch, N, M) or (batch, H, N, M) with "
                    f"N, M = {n}, {m}, got {tuple(attn_mask.shape)}"
                )
            added = _additive(attn_mask, dtype)
            if added.dim() == 3:
                added = added.unsqueeze(1)
            bias = added if bias is None else bias + added
        return bias

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """The four direction maps: three read the block's input, one the centroids."""
        return [part.direction for part in (self.query, self.key, self.value, self.output)]


def _heads_first(x: Point) -> Point:
    """(batch, N, H) → (batch, H, N)."""
    return Point(x.a.transpose(1, 2), x.u.transpose(1, 2))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
            mask, -torch.inf
        )
    return mask.to(dtype)
