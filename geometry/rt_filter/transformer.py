"""Polar Transformer block and language model.

Source: RT-Filter paper, Algorithm 1 steps 9–10, appendix E.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import PolarAttention
from .cache import FilterCache

__all__ = ["FeedForward", "PolarTransformer", "PolarTransformerBlock"]


class FeedForward(nn.Module):
    """down(GELU(up(x))), without biases."""

    def __init__(self, d_model: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class PolarTransformerBlock(nn.Module):
    """z⁺ = z + attention(z), then z⁺ + FFN(RMSNorm(z⁺)): steps 9 and 10 of Algorithm 1.

    No norm stands before attention, whose own normalisation takes its place; `pre_norm=True` puts
    one there, as the standard transformer has. Keyword options go to `PolarAttention`.

    Args:
        feed_forward: hidden width, default 4·d_model.
        dropout: on the directional attention weights and the feed-forward output.
        standard: the standard pre-norm transformer block with rotary positions instead: every
            correction off (`PolarAttention.standard`), and `pre_norm`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        feed_forward: int | None = None,
        dropout: float = 0.0,
        pre_norm: bool | None = None,
        standard: bool = False,
        eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__()
        make = PolarAttention.standard if standard else PolarAttention
        pre_norm = standard if pre_norm is None else pre_norm
        self.attention_norm = nn.RMSNorm(d_model, eps=eps) if pre_norm else None
        self.attention = make(d_model, num_heads, dropout=dropout, **options)
        self.feed_forward_norm = nn.RMSNorm(d_model, eps=eps)
        self.feed_forward = FeedForward(d_model, feed_forward or 4 * d_model, dropout)

    def optimizer_observation_modules(self) -> tuple[nn.Module, ...]:
        """What first reads a new nonlinear representation: the projection after attention, and the
        feed-forward network's second matrix."""
        return (self.attention.output_projection, self.feed_forward.down)

    def forward(
        self,
        z: Tensor,
        *,
        times: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cache: FilterCache | None = None,
        causal: bool | None = None,
    ) -> Tensor:
        """(batch, tokens, d_model) to the same; a cache is committed at the end of the call."""
        z, _ = self.step(
            z,
            times=times,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            cache=cache,
            causal=causal,
        )
        if cache is not None:
            cache.commit()
        return z

    def step(
        self,
        z: Tensor,
        *,
        times: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cache: FilterCache | None = None,
        layer: int = 0,
        causal: bool | None = None,
        prior_log_precision: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` inside a stack: no commit, and the precision of G.3 handed from layer to
        layer.
        """
        normed = z if self.attention_norm is None else self.attention_norm(z)
        found = self.attention.filter(
            normed,
            times=times,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            cache=cache,
            layer=layer,
            causal=causal,
            prior_log_precision=prior_log_precision,
        )
        z = z + found.output
        return z + self.feed_forward(self.feed_forward_norm(z)), found.log_precision


class PolarTransformer(nn.Module):
    """A causal language model of Polar Transformer blocks, with generation through the cache.

    Args:
        vocab_size: tokens.
        d_model, num_heads, num_layers: sizes.
        tie_embeddings: the output head shares the embedding's matrix.
        options: for every `PolarTransformerBlock`, such as `standard=True`.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        *,
        tie_embeddings: bool = True,
        eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_layers < 1 or vocab_size < 1:
            raise ValueError(f"need vocab_size, num_layers ≥ 1, got {vocab_size}, {num_layers}")
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(
            PolarTransformerBlock(d_model, num_heads, eps=eps, **options) for _ in range(num_layers)
        )
        self.final_norm = nn.RMSNorm(d_model, eps=eps)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=1.0 if not tie_embeddings else d_model**-0.5)
        self.tied = tie_embeddings
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        else:
            nn.init.normal_(self.head.weight, std=d_model**-0.5)

    def new_cache(self) -> FilterCache:
        """An empty cache for all layers."""
        return FilterCache(len(self.blocks))

    def forward(
        self,
        tokens: Tensor,
        *,
        times: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cache: FilterCache | None = None,
    ) -> Tensor:
        """Logits (batch, tokens, vocab_size) for integer tokens (batch, tokens).

        Args:
            times, key_padding_mask, cache: as in `PolarAttention.forward`; the cache is committed
                once, after the last layer, and untouched if anything fails.

        Raises:
            ValueError: tokens of another shape or dtype.
        """
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens must be integers of shape (batch, tokens), got {tuple(tokens.shape)}"
                f" {tokens.dtype}"
            )
        if cache is not None and cache.num_layers != len(self.blocks):
            raise ValueError(
                f"the cache has {cache.num_layers} layers, the model {len(self.blocks)}; use"
                " new_cache()"
            )
        z = self.embedding(tokens)
        if self.tied:
            z = z * self.embedding.embedding_dim**0.5
        precision: Tensor | None = None
        for index, block in enumerate(self.blocks):
            assert isinstance(block, PolarTransformerBlock)
            z, precision = block.step(
                z,
                times=times,
                key_padding_mask=key_padding_mask,
                cache=cache,
                layer=index,
                prior_log_precision=precision,
            )
        logits = self.head(self.final_norm(z))
        if cache is not None:
            cache.commit()
        return logits

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        key_padding_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue prompts (batch, tokens) by `count` tokens; returns (batch, tokens + count).

        Args:
            temperature: 0 takes the most likely token.
            top_k: sample among the k most likely only.
            key_padding_mask: boolean (batch, tokens), True at left padding of shorter prompts.
        """
        if tokens.shape[1] < 1:
            raise ValueError("generation needs at least one token to start from")
        training = self.training
        self.eval()
        try:
            cache, padding = self.new_cache(), key_padding_mask
            logits = self(tokens, key_padding_mask=padding, cache=cache)[:, -1]
            for index in range(count):
                new = _sample(logits, temperature, top_k, generator)
                tokens = torch.cat((tokens, new), dim=1)
                if index + 1 < count:
                    logits = self(new, cache=cache)[:, -1]
            return tokens
        finally:
            self.train(training)


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
