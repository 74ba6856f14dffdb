"""A transformer of self-context blocks, observed at the boundaries its blocks declare.

    python examples/context_transformer.py [--steps 150] [--quick]

Three runs from the same initialisation on the same batches of the standard library's source text:
AdamW; RPT with nothing attached; RPT attached, where `attach_model` collects from every block the
three matrices that first read a new nonlinear representation.
"""

import argparse
import time

import torch
from quick import announce
from rpt.geometry.self_context import ContextTransformerBlock
from torch import Tensor, nn

import rpt
from rpt.demo.text import VOCABULARY_SIZE, load_corpus

CONTEXT, WIDTH, BATCH = 64, 48, 24


class TinyTransformer(nn.Module):
    """Characters in, logits of the next character out. Declares nothing itself: its blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(
            ContextTransformerBlock(WIDTH, num_heads=4, is_causal=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY_SIZE)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_on(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return nn.functional.cross_entropy(model(windows[:, :-1]).mT, windows[:, 1:])


def run(name: str, steps: int) -> None:
    corpus = load_corpus()
    torch.manual_seed(0)
    model = TinyTransformer()
    optimizer: torch.optim.Optimizer
    if name == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    else:
        optimizer = rpt.ResidualPolarTransport(model.named_parameters(), lr=2e-3)
        if name == "RPT, attached":
            optimizer.attach_model(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    started = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_on(
            model, corpus.train, torch.randint(len(corpus.train) - CONTEXT, (BATCH,))
        ).backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        starts = torch.linspace(0, len(corpus.validation) - CONTEXT - 1, 200).long()
        held_out = loss_on(model, corpus.validation, starts)
    print(f"{name:16} validation loss {held_out:.3f} after {steps} steps, {seconds:.1f} s")
    if name == "RPT, attached":
        print(f"\nWhat the optimizer saw in its last step:\n{optimizer.telemetry()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--quick", action="store_true", help="two steps; figures mean nothing")
    options = parser.parse_args()
    announce(options.quick)
    torch.set_num_threads(1)
    for arm in ("AdamW", "RPT, unattached", "RPT, attached"):
        run(arm, 2 if options.quick else options.steps)


if __name__ == "__main__":
    main()
