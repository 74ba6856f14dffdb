"""The three-line change: an ordinary training script, with RPT in AdamW's place.

    python examples/drop_in.py [--steps 150] [--lr 3e-3] [--quick]

A small plain GPT (0.36 M parameters) on the source text of Python's standard library, trained twice from
the same start on the same batches: with `torch.optim.AdamW`, and with the three lines that are
marked. Printed: the loss on held-out files, the seconds of processor time, and what one step cost.
"""

import argparse
import time

import torch
from quick import announce
from torch import Tensor, nn

import rpt  # line 1
from rpt.demo.model import LanguageModel
from rpt.demo.text import VOCABULARY_SIZE, load_corpus

CONTEXT, BATCH = 64, 32


def loss_on(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return nn.functional.cross_entropy(model(windows[:, :-1]).mT, windows[:, 1:])


def train(use_rpt: bool, steps: int, lr: float) -> tuple[float, float]:
    """The held-out loss at the end, and the seconds of the processor that training took."""
    corpus = load_corpus()
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY_SIZE, CONTEXT)

    optimizer: torch.optim.Optimizer
    if use_rpt:
        optimizer = rpt.ResidualPolarTransport(model.parameters(), lr=lr)  # line 2, for AdamW's
        optimizer.attach_model(model)  # line 3, optional: observed matrices adapt
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    started = time.process_time()
    for _ in range(steps):
        starts = torch.randint(len(corpus.train) - CONTEXT, (BATCH,))
        optimizer.zero_grad()
        loss_on(model, corpus.train, starts).backward()
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - started
    with torch.no_grad():
        starts = torch.linspace(0, len(corpus.validation) - CONTEXT - 1, 200).long()
        return loss_on(model, corpus.validation, starts).item(), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="150: about a minute in all")
    parser.add_argument("--lr", type=float, default=3e-3, help="of both optimizers (3e-3)")
    parser.add_argument("--quick", action="store_true", help="three steps; figures mean nothing")
    options = parser.parse_args()
    announce(options.quick)
    torch.set_num_threads(1)
    steps = 3 if options.quick else options.steps
    cost = {}
    for name, use_rpt in (("AdamW", False), ("RPT", True)):
        loss, seconds = train(use_rpt, steps, options.lr)
        cost[name] = seconds / steps
        print(
            f"{name:6} held-out loss {loss:.3f} after {steps} steps in {seconds:.1f} s, "
            f"{1000 * cost[name]:.0f} ms a step"
        )
    print(f"A step with RPT cost {cost['RPT'] / cost['AdamW']:.2f} times one with AdamW.")


if __name__ == "__main__":
    main()
