"""Robust Filter Attention: the isotropic filter that the radial–tangential one generalises.

Source: RT-Filter paper, appendix A.4.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from ..checks import renamed
from ..softmax import masked_softmax
from .base import (
    AttentionOptions,
    AttentionWeights,
    FilterAttention,
    Projected,
    unit,
)
from .cache import FilterCache
from .logits import robust_filter_logits
from .parameters import FilterScalars
from .paths.sliced import map_query_slices
from .stream import TokenStream
from .transport import apply_rotation, rotation
from .visibility import Visibility, quarantine

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RobustFilterAttention", "robust_filter_estimate"]


def robust_filter_estimate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    view: Visibility,
    scalars: FilterScalars,
    *,
    student_t: bool = True,
    decay: bool = True,
    start: int = 0,
    stop: int | None = None,
    keys: int | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Σ_j A_ij E_ij ṽ_j for queries start…stop, and A; rotated inputs (batch, heads, tokens, 2d)."""
    query, key, value = query[:, :, start:stop], key[:, :, :keys], value[:, :, :keys]
    per_head = scalars.reshaped(1, 1)
    lag = view.lag(start, stop, keys)
    allowed, additive = view.allowed(lag, start, stop, keys)
    plain, factor = robust_filter_logits(
        query @ key.transpose(-1, -2),
        (query * query).sum(-1, keepdim=True),
        (key * key).sum(-1).unsqueeze(-2),
        lag.to(query.dtype),
        per_head,
        query.shape[-1] // 2,
        student_t=student_t,
        decay=decay,
    )
    logits = per_head.temperature * plain
    if additive is not None:
        logits = logits + additive
    attention = masked_softmax(logits, allowed)
    kept = F.dropout(attention, dropout) if dropout else attention
    return (kept * factor) @ value, attention


class RobustFilterAttention(FilterAttention):
    """Multi-head Robust Filter Attention (appendix A.4): x ↦ W_o V̄, (batch, tokens, embed_dim).

    The call and the options not named here are those of `PolarAttention`; tokens see one another
    through Mahalanobis distances of transported keys, values are rotated, decayed, averaged and
    counter-rotated. Put a residual connection, and a norm if wanted, around it.

    Args:
        process_noise: initial σ²; 0 leaves process noise out.
        normalize: bring queries, keys and values to length √d first (the sphere of
            `PolarAttention`).

    Raises:
        ValueError: sizes or options that make no sense together.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import RobustFilterAttention
        >>> RobustFilterAttention(embed_dim=16, num_heads=2)(torch.randn(3, 5, 16)).shape
        torch.Size([3, 5, 16])
    """

    @renamed(d_model="embed_dim", causal="is_causal")
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        process_noise: float = 1.0,
        normalize: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, process_noise=process_noise, **options)
        self.normalize = normalize

    def _step(
        self,
        tokens: Projected,
        stream: TokenStream,
        cache: FilterCache | None,
        layer: int,
        need_weights: bool,
        prior_log_precision: Tensor | None,
    ) -> tuple[Tensor, Tensor, AttentionWeights | None, None]:
        query, key, value = tokens.query, tokens.key, tokens.value
        view = stream.view
        turn = key_turn = rotation(self._angles(view.query_times), query.dtype)
        if tokens.own is not None:
            key_turn = rotation(self._angles(view.key_times), key.dtype)
        if self.normalize:
            length = math.sqrt(self.head_dim)
            query, key, value = (unit(t)[1] * length for t in (query, key, value))
        query = apply_rotation(query, *turn, inverse=True)
        key = apply_rotation(key, *key_turn, inverse=True)
        value = apply_rotation(value, *key_turn, inverse=True)
        if cache is not None:
            key, value = cache.stage(layer, (key, value), stream.tokens)
        (key, value), poisoned = quarantine(view, key, value)
        scalars = FilterScalars(*(s.to(query.dtype) for s in self.filter_scalars()))
        dropout = self.dropout if self.training else 0.0

        def piece(start: int, stop: int | None, visible: int | None) -> tuple[Tensor, Tensor]:
            return robust_filter_estimate(
                query,
                key,
                value,
                view,
                scalars,
                student_t=self.weights == "student_t",
                decay=self.decay,
                start=start,
                stop=stop,
                keys=visible,
                dropout=dropout,
            )

        weights = None
        if self._use_dense(query, key, need_weights):
            estimate, attention = piece(0, None, None)
            weights = AttentionWeights(attention, None)
        else:
            (estimate,) = map_query_slices(
                lambda *bounds: piece(*bounds)[:1], query, key, view, stream.ahead
            )
        return apply_rotation(estimate, *turn), tokens.lost | poisoned.any(1), weights, None
