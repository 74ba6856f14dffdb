"""Polar Transformer block and language model.

Source: RT-Filter paper, Algorithm 1 steps 9–10, appendix E.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import check_count, check_number, renamed
from ..softmax import damaged
from .attention import PolarAttention
from .base import AttentionCall
from .cache import FilterCache

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["PolarTransformer", "PolarTransformerBlock"]


class FeedForward(nn.Module):
    """down(GELU(up(x))), without biases."""

    def __init__(self, embed_dim: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_count("feed_forward", hidden)
        self.up = nn.Linear(embed_dim, hidden, bias=False)
        self.down = nn.Linear(hidden, embed_dim, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class PolarTransformerBlock(nn.Module):
    """z⁺ = z + attention(z), then z⁺ + FFN(RMSNorm(z⁺)): steps 9 and 10 of Algorithm 1.

    No norm stands before attention, whose own normalisation takes its place. Keyword options go to
    `PolarAttention`.

    Args:
        feed_forward: hidden width, default 4·embed_dim.
        dropout: on the directional attention weights and the feed-forward output.
        standard: the standard pre-norm transformer block with rotary positions instead: every
            correction off (`PolarAttention.standard`), and a norm before attention.

    Raises:
        ValueError: sizes or options that make no sense together.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import PolarTransformerBlock
        >>> PolarTransformerBlock(embed_dim=16, num_heads=2)(torch.randn(3, 5, 16)).shape
        torch.Size([3, 5, 16])
    """

    @renamed(d_model="embed_dim", causal="is_causal")
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feed_forward: int | None = None,
        dropout: float = 0.0,
        standard: bool = False,
        eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__()
        check_number("eps", eps, 0.0)
        make = PolarAttention.standard if standard else PolarAttention
        self.attention_norm = nn.RMSNorm(embed_dim, eps=eps) if standard else None
        self.attention = make(embed_dim, num_heads, dropout=dropout, **options)
        self.feed_forward_norm = nn.RMSNorm(embed_dim, eps=eps)
        self.feed_forward = FeedForward(
            embed_dim, 4 * embed_dim if feed_forward is None else feed_forward, dropout
        )

    def optimizer_observation_modules(self) -> tuple[nn.Module, ...]:
        """What first reads a new nonlinear representation: the projection after attention, and the
        feed-forward network's second matrix."""
        return (self.attention.output_projection, self.feed_forward.down)

    @renamed(causal="is_causal")
    def forward(self, z: Tensor, **call: Unpack[AttentionCall]) -> Tensor:
        """(batch, tokens, embed_dim) to the same; keywords and errors are those of
        `PolarAttention.forward`. A cache is committed at the end of the call."""
        cache = call.get("cache")
        if cache is not None:
            cache.open(z.shape[0], 1)
        z, _ = self.step(z, **call)
        if cache is not None:
            cache.commit()
        return z

    def step(
        self,
        z: Tensor,
        *,
        layer: int = 0,
        prior_log_precision: Tensor | None = None,
        **call: Unpack[AttentionCall],
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` inside a stack: no commit; the precision of G.3 goes from layer to layer."""
        normed = z if self.attention_norm is None else self.attention_norm(z)
        found = self.attention.filter(
            normed, layer=layer, prior_log_precision=prior_log_precision, **call
        )
        z = z + found.output
        # Damaged rows stay damaged, but must not reach the gradients of weights, which sum over rows.
        clean = z.masked_fill(damaged(z).unsqueeze(-1), 0.0)
        return z + self.feed_forward(self.feed_forward_norm(clean)), found.log_precision


class PolarTransformer(nn.Module):
    """A causal language model of Polar Transformer blocks (appendix E), tokens to logits.

    Args:
        vocab_size: tokens.
        embed_dim, num_heads, num_layers: sizes.
        tie_embeddings: the output head shares the embedding's matrix.
        options: for every `PolarTransformerBlock`, such as `standard=True`.

    Raises:
        ValueError: sizes or options that make no sense together.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import PolarTransformer
        >>> model = PolarTransformer(vocab_size=20, embed_dim=16, num_heads=2, num_layers=1)
        >>> model(torch.randint(20, (3, 5))).shape
        torch.Size([3, 5, 20])
        >>> model.generate(torch.randint(20, (3, 5)), 2).shape
        torch.Size([3, 7])
    """

    @renamed(d_model="embed_dim", causal="is_causal")
    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        *,
        tie_embeddings: bool = True,
        eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__()
        check_count("vocab_size", vocab_size)
        check_count("num_layers", num_layers)
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.blocks = nn.ModuleList(
            PolarTransformerBlock(embed_dim, num_heads, eps=eps, **options)
            for _ in range(num_layers)
        )
        self.final_norm = nn.RMSNorm(embed_dim, eps=eps)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=1.0 if not tie_embeddings else embed_dim**-0.5)
        self.tied = tie_embeddings
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        else:
            nn.init.normal_(self.head.weight, std=embed_dim**-0.5)

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
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"tokens must be int64 or int32 of shape (batch, tokens), got {tuple(tokens.shape)}"
                f" {tokens.dtype}"
            )
        if cache is not None:
            cache.open(tokens.shape[0], len(self.blocks))
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

        Raises:
            ValueError: no token to start from, count < 0, temperature < 0, or top_k < 1.
        """
        check_count("count", count, 0)
        check_number("temperature", temperature, 0.0)
        if top_k is not None:
            check_count("top_k", top_k)
        if tokens.dim() != 2 or not tokens.shape[1]:
            raise ValueError(
                "generation needs tokens (batch, tokens), at least one to start from, got"
                f" {tuple(tokens.shape)}"
            )
        training = self.training
        self.eval()
        try:
            cache = self.new_cache()
            logits = self(tokens, key_padding_mask=key_padding_mask, cache=cache)[:, -1]
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
    if temperature == 0 or not len(logits):
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
