"""Language models on the sources of Python's standard library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from rpt.geometry.rt_filter import PolarTransformer
from torch import Tensor, nn
from torch.nn import functional

from rpt.demo.model import LanguageModel
from rpt.demo.text import VOCABULARY_SIZE, load_corpus

from ..byte_pairs import apply_merges, learn_merges
from ..task import Batch, Problem, Task

MERGES, BPE_CHARACTERS = 400, 1_000_000
BPE_VOCABULARY = VOCABULARY_SIZE + MERGES


@lru_cache
def characters() -> tuple[Tensor, Tensor]:
    """(train, held out), uint8 codes."""
    corpus = load_corpus()
    return corpus.train, corpus.validation


@lru_cache
def byte_pairs() -> tuple[Tensor, Tensor]:
    """(train, held out), codes of a vocabulary of 497, learned on the first 300,000 characters."""
    train, held_out = (t.numpy().astype("int64") for t in characters())
    merges = learn_merges(train[:300_000], VOCABULARY_SIZE, MERGES)
    return (
        torch.from_numpy(apply_merges(train[:BPE_CHARACTERS], VOCABULARY_SIZE, merges)),
        torch.from_numpy(apply_merges(held_out[: BPE_CHARACTERS // 5], VOCABULARY_SIZE, merges)),
    )


def language_problem(
    seed: int,
    model: Callable[[], nn.Module],
    text: tuple[Tensor, Tensor],
    batch: int,
    context: int,
    held_out_windows: int = 96,
) -> Problem:
    """Next-token cross-entropy in nats per token; held-out windows are the same for every seed."""
    train, held_out = text
    torch.manual_seed(seed)
    made = model()
    generator = torch.Generator().manual_seed(10_000 + seed)
    offsets = torch.arange(context + 1)

    def batches() -> Iterator[Batch]:
        while True:
            starts = torch.randint(len(train) - context, (batch,), generator=generator)
            windows = train[starts[:, None] + offsets].long()
            yield windows[:, :-1], windows[:, 1:]

    starts = torch.linspace(
        0, len(held_out) - context - 1, held_out_windows, dtype=torch.float64
    ).long()
    fixed = held_out[starts[:, None] + offsets].long()

    def loss(net: nn.Module, rows: Batch) -> Tensor:
        return functional.cross_entropy(net(rows[0]).flatten(0, 1), rows[1].flatten())

    def measure(net: nn.Module) -> dict[str, float]:
        parts = [loss(net, (w[:, :-1], w[:, 1:])) for w in fixed.split(32)]
        return {"loss": torch.stack(parts).mean().item()}

    return Problem(made, batches(), loss, measure)


class LSTMModel(nn.Module):
    """Embedding, one LSTM, head."""

    def __init__(self, width: int = 48, hidden: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY_SIZE)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(codes))[0])


def _gpt(
    seed: int, *, bpe: bool, width: int, layers: int, block: str = "plain", batch: int = 16
) -> Problem:
    vocabulary = BPE_VOCABULARY if bpe else VOCABULARY_SIZE
    text = byte_pairs() if bpe else characters()
    return language_problem(
        seed, lambda: LanguageModel(vocabulary, 64, width, layers, 4, block), text, batch, 64
    )


def _polar(seed: int) -> Problem:
    def model() -> nn.Module:
        return PolarTransformer(VOCABULARY_SIZE, 48, 4, 2, head_dim=6)

    return language_problem(seed, model, characters(), 12, 64)


def _lstm(seed: int) -> Problem:
    return language_problem(seed, LSTMModel, characters(), 16, 48)


_small = partial(_gpt, bpe=False, width=64, layers=2)

TASKS = [
    Task("gpt_char", "text", _small, 300, evaluations=30),
    Task("gpt_bpe", "text", partial(_gpt, bpe=True, width=64, layers=2), 300, evaluations=30),
    Task(
        "context_lm", "text",
        partial(_gpt, bpe=False, width=48, layers=2, block="self_context", batch=12), 150,
        evaluations=30,
    ),
    Task("polar_lm", "text", _polar, 150, evaluations=30),
    Task("lstm_char", "text", _lstm, 200),
    Task(
        "gpt_char_constant", "constant rate", _small, 300,
        schedule="constant", evaluations=30, tail=3,
    ),
    Task(
        "gpt_char_large", "text", partial(_gpt, bpe=False, width=128, layers=4, batch=32), 600,
        evaluations=30,
    ),
    Task(
        "gpt_bpe_large", "text", partial(_gpt, bpe=True, width=128, layers=4, batch=32), 600,
        evaluations=30,
    ),
]  # fmt: skip
