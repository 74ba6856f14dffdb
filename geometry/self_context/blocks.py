"""ContextMLP and ContextTransformerBlock: self-context layers that declare their own boundaries.

Source: the RPT guide, "Put self-context inside an ordinary MLP" and "The same boundary rule extends
to a transformer".
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..checks import check_choice, check_count, check_number, renamed
from ..masks import check_attention_mask, check_padding_mask
from ..softmax import damaged, softmax_attention
from .layers import LELU, SoftEikonalLinear

__all__ = ["ContextMLP", "ContextTransformerBlock"]


class ContextMLP(nn.Module):
    """embed → up (width → 2·width) → LELU → down (2·width → width) → output.

    `up` and `down` are `SoftEikonalLinear`. Declares `(down.base, down.metric)`: the two matrices
    that first read the representation the LELU makes.

    Args:
        input_dim: width of the input's last dimension.
        output_dim: width of the output's last dimension.
        width: hidden width.
        directions, rank, self_context_strength, temperature, context_steps: of both self-context
            layers.

    Shape: (..., input_dim) → (..., output_dim).

    Raises:
        ValueError: an option out of its range.

    Example:
        >>> import torch
        >>> from rpt.geometry.self_context import ContextMLP
        >>> ContextMLP(input_dim=2, output_dim=1, width=16)(torch.randn(5, 2)).shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        width: int = 128,
        *,
        directions: int = 12,
        rank: int = 4,
        self_context_strength: float = 0.25,
        temperature: float = 1.0,
        context_steps: int = 1,
    ) -> None:
        super().__init__()

        def context(n_in: int, n_out: int) -> SoftEikonalLinear:
            return SoftEikonalLinear(
                n_in, n_out, directions, rank, self_context_strength, temperature, context_steps
            )

        for name, value in (("input_dim", input_dim), ("output_dim", output_dim), ("width", width)):
            check_count(name, value)
        self.embed = nn.Linear(input_dim, width)
        self.up = context(width, 2 * width)
        self.activation = LELU()
        self.down = context(2 * width, width)
        self.output = nn.Linear(width, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.down(self.activation(self.up(self.embed(x)))))

    def optimizer_observation_modules(self) -> tuple[nn.Module, ...]:
        return (self.down.base, self.down.metric)


