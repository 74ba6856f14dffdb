"""Time of one optimizer step and bytes of state, RPT beside its peers, on the demo's plain GPT.

    python examples/bench/step.py [--rounds 30] [--width 96] [--layers 3]

Every arm trains its own copy of the model on the same batches, one step each in turn, so that
whatever else the machine does slows all alike. The optimizer's step is timed alone; the whole
training step (forward, backward, step) beside it holds what observation adds to the backward pass.
Medians, and means too: RPT refreshes its roots every few steps, which a median does not show.
Muon gets the hidden matrices, AdamW the rest, as its authors do; "float32 Muon" is the same rule
without the cast to bfloat16, which is slow on CPUs.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import rpt
from rpt.demo.model import LanguageModel
from rpt.demo.text import VOCABULARY_SIZE

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers import Float32Muon

LR, BETAS = 2e-3, (0.9, 0.95)


Factory = Callable[[nn.Module], list[torch.optim.Optimizer]]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, foreach=True)]


def muon(kind: type[torch.optim.Optimizer]) -> Factory:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        hidden = [p for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]
        chosen = {id(p) for p in hidden}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        return [
            kind(hidden, lr=LR),  # type: ignore[call-arg]
            torch.optim.AdamW(rest, lr=LR, betas=BETAS, foreach=True),
        ]

    return build


def transport(observe: bool, **options: object) -> Factory:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        optimizer = rpt.ResidualPolarTransport(model.parameters(), lr=LR, **options)
        if observe:
            optimizer.attach_model(model)
        return [optimizer]

    return build


def arms() -> dict[str, Factory]:
    found: dict[str, Factory] = {"AdamW": adamw}
    if hasattr(torch.optim, "Muon"):
        found["torch Muon"] = muon(torch.optim.Muon)
    found["float32 Muon"] = muon(Float32Muon)
    found["RPT"] = transport(observe=False)
    found["RPT, sites observed"] = transport(observe=True)
    found["RPT, paper preset"] = transport(observe=True, preset="paper")
    return found


def state_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    values = (v for o in optimizers for state in o.state.values() for v in state.values())
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="timed steps per arm (30)")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=64)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY_SIZE, options.context, options.width, options.layers)
    models = {name: copy.deepcopy(model) for name in arms()}
    optimizers = {name: factory(models[name]) for name, factory in arms().items()}
    steps: dict[str, list[float]] = {name: [] for name in models}
    totals: dict[str, list[float]] = {name: [] for name in models}
    warm_up = 5
    for round_ in range(warm_up + options.rounds):
        codes = torch.randint(VOCABULARY_SIZE, (options.batch, options.context + 1))
        for name in models:
            started = time.perf_counter()
            models[name].zero_grad()
            models[name].loss(codes[:, :-1], codes[:, 1:]).backward()
            ready = time.perf_counter()
            for optimizer in optimizers[name]:
                optimizer.step()
            done = time.perf_counter()
            if round_ >= warm_up:
                steps[name].append(1000 * (done - ready))
                totals[name].append(1000 * (done - started))

    count = sum(p.numel() for p in model.parameters())
    base = statistics.median(steps["AdamW"]), statistics.median(totals["AdamW"])
    print(f"plain GPT, {count:,} parameters, {options.rounds} rounds, one thread, milliseconds\n")
    print(
        f"{'':20}  step median   mean  /AdamW   training step median   mean  /AdamW"
        "   state bytes per parameter"
    )
    for name in models:
        median, total = statistics.median(steps[name]), statistics.median(totals[name])
        print(
            f"{name:20}  {median:11.1f}  {statistics.mean(steps[name]):5.1f}  {median / base[0]:6.1f}"
            f"   {total:20.1f}  {statistics.mean(totals[name]):5.1f}  {total / base[1]:6.2f}"
            f"   {state_bytes(optimizers[name]) / count:25.1f}"
        )


if __name__ == "__main__":
    main()
