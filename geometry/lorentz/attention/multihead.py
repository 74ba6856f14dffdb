"""Multi-head attention with squared-distance scores and polar centroids (Polar-ViT, Eq. 9)."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from ...checks import check_choice, check_count
from ...masks import additive_mask, check_attention_mask, check_padding_mask
from ...softmax import damaged as not_finite
from ..layers.curvature import Curvature, as_curvature_module
from ..layers.linear import PolarLinear
from ..layers.sites import NoSites
from ..ops.coordinates import klein_row
from ..ops.point import Point, PointLike, host_readable, promote
from ..ops.space import join_heads, split_heads
from .block import causal_bias
from .blocked import blocked_attention
from .cache import CachedTokens, PolarCache
from .position import BoostEncoding, HorosphericalEncoding
from .scores import ScoreCoordinates, attention_weights, polar_score_coordinates, weighted_values


class HeadGain(nn.Module):
    """Splits into heads and moves each head's ln sinh a by a learned gain.

    `log_gain` (H,) is the deviation from the buffer `log_gain_offset`, which `calibrate_` sets.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.HeadGain(2)(lorentz.exp_map_origin(torch.randn(5, 8))).u.shape
        torch.Size([5, 2, 4])
    """

    log_gain_offset: Tensor
    calibrated: Tensor
    undecayed_parameters = ("log_gain",)

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_count("num_heads", num_heads)
        self.num_heads = num_heads
        self.log_gain = nn.Parameter(torch.zeros(num_heads))
        self.register_buffer("log_gain_offset", torch.zeros(num_heads))
        self.register_buffer("calibrated", torch.tensor(False))

    def forward(self, x: PointLike) -> Point:
        """Points (…), (…, n) → heads (…, H), (…, H, n/H)."""
        return split_heads(x, self.num_heads, self.log_gain + self.log_gain_offset)

    def shift_log_radius_(self, shift: Tensor) -> None:
        """Move the gains by (H,) numbers."""
        with torch.no_grad():
            self.log_gain_offset.add_(shift.to(self.log_gain_offset.dtype))
            self.calibrated.fill_(True)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class PolarMultiheadAttention(NoSites):
    """Multi-head attention on points (batch, tokens, n); the values are averaged by centroids.

    Queries, keys and values are `PolarLinear` maps split into heads, each a point of its own;
    the score is −(γ/τ) d² with γ = head_dim^−½ and a learned temperature τ; heads are joined by
    Lorentz direct concatenation and mapped once more. Batch first, always.

    Args:
        embed_dim: n.
        num_heads: H, which divides n.
        dropout: of the attention weights, in training.
        k: curvature −1/k, a number or a shared `Curvature`.
        position: encoding of queries and keys, `HorosphericalEncoding` or `BoostEncoding`.
        radius, radius_std: the radius rule of the four maps, see `PolarLinear`.
        is_causal: whether a query sees only tokens up to its own, by default of `forward`.
        backend: "auto" takes `blocked_attention`, linear in memory with a closed-form backward,
            except where only the dense path will do: dropout, `need_weights`, a mask with a
            gradient. "dense" takes `dense_attention` always, which has second derivatives.
        fused: deprecated: False is `backend="dense"`.

    Raises:
        ValueError: sizes or options that make no sense together.

    For the optimizer: the four `direction.weight` are Euclidean matrices with a live matrix path
    and observation sites; nothing lives on the manifold.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> layer = lorentz.PolarMultiheadAttention(8, 2, is_causal=True)
        >>> layer(lorentz.exp_map_origin(torch.randn(4, 5, 8))).u.shape
        torch.Size([4, 5, 8])
    """

    undecayed_parameters = ("log_temperature",)
    layer = PolarLinear
    head_gain = HeadGain

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        k: float | Curvature = 1.0,
        position: HorosphericalEncoding | BoostEncoding | None = None,
        radius: str = "anchored",
        radius_std: float = 0.0,
        is_causal: bool = False,
        backend: Literal["auto", "dense"] = "auto",
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        check_count("embed_dim", embed_dim)
        check_count("num_heads", num_heads)
        if embed_dim % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide embed_dim={embed_dim}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout!r}")
        if fused is not None:
            warnings.warn(
                "fused= is deprecated: use backend='auto' for True, backend='dense' for False",
                DeprecationWarning,
                stacklevel=2,
            )
            backend = "auto" if fused else "dense"
        check_choice("backend", backend, ("auto", "dense"))
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
        self.dropout, self.is_causal, self.backend = dropout, is_causal, backend

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
        need_weights: bool = False,
    ) -> Point | tuple[Point, Tensor]:
        """Attend from x to itself, or to `context`.

        A boolean `attn_mask` is True where a query **may attend** (`rpt.geometry.masks`). A query
        that no key is left to gives the origin, and sends no gradient. What a masked key holds, NaN
        included, reaches no query that does not see it; one that sees it becomes NaN.

        Args:
            x: points (batch, N), (batch, N, n).
            context: points (batch, M), (batch, M, n) that keys and values are taken from.
            key_padding_mask: (batch, M) bool, True at padding, or a float added to the scores.
                Padded tokens are read as the origin. With a cache: of the new tokens, or of all.
            attn_mask: (N, M) or (batch, N, M) or (batch, H, N, M), bool or float; sizes of 1
                broadcast.
            is_causal: query i sees keys up to i (the newest N of the M keys are the queries').
            positions: (N,) or (batch, N) for the encoding; by default counted from the length of
                the cache. Give them for left-padded batches.
            context_positions: the same for `context`.
            cache: keys and values of earlier tokens; the new ones are added when all went well.
            need_weights: also return the weights; takes the dense path.

        Returns:
            Points (batch, N), (batch, N, n), and if asked for the weights (batch, H, N, M).

        Raises:
            TypeError, ValueError: masks, shapes or options that do not fit.
        """
        is_causal = self.is_causal if is_causal is None else is_causal
        own = self._tokens(x)
        if context is not None and cache is not None:
            raise ValueError("a cache holds the keys of x itself: give context or cache, not both")
        if context is not None and is_causal:
            raise ValueError("causal attention to a context has no meaning")
        source = own if context is None else self._tokens(context)
        if source.a.shape[0] != own.a.shape[0]:
            raise ValueError(f"x has batch {own.a.shape[0]}, context has {source.a.shape[0]}")
        before = 0 if cache is None else cache.length
        padding, mask = self._masks(key_padding_mask, attn_mask, own.a, before, source.a.shape[1])

        own, damaged = _clean(own, padding if context is None else None)
        row = source_row = klein_row(*own)
        if context is None:
            source, damaged_keys, context_positions = own, damaged, positions
        else:
            source, damaged_keys = _clean(source, padding)
            source_row = klein_row(*source)
        query = self._encode(self.query_heads(self.query(own, row)), positions, before)
        key = self._encode(self.key_heads(self.key(source, source_row)), context_positions, before)
        value = _heads_first(self.value_heads(self.value(source, source_row)))
        tokens = CachedTokens(key, value, padding, damaged_keys)
        if cache is not None:
            tokens = cache.joined(tokens)
        bias = _bias(tokens.padding, mask, query.level.dtype)
        heads, weights = self._attend(query, tokens, bias, is_causal, need_weights)
        joined = join_heads(_heads_first(heads))
        result = self.output(joined)
        if bias is not None or not tokens.value.a.shape[-1]:
            # The output map moves the origin; a token that attends to nothing adds nothing.
            reached = (joined.u != 0).any(-1)
            result = Point(
                torch.where(reached, result.a, 0.0), torch.where(reached[..., None], result.u, 0.0)
            )
        if tokens.damaged is not None or damaged is not None:
            lost = _sees(tokens.damaged, bias, is_causal, own.a)
            lost = lost if damaged is None else lost | damaged
            result = Point(
                result.a.masked_fill(lost, torch.nan),
                result.u.masked_fill(lost[..., None], torch.nan),
            )
        if cache is not None:
            cache.held = tokens
        return (result, weights) if weights is not None else result

    def _tokens(self, x: PointLike) -> Point:
        ((a, u),) = promote(x)
        if a.dim() != 2 or u.shape[-1] != self.embed_dim:
            raise ValueError(
                f"expected points (batch, tokens) and (batch, tokens, {self.embed_dim}), got "
                f"{tuple(a.shape)} and {tuple(u.shape)}"
            )
        return Point(a, u)

    def _masks(
        self, padding: Tensor | None, mask: Tensor | None, queries: Tensor, before: int, new: int
    ) -> tuple[Tensor | None, Tensor | None]:
        batch, n = queries.shape
        keys = before + new
        if padding is not None:
            whole = before > 0 and padding.dim() == 2 and padding.shape[1] == keys
            padding = check_padding_mask(
                padding, batch, keys if whole else new, dtype=queries.dtype
            )
        if mask is not None:
            mask = check_attention_mask(mask, batch, self.num_heads, n, keys, dtype=queries.dtype)
        return padding, mask

    def _encode(self, heads: Point, positions: Tensor | None, offset: int) -> ScoreCoordinates:
        heads = _heads_first(heads)
        if self.position is None:
            return polar_score_coordinates(heads)
        return self.position(heads, positions, offset=offset)

    def _attend(
        self,
        query: ScoreCoordinates,
        tokens: CachedTokens,
        bias: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[Point, Tensor | None]:
        key, value = tokens.key, tokens.value
        dtype = query.level.dtype
        temperature = torch.exp(-self.log_temperature.to(dtype))
        gain = (self.curvature() * self.head_dim**-0.5 * temperature).to(dtype).reshape(1, 1, 1)
        dropout = self.dropout if self.training else 0.0
        by_mask = bias is not None and bias.requires_grad
        if self.backend == "auto" and not (need_weights or dropout or by_mask):
            return blocked_attention(query, key, value, gain, bias, is_causal=is_causal), None
        if is_causal:
            n, m = query.level.shape[-1], key.level.shape[-1]
            causal = causal_bias(n, m, query.level, m - n)
            bias = causal if bias is None else bias + causal
        weights = nn.functional.dropout(attention_weights(query, key, gain, bias), dropout)
        return weighted_values(value, weights), weights if need_weights else None


def _heads_first(x: Point) -> Point:
    """(batch, N, H) ↔ (batch, H, N)."""
    return Point(x.a.transpose(1, 2), x.u.transpose(1, 2))


def _clean(x: Point, padding: Tensor | None) -> tuple[Point, Tensor | None]:
    """Points in which padded tokens and those that are not finite are origins; and where the latter
    are, (batch, tokens), or None where none is (a device is not asked)."""
    tokens = x.a.shape[1]
    drop = None
    if padding is not None:
        padding = padding[:, -tokens:] if tokens else padding[:, :0]
        drop = padding if padding.dtype == torch.bool else padding == -torch.inf
    damaged = not_finite(x.u) | not_finite(x.a.unsqueeze(-1))
    if drop is not None:
        damaged = damaged & ~drop
    some = not (host_readable(damaged) and not bool(damaged.any()))
    if some:
        drop = damaged if drop is None else drop | damaged
    elif drop is None:
        return x, None
    cleaned = Point(x.a.masked_fill(drop, 0.0), x.u.masked_fill(drop[..., None], 0.0))
    return cleaned, damaged if some else None


def _bias(padding: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores, broadcasting to (batch, H, N, M); None: nothing."""
    bias = None
    if padding is not None:
        allowed = ~padding if padding.dtype == torch.bool else padding
        bias = additive_mask(allowed, dtype)[:, None, None, :]
    if mask is not None:
        added = additive_mask(mask, dtype)
        bias = added if bias is None else bias + added
    return bias


def _sees(damaged: Tensor | None, bias: Tensor | None, is_causal: bool, like: Tensor) -> Tensor:
    """Queries (batch, N) that see a damaged key (batch, M), in any head."""
    if damaged is None:
        return torch.zeros_like(like, dtype=torch.bool)
    n, m = like.shape[1], damaged.shape[1]
    seen = damaged[:, None, None, :]
    if bias is not None:
        seen = seen & (bias > -torch.inf)
    if is_causal and seen.shape[-2] > 1:
        seen = seen & torch.ones(n, m, dtype=torch.bool, device=like.device).tril(m - n)
    elif is_causal:
        # The newest n of the m keys are the queries'. A sum along the keys forms nothing (N, M).
        return (seen.cumsum(-1) > 0)[:, :, 0, m - n :].any(1)
    return seen.any(-1).any(1).expand(-1, n)
