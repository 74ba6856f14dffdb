"""Operations, launches and bytes of a step, counted on a device that is not there (`pretend_device`).

Called by `examples.bench.scale`: `--flops`, `--launches`, `--paper`, `--mlp`. Nothing of the size of a model
is allocated. A step is counted at two ages: an ordinary one, and one in which all roots are made; the
second counts with one in `BETWEEN`, the mean age of grown-up roots.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

import rpt
from examples.peers import Float32Muon
from rpt import step as rpt_step
from rpt.rule import polar

from .peer_models import mlp
from .peer_optimizers import adamw, transport
from .pretend_device import Call, PretendDevice

__all__ = ["BETWEEN", "flops_table", "launch_table", "mlp_table", "paper_table"]

BETWEEN = 37.5  # mean number of steps between two refreshes of the default preset
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
Shape = tuple[int, ...]
Optimizers = list[torch.optim.Optimizer]
# From hidden matrices and everything else.
Arm = Callable[[list[nn.Parameter], list[nn.Parameter]], Optimizers]


class Counted(NamedTuple):
    """Calls of an ordinary step, and of one that makes all roots (the same without roots)."""

    ordinary: list[Call]
    renewing: list[Call]
    between: float = BETWEEN

    def mean(self, of: Callable[[Sequence[Call]], float]) -> float:
        """Per step, the refreshes spread out."""
        ordinary = of(self.ordinary)
        return ordinary + (of(self.renewing) - ordinary) / self.between


def transported(**options: object) -> Arm:
    return lambda hidden, rest: [rpt.ResidualPolarTransport([*hidden, *rest], **options)]  # type: ignore[arg-type]


def plus_adamw(kind: type[torch.optim.Optimizer]) -> Arm:
    def build(hidden: list[nn.Parameter], rest: list[nn.Parameter]) -> Optimizers:
        return [kind(hidden), *([torch.optim.AdamW(rest, foreach=True)] if rest else [])]  # type: ignore[call-arg]

    return build


def only_adamw(hidden: list[nn.Parameter], rest: list[nn.Parameter]) -> Optimizers:
    return [torch.optim.AdamW([*hidden, *rest], foreach=True)]


@contextlib.contextmanager
def as_on_a_cpu() -> Iterator[None]:
    """Count what a CPU computes: roots decomposed, symmetric products in blocks."""
    with (
        mock.patch.object(rpt_step, "_by_products", return_value=False),
        mock.patch.object(polar, "_blocks_pay", lambda size, _: size >= 256),
    ):
        yield


def count(
    arm: Arm, hidden: Sequence[Shape], rest: Sequence[Shape] = (), steps: int = 24
) -> Counted:
    """The calls of an arm's steps: of the one that issues the fewest and of the one with the most.

    Young roots are made in every second or third step, all of a stack at once; the first step, which
    makes state besides, does not count.
    """
    found: list[list[Call]] = []
    with PretendDevice(values=False) as device:
        both = [
            [nn.Parameter(torch.empty(s, device=device.device)) for s in part]
            for part in (hidden, rest)
        ]
        optimizers = arm(*both)
        for _ in range(steps):
            for p in both[0] + both[1]:
                p.grad = torch.empty(p.shape, device=device.device)
            device.clear()
            for optimizer in optimizers:
                optimizer.step()
            found.append(device.calls)
    ordered = sorted(found[1:], key=len)
    return Counted(ordered[0], ordered[-1])


def flops(calls: Sequence[Call]) -> float:
    return sum(call.flops for call in calls)


def soap_flops(rows: int, cols: int) -> float:
    """One step of SOAP with both sides (Vyas et al. 2024, algorithm 3), its bases renewed every 10 steps.

    Statistics G Gᵀ and GᵀG, gradient and momentum into the bases, the update out of them; per renewal and
    side the product A Q and a QR of it (4 m n² - 4/3 n³). pytorch_optimizer gives a
    side above 10,000 no basis.
    """
    pair = 2.0 * rows * cols * (rows + cols)
    return 4 * pair + (2 + 8 / 3) * (rows**3 + cols**3) / 10


def flops_table() -> None:
    arms = {
        "auto": transported(),
        "full": transported(roots="full"),
        "blocked": transported(roots="blocked"),
        "low rank": transported(roots="low_rank"),
    }
    names = [*arms, "auto, GPU", "SOAP", "AdamW"]
    print(
        "operations of a step per matrix, refreshes spread out, over those of Muon's five steps\n"
        '(AdamW: some 12 per entry; "auto, GPU" has roots by products, whole products, bfloat16)'
    )
    for name, long in (("n × n", 1), ("n × 4n", 4)):
        print(f"\n{name:>8}{'Muon, Gflop':>14}" + "".join(f"{n:>11}" for n in names))
        for width in WIDTHS:
            shape = (width, long * width)
            muon = flops(count(plus_adamw(Float32Muon), [shape], steps=3).ordinary)
            row = []
            with as_on_a_cpu():
                row += [count(arm, [shape]).mean(flops) for arm in arms.values()]
            low = transported(polar_dtype="bfloat16")
            row.append(count(low, [shape]).mean(flops))
            row += [soap_flops(*shape), 12.0 * shape[0] * shape[1]]
            cells = "".join(f"{cost / muon:11.3f}" for cost in row)
            print(f"{width:8}{muon / 1e9:14.2f}{cells}", flush=True)


def gpt(width: int, layers: int, vocabulary: int, context: int) -> tuple[list[Shape], list[Shape]]:
    """GPT-2's shapes, head tied: hidden matrices, and all the rest."""
    block: list[Shape] = [
        (3 * width, width),
        (width, width),
        (4 * width, width),
        (width, 4 * width),
    ]
    vectors: list[Shape] = [(3 * width,), (width,), (4 * width,), *[(width,)] * 5]
    ends: list[Shape] = [(vocabulary, width), (context, width), (width,), (width,)]
    return block * layers, ends + vectors * layers


