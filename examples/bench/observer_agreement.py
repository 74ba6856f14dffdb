"""How far the strategies' entropy ranks are apart, scenario by scenario.

    python examples/bench/observer_agreement.py [--backend inductor]

The hook strategy run eagerly is compared with plain autograd (ranks from cotangents that
`torch.autograd.grad` hands out), and every other strategy with the hook strategy. Printed is the
largest deviation over the layers; a count of observations that differs is printed as such.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rpt.observers import entropy_rank
from rpt.observers.attach import attach
from rpt.observers.staging import ObservationStage
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Call = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two observed layers, one wider than the sketch, with an in-place activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(40, 72), nn.Linear(72, 40)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.relu(self.a(x)))


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def three_forwards(call: Call, x: Tensor) -> None:
    torch.stack([loss_of(call(x * (i + 1))) for i in range(3)]).sum().backward()


def accumulation(call: Call, x: Tensor) -> None:
    for i in range(3):
        loss_of(call(x * (i + 1))).backward()


def without_gradients(call: Call, x: Tensor) -> None:
    with torch.no_grad():
        call(x)
    with torch.inference_mode():
        call(x)
    loss_of(call(x)).backward()


def autocast(call: Call, x: Tensor) -> None:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = loss_of(call(x))
    loss.backward()


SCENARIOS: dict[str, Callable[[Call, Tensor], None]] = {
    "one backward, in-place activation": lambda call, x: loss_of(call(x)).backward(),
    "three forwards, one backward": three_forwards,
    "gradient accumulation": accumulation,
    "module used twice": lambda call, x: loss_of(call(call(x))).backward(),
    "no_grad and inference_mode first": without_gradients,
    "keyword-only call": lambda call, x: loss_of(call(x=x)).backward(),  # type: ignore[call-arg]
    "autocast bf16": autocast,
    "checkpoint, not reentrant": lambda call, x: loss_of(call(x)).backward(),
    "checkpoint, reentrant": lambda call, x: loss_of(call(x)).backward(),
}


def run(scenario: str, strategy: str, backend: str | None) -> list[tuple[float, int]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, stage = Net(), ObservationStage()
    attach(net, net.parameters(), stage, strategy=strategy)
    call: Call = net
    if scenario.startswith("checkpoint"):
        reentrant = not scenario.endswith("not reentrant")
        call = lambda x: checkpoint(net, x, use_reentrant=reentrant)  # noqa: E731
    if backend is not None:
        call = torch.compile(call, backend=backend, fullgraph=True)
    SCENARIOS[scenario](call, torch.randn(8, 64, 40, requires_grad=True))
    committed = stage.commit()
    return [(float(committed.ranks[w]), committed.counts[w]) for w in (net.a.weight, net.b.weight)]


def by_hand(scenario: str) -> list[tuple[float, int]] | None:
    """Ranks from plain autograd, where the scenario is a single plain backward."""
    if scenario != "one backward, in-place activation":
        return None
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(8, 64, 40, requires_grad=True)
    before = net.a(x)
    hidden = before.relu()
    after = net.b(hidden)
    first, second = torch.autograd.grad(loss_of(after), (before, after))
    return [(float(entropy_rank(x, first)), 1), (float(entropy_rank(hidden, second)), 1)]


def deviation(got: list[tuple[float, int]], expected: list[tuple[float, int]]) -> str:
    counts = [(a[1], b[1]) for a, b in zip(got, expected, strict=True) if a[1] != b[1]]
    if counts:
        return f"counts {counts}"
    return f"{max(abs(a[0] - b[0]) for a, b in zip(got, expected, strict=True)):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    backend = parser.parse_args().backend
    torch.set_num_threads(1)
    columns = ("compiled, run eagerly", f"compiled, {backend}", f"hook, {backend}")
    print(f"{'scenario':36}" + "".join(f"{name:>24}" for name in columns))
    for scenario in SCENARIOS:
        eager = run(scenario, "hook", None)
        plain = by_hand(scenario)
        if plain is not None:
            print(f"{'  hook strategy against autograd':36}{deviation(eager, plain):>24}")
        cells = [
            deviation(run(scenario, strategy, compiler), eager)
            for strategy, compiler in (("compiled", None), ("compiled", backend), ("hook", backend))
        ]
        print(f"{scenario:36}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
