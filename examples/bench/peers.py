"""Time of one optimizer step, RPT beside its peers: six networks and two lists of matrices.

    python -m examples.bench.peers [--models matrices256 gpt256 ...] [--threads 1] [--device cuda] [--compile]

All arms run in one process and take turns: each trains its own copy of the model on the same batches
(on the two lists of matrices, which have no forward pass, on the same synthetic gradients), so that
whatever else the machine does slows all alike. The clock of the optimizer's step is CPU time of the
process with one thread, which other processes do not distort, and wall time with more or on a GPU.

Medians show the ordinary step. Means and the worst step are printed too, because RPT refreshes its
roots, and SOAP and Shampoo theirs, every so many steps. `--age` puts off the timing until the optimizers
are that many steps old: RPT's roots are refreshed often while they are young. `--compile` adds AdamW and RPT
with `step()` in a function that torch.compile takes.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from tqdm import tqdm

from .peer_models import MODELS, Workload
from .peer_optimizers import ARMS, Factory, state_bytes

# Compiles and tunes every shape at first, for minutes: only where asked for.
SLOW = ("heavyball SOAP",)
COMPILED = ", compiled"
REFERENCES = ("AdamW", "float32 Muon", "SOAP")


def clock_of(device: torch.device, threads: int) -> Callable[[], float]:
    if device.type == "cuda":

        def synchronised() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return synchronised
    return time.process_time if threads == 1 else time.perf_counter


class Arm:
    """One optimizer on its own copy of a model, with the times of its steps in milliseconds."""

    def __init__(self, model: nn.Module, factory: Factory, compiled: bool) -> None:
        self.model = copy.deepcopy(model)
        self.optimizers = factory(self.model)
        self.steps = [optimizer.step for optimizer in self.optimizers]
        if compiled:
            self.steps = [torch.compile(step) for step in self.steps]
        self.step: list[float] = []
        self.whole: list[float] = []

    def turn(self, gradients: Callable[[nn.Module], None], clock: Callable[[], float]) -> None:
        started = clock()
        gradients(self.model)
        ready = clock()
        for step in self.steps:
            step()
        done = clock()
        self.step.append(1000 * (done - ready))
        self.whole.append(1000 * (done - started))


def measure(
    workload: Workload, arms: dict[str, Factory], age: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Arm]:
    running = {
        name: Arm(workload.model, factory, name.endswith(COMPILED))
        for name, factory in arms.items()
    }
    for round_ in tqdm(range(age + rounds), desc=workload.name, leave=False):
        gradients = workload.batch(round_)
        for arm in running.values():
            arm.turn(gradients, clock)
    for arm in running.values():
        del arm.step[:age], arm.whole[:age]
    return running


def table(workload: Workload, running: dict[str, Arm]) -> list[dict[str, float | str]]:
    count = sum(p.numel() for p in workload.model.parameters())
    medians = {name: statistics.median(arm.step) for name, arm in running.items()}
    whole = {name: statistics.median(arm.whole) for name, arm in running.items()}
    references = [name for name in REFERENCES if name in running]
    print(f"\n{workload.title} ({count:,} parameters in {workload.tensors} tensors)")
    print(
        f"{'':22}{'step ms':>9}{'mean':>9}{'worst':>9}"
        + "".join(f"{'/' + name:>14}" for name in references)
        + (f"{'training step /AdamW':>22}" if workload.trains else "")
        + f"{'bytes/parameter':>17}"
    )
    rows = []
    for name, arm in running.items():
        mean = statistics.mean(arm.step)
        ratios = {r: mean / statistics.mean(running[r].step) for r in references}
        row: dict[str, float | str] = {
            "model": workload.name,
            "arm": name,
            "median": medians[name],
            "mean": mean,
            "worst": max(arm.step),
            "bytes": state_bytes(arm.optimizers) / count,
        } | {f"mean/{r}": ratio for r, ratio in ratios.items()}
        line = f"{name:22}{medians[name]:9.2f}{mean:9.2f}{max(arm.step):9.2f}"
        line += "".join(f"{ratio:14.2f}" for ratio in ratios.values())
        if workload.trains:
            row["training step"] = whole[name]
            if "AdamW" in running:
                mean_whole = statistics.mean(arm.whole) / statistics.mean(running["AdamW"].whole)
                row["training step/AdamW"] = mean_whole
                line += f"{mean_whole:22.3f}"
        print(line + f"{row['bytes']:17.1f}")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=[name for name in ARMS if name not in SLOW]
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed steps per arm (20)")
    parser.add_argument("--age", type=int, default=5, help="steps before the timing begins (5)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="also compiled steps")
    parser.add_argument("--out", help="append one JSON line per arm and model to this file")
    options = parser.parse_args()
    if options.rounds < 1 or options.age < 0 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1, --age at least 0")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    clock = clock_of(device, options.threads)
    arms = {name: ARMS[name] for name in options.arms}
    if options.compile:
        arms |= {name + COMPILED: ARMS[name] for name in ("AdamW", "RPT")}
    print(
        f"torch {torch.__version__}, {device}, {options.threads} thread(s), ratios of means over "
        f"{options.rounds} steps from step {options.age}"
    )
    for name in options.models:
        torch.manual_seed(0)
        workload = MODELS[name](device)
        rows = table(workload, measure(workload, arms, options.age, options.rounds, clock))
        if options.out:
            with open(options.out, "a") as file:
                for row in rows:
                    row |= {"threads": options.threads, "age": options.age}
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