MODELS = {
    "124 M (12 layers, width 768)": gpt(768, 12, 50_257, 1024),
    "1.3 B (24 layers, width 2048)": gpt(2048, 24, 50_257, 2048),
}
ARMS: dict[str, Arm] = {
    "RPT": transported(polar_dtype="bfloat16"),
    "RPT, no metric": transported(polar_dtype="bfloat16", roots="none"),
    "Muon (torch), AdamW": plus_adamw(torch.optim.Muon),
    "AdamW": only_adamw,
}


def counted_step(name: str, hidden: list[Shape], rest: list[Shape]) -> Counted:
    # Only RPT's steps differ from each other.
    return count(ARMS[name], hidden, rest, 24 if name.startswith("RPT") else 3)


def launch_table() -> None:
    print("calls that launch a kernel, per step (a `_foreach_` call counts as one)")
    for title, (hidden, rest) in MODELS.items():
        print(f"\n{title:32}{'ordinary':>10}{'all roots':>11}{'mean':>9}{'to Muon':>9}")
        counted = {name: counted_step(name, hidden, rest) for name in ARMS}
        muon = counted["Muon (torch), AdamW"].mean(len)
        for name, calls in counted.items():
            mean = calls.mean(len)
            print(
                f"{name:32}{len(calls.ordinary):10}{len(calls.renewing):11}{mean:9.0f}"
                f"{mean / muon:9.2f}"
            )


# One H200, dense: TF32 and bfloat16 on tensor cores, float32 on none.
PEAK = {"bfloat16": 989e12, "float32": 67e12, "tf32": 494e12}
SHARE, BANDWIDTH, LAUNCH = 0.4, 4.8e12, 4e-6


def seconds(calls: Sequence[Call], tf32: bool = False) -> tuple[float, float, float]:
    """(products, everything else, launches), each on its own.

    A call takes the longer of its operations at `SHARE` of the peak and its bytes at the bandwidth.
    """
    products = others = 0.0
    for call in calls:
        kind = str(call.dtype).removeprefix("torch.")
        peak = PEAK["tf32" if tf32 and kind == "float32" else kind] if call.flops else 1.0
        time_ = max(call.flops / (SHARE * peak), call.bytes / BANDWIDTH)
        if call.flops:
            products += time_
        else:
            others += time_
    return products, others, LAUNCH * len(calls)


def paper_table() -> None:
    print(
        "one H200 on paper, milliseconds a step: products at 40 % of 989 (bfloat16), 494 (TF32) and 67\n"
        "(float32) Tflop/s, everything else by its bytes at 4.8 TB/s, 4 µs a launch; a step takes the\n"
        "longer of work and launches. RPT's roots are products in float32 proper."
    )
    for title, (hidden, rest) in MODELS.items():
        columns = ("products", "the rest", "launches", "step")
        print(f"\n{title:32}" + "".join(f"{c:>10}" for c in columns))
        for name in ARMS:
            calls = counted_step(name, hidden, rest)
            for tf32 in (False, True) if name.startswith("RPT") else (False,):
                # Roots are kept out of TF32: what a refresh adds counts in float32.
                parts = []
                for k in range(3):
                    renewing = seconds(calls.renewing)[k] - seconds(calls.ordinary)[k]
                    parts.append(1e3 * (seconds(calls.ordinary, tf32)[k] + renewing / BETWEEN))
                step = max(parts[0] + parts[1], parts[2])
                label = name + (", TF32 allowed" if tf32 else "")
                print(f"{label:32}" + "".join(f"{x:10.2f}" for x in (*parts, step)))


# One CPU core: what a stack of small tensors costs in calls, and the rate of products.
CALLS, RATE = 0.7e-3, 70e9


def mlp_table(age: int = 40, rounds: int = 30) -> None:
    """The whole training step of an MLP 64-W-W-10 over AdamW's, in turns, CPU time."""
    from .peers import measure

    print(
        "training step over AdamW's, MLP 64-W-W-10\n"
        f"{'batch':>6}{'W':>6}{'AdamW ms':>10}{'RPT ms':>9}{'ratio':>7}{'predicted':>11}"
        f"{'operations over forward and backward':>38}"
    )
    for batch in (64, 512):
        for width in (64, 128, 256, 512):
            torch.manual_seed(0)
            workload = mlp("mlp", "", (64, width, width, 10), batch, torch.device("cpu"))
            arms = {"AdamW": adamw, "RPT": transport()}
            running = measure(workload, arms, age, rounds, time.process_time)
            theirs, ours = (statistics.mean(running[name].whole) for name in arms)
            matrices = [(width, 64), (width, width), (10, width)]
            with as_on_a_cpu():
                step = count(transported(), matrices).mean(flops)
            passes = 6.0 * batch * sum(r * c for r, c in matrices) - 2.0 * batch * 64 * width
            predicted = 1 + 1e3 * (CALLS + step / RATE) / theirs
            print(
                f"{batch:6}{width:6}{theirs:10.2f}{ours:9.2f}{ours / theirs:7.2f}{predicted:11.2f}"
                f"{step / passes:38.2f}",
                flush=True,
            )
