"""The demonstration's causal language models: a plain GPT, and one of self-context blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["BLOCKS", "LanguageModel", "PlainBlock"]

BLOCKS = ("self_context", "plain")


class PlainBlock(nn.Module):
    """Pre-norm causal transformer block: attention, then a GELU feed-forward path.

    Declares the two matrices that first read a nonlinear representation: `attention_output` reads
    what the softmax mixed, `mlp_down` what the GELU bent.

    Shape: (batch, tokens, width) → the same.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width, bias=False)
        self.mlp_down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_output(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_down(functional.gelu(self.mlp_up(self.norm2(x))))

    def optimizer_observation_modules(self) -> tuple[nn.Module, ...]:
        return (self.attention_output, self.mlp_down)


class LanguageModel(nn.Module):
    """Causal character model: embeddings, blocks, norm, head.

    Args:
        vocabulary: number of codes.
        context: longest sequence.
        width, layers, heads: of the blocks.
        block: "plain" (`PlainBlock`) or "self_context" (`ContextTransformerBlock`).

    Shape: integer codes (batch, tokens) → logits (batch, tokens, vocabulary).

    Raises:
        ValueError: an unknown block, or `heads` that does not divide `width`.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int = 64,
        width: int = 96,
        layers: int = 3,
        heads: int = 4,
        block: str = "plain",
    ) -> None:
        super().__init__()
        if block not in BLOCKS:
            raise ValueError(f"block must be one of {', '.join(BLOCKS)}, got {block!r}")
        if width % heads:
            raise ValueError(f"heads must divide width, got heads {heads} and width {width}")
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(self._block(block, width, heads) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        if block == "plain":
            self._initialise_plain(layers)

    @staticmethod
    def _block(block: str, width: int, heads: int) -> nn.Module:
        if block == "plain":
            return PlainBlock(width, heads)
        from ..geometry.self_context import ContextTransformerBlock

        return ContextTransformerBlock(width, heads, is_causal=True)

    def _initialise_plain(self, layers: int) -> None:
        """GPT-2's initialisation: normal 0.02, what writes to the residual path scaled by depth."""
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("attention_output.weight", "mlp_down.weight"))
                std = 0.02 / math.sqrt(2 * layers) if writes else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes) + self.position[: codes.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, codes: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per character; both arguments (batch, tokens)."""
        return functional.cross_entropy(self(codes).flatten(0, 1), targets.flatten())
