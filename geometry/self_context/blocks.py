"""ContextMLP and ContextTransformerBlock: self-context layers that declare their own boundaries.

Source: the RPT guide, "Put self-context inside an ordinary MLP" and "The same boundary rule extends
to a transformer".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

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

        self.embed = nn.Linear(input_dim, width)
        self.up = context(width, 2 * width)
        self.activation = LELU()
        self.down = context(2 * width, width)
        self.output = nn.Linear(width, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.down(self.activation(self.up(self.embed(x)))))

    def optimizer_observation_modules(self) -> tuple[nn.Module, ...]:
        return (self.down.base, self.down.metric)


def _attention_bias(mask: Tensor | None, causal: bool, scores_like: Tensor) -> Tensor | None:
    """One mask for scaled dot-product attention out of the user's and the causal one.

    A boolean mask stays boolean (True: may be attended to); an additive one stays additive.
    """
    if mask is None or not causal:
        return mask
    tokens = scores_like.shape[-2]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=scores_like.device).tril()
    if mask.dtype == torch.bool:
        return mask & earlier
    return mask.masked_fill(~earlier, float("-inf"))


class ContextTransformerBlock(nn.Module):
    """Pre-norm transformer block whose feed-forward path is the self-context block.

        x ← x + attention_output(attention(norm1(x)))
        x ← x + context_down(LELU(context_up(norm2(x))))

    Declares `(attention_output, context_down.base, context_down.metric)`: the matrices that first
    read what the softmax and the LELU make.

    Args:
        d_model: width of the tokens; `heads` must divide it.
        heads: attention heads.
        dropout: on the attention weights and on both residual branches, in training only.
        causal: a token attends to itself and to earlier tokens only.
        directions, rank, self_context_strength: of both self-context layers.
        expansion: inner width of the feed-forward path, in units of `d_model`.

    Shape: (..., tokens, d_model) → the same. `mask` broadcasts against
    (..., heads, tokens, tokens): boolean, True where attention is allowed, or additive.
    A query with every key masked gets no attention: its attended value is exactly 0, and its
    gradients are finite.

    Raises:
        ValueError: `heads` does not divide `d_model`, or dropout is outside [0, 1).
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        directions: int = 12,
        rank: int = 4,
        self_context_strength: float = 0.25,
        expansion: int = 4,
    ) -> None:
        super().__init__()
        if heads < 1 or d_model % heads:
            raise ValueError(
                f"ContextTransformerBlock: heads must divide d_model, got {heads} and {d_model}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"ContextTransformerBlock: dropout must be in [0, 1), got {dropout}")

        def context(n_in: int, n_out: int) -> SoftEikonalLinear:
            return SoftEikonalLinear(n_in, n_out, directions, rank, self_context_strength)

        self.heads = heads
        self.causal = causal
        self.dropout_p = dropout
        self.norm1 = nn.RMSNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        # A module of its own, not fused into the attention, so that it can be observed.
        self.attention_output = nn.Linear(d_model, d_model, bias=False)
        self.norm2 = nn.RMSNorm(d_model)
        self.context_up = context(d_model, expansion * d_model)
        self.activation = LELU()
        self.context_down = context(expansion * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Multi-head attention without its output matrix: (..., tokens, d_model) → the same."""
        # (..., tokens, 3, heads, head_dim) → three of (..., heads, tokens, head_dim)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        bias = _attention_bias(mask, self.causal, q)
        mixed = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=self.causal and bias is None,
        )
        return mixed.transpose(-3, -2).flatten(-2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention_output(self.attend(self.norm1(x), mask)))
        hidden = self.activation(self.context_up(self.norm2(x)))
        return x + self.dropout(self.context_down(hidden))

    def optimizer_observation_modules(self) -> tuple[nn.Module, ...]:
        return (self.attention_output, self.context_down.base, self.context_down.metric)
