"""What observation costs: forward + backward with taps, as a ratio of forward + backward without.

    python examples/bench/observers.py [--steps 12] [--no-compile]

A GPT of width 256 reads 2,048 tokens per step; every linear layer is observed. Observed steps
include what `optimizer.step()` adds on top of its own work: committing the stage (all sites solved
in one batched call) and advancing the cadence. Plain and observed steps alternate; medians of the
process's own seconds on a CPU, which other programs disturb less, and of the clock's on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rpt.observers.attach import Attachment, attach
from rpt.observers.staging import ObservationStage
from torch import Tensor, nn

DEFAULT_CADENCE = 4


class Block(nn.Module):
    """Pre-norm attention and feed-forward with explicit projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small causal language model; returns the loss."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.token(x) + self.place
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def now(device: torch.device) -> float:
    """Seconds: of this process on a CPU, of the clock on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def step_time(
    call: Callable[[Tensor, Tensor], Tensor],
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    stage: ObservationStage | None = None,
    attachment: Attachment | None = None,
) -> float:
    """Seconds of one forward + backward, and what an optimizer's step adds for observation."""
    model.zero_grad()
    start = now(data[0].device)
    call(*data).backward()
    if stage is not None and attachment is not None:
        stage.commit()
        attachment.after_step({})
    return now(data[0].device) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="timed steps per arm")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled arms out")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.width % 32 or arguments.layers < 1:
        parser.error("needs at least 2 steps, one layer, and a width divisible by 32")
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = (
        torch.randint(256, (8, 256), device=device),
        torch.randint(256, (8, 256), device=device),
    )

    def build() -> GPT:
        torch.manual_seed(0)
        return GPT(arguments.width, arguments.layers, arguments.width // 32, 256, 256).to(device)

    print(f"{'strategy':>10} {'every':>6} {'plain ms':>9} {'observed ms':>12} {'ratio':>7}")
    strategies = ["hook"] if arguments.no_compile else ["hook", "compiled"]
    for strategy in strategies:
        wrap: Callable[..., Callable[..., Tensor]] = (
            torch.compile if strategy == "compiled" else lambda model, **_: model
        )
        for every in (1, DEFAULT_CADENCE):
            torch._dynamo.reset()
            plain, observed, stage = build(), build(), ObservationStage()
            attachment = attach(
                observed, observed.parameters(), stage, strategy=strategy, observe_every=every
            )
            call_plain, call_observed = wrap(plain, fullgraph=True), wrap(observed, fullgraph=True)
            for _ in range(max(2, every)):
                # The observed model first: models of one class share compiled graphs, and a graph
                # traced without taps fits a tapped model as well.
                step_time(call_observed, observed, data, stage, attachment)
                step_time(call_plain, plain, data)
            base, with_taps = [], []
            # Whole periods, so that measured and unmeasured steps weigh as in training.
            for _ in range(-(-arguments.steps // every)):
                period = [
                    (
                        step_time(call_plain, plain, data),
                        step_time(call_observed, observed, data, stage, attachment),
                    )
                    for _ in range(every)
                ]
                base.append(sum(a for a, _ in period) / every)
                with_taps.append(sum(b for _, b in period) / every)
            ratio = statistics.median(b / a for a, b in zip(base, with_taps, strict=True))
            print(
                f"{strategy:>10} {every:>6} {1e3 * statistics.median(base):>9.1f} "
                f"{1e3 * statistics.median(with_taps):>12.1f} {ratio:>7.3f}",
                flush=True,
            )
            attachment.detach()


if __name__ == "__main__":
    main()