class ContextTransformerBlock(nn.Module):
    """Pre-norm transformer block whose feed-forward path is the self-context block.

        x ← x + attention_output(attention(norm1(x)))
        x ← x + context_down(LELU(context_up(norm2(x))))

    Declares `(attention_output, context_down.base, context_down.metric)`: the matrices that first
    read what the softmax and the LELU make.

    Args:
        embed_dim: width of the tokens; `num_heads` must divide it.
        num_heads: attention heads.
        dropout: on the attention weights and on both residual branches, in training only.
        is_causal: a token attends to itself and to earlier tokens only.
        directions, rank, self_context_strength: of both self-context layers.
        expansion: inner width of the feed-forward path, in units of `embed_dim`.
        backend: "auto" runs attention through `scaled_dot_product_attention`; "dense" in plain
            operations, which have second derivatives.

    Raises:
        ValueError: an option out of its range.

    Example:
        >>> import torch
        >>> from rpt.geometry.self_context import ContextTransformerBlock
        >>> ContextTransformerBlock(embed_dim=16, num_heads=2)(torch.randn(3, 5, 16)).shape
        torch.Size([3, 5, 16])
    """

    @renamed(d_model="embed_dim", heads="num_heads", causal="is_causal")
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        is_causal: bool = False,
        directions: int = 12,
        rank: int = 4,
        self_context_strength: float = 0.25,
        expansion: int = 4,
        backend: Literal["auto", "dense"] = "auto",
    ) -> None:
        super().__init__()
        for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads)):
            check_count(name, value)
        if embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim, got {num_heads} and {embed_dim}")
        check_number("dropout", dropout, 0.0, below=1.0)
        check_count("expansion", expansion)
        check_choice("backend", backend, ("auto", "dense"))

        def context(n_in: int, n_out: int) -> SoftEikonalLinear:
            return SoftEikonalLinear(n_in, n_out, directions, rank, self_context_strength)

        self.num_heads, self.is_causal = num_heads, is_causal
        self.backend, self.dropout_p = backend, dropout
        self.norm1 = nn.RMSNorm(embed_dim)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        # A module of its own, not fused into the attention, so that it can be observed.
        self.attention_output = nn.Linear(embed_dim, embed_dim, bias=False)
        self.norm2 = nn.RMSNorm(embed_dim)
        self.context_up = context(embed_dim, expansion * embed_dim)
        self.activation = LELU()
        self.context_down = context(expansion * embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    @renamed(mask="attn_mask")
    def attend(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Multi-head attention without its output matrix: (..., tokens, embed_dim) → the same."""
        # (..., tokens, 3, heads, head_dim) → three of (..., heads, tokens, head_dim)
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-3, -2)
        )
        boolean = attn_mask is not None and attn_mask.dtype == torch.bool
        mixed, _ = softmax_attention(
            q,
            k,
            v,
            attn_mask if boolean else None,
            None if boolean else attn_mask,
            is_causal=self.is_causal,
            dropout=self.dropout_p if self.training else 0.0,
            dense=self.backend == "dense",
        )
        return mixed.transpose(-3, -2).flatten(-2)

    @renamed(mask="attn_mask")
    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """(..., tokens, embed_dim) → the same: batch first, any leading dimensions.

        Args:
            attn_mask: boolean (True: may attend) or added to the scores, (tokens, tokens), (batch,
                tokens, tokens) or (..., heads, tokens, tokens). A query with every key masked gets
                no attention: its attended value is exactly 0, and its gradients are finite.
            key_padding_mask: boolean (..., tokens), True where a token is padding: no query attends
                to it, and it enters as zeros, whatever it holds.

        A token that is not finite makes its own row NaN and those that attend to it, and no other;
        gradients of the others stay as they are.

        Raises:
            ValueError, TypeError: on shapes and dtypes that do not fit.
        """
        width = self.qkv.in_features
        if x.dim() < 2 or x.shape[-1] != width or not x.is_floating_point():
            raise ValueError(
                f"x must be floating, of shape (..., tokens, {width}), got {tuple(x.shape)} {x.dtype}"
            )
        leading, (tokens, width) = x.shape[:-2], x.shape[-2:]
        x = x.reshape(math.prod(leading), tokens, width)
        allowed = self._mask(x, attn_mask, key_padding_mask)
        if key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask.reshape(len(x), tokens, 1), 0.0)
        # What is not finite enters as zero too: a weight's gradient sums over all tokens, and zero
        # times NaN is NaN. Its own row and those that see it are marked at the end.
        lost = damaged(x)
        x = x.masked_fill(lost.unsqueeze(-1), 0.0)
        x = x + self.dropout(self.attention_output(self.attend(self.norm1(x), allowed)))
        hidden = self.activation(self.context_up(self.norm2(x)))
        x = x + self.dropout(self.context_down(hidden))
        spoiled = lost | _rows_that_see(lost, allowed, self.is_causal)
        return x.masked_fill(spoiled.unsqueeze(-1), float("nan")).reshape(*leading, tokens, width)

    def _mask(self, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Both masks, checked, as one (1 or batch, 1 or heads, tokens, tokens)."""
        batch, tokens, _ = x.shape
        if mask is not None:
            mask = mask.flatten(0, -4) if mask.dim() > 4 else mask
            work = torch.promote_types(x.dtype, torch.float32)
            mask = check_attention_mask(mask, batch, self.num_heads, tokens, tokens, dtype=work)
        if padding is None:
            return mask
        padding = torch.atleast_2d(padding).flatten(0, -2)
        seen = ~check_padding_mask(padding, batch, tokens)[:, None, None]
        if mask is None:
            return seen
        return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))

    def optimizer_observation_modules(self) -> tuple[nn.Module, ...]:
        return (self.attention_output, self.context_down.base, self.context_down.metric)


def _rows_that_see(keys: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Queries that may attend to one of the marked keys, (batch, tokens), in any head."""
    if mask is None:
        seen = keys.cumsum(-1) if is_causal else keys.sum(-1, keepdim=True).expand_as(keys)
        return seen > 0
    mask = mask if mask.dtype == torch.bool else mask > float("-inf")
    mask = mask.expand(-1, -1, keys.shape[1], -1)
    return ((mask.tril() if is_causal else mask) & keys[:, None, None]).any(-1).any(1)
