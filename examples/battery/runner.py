"""Training one configuration, and many of them over processes."""

from __future__ import annotations

import math
import multiprocessing
import time
import traceback
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from .peers import PEERS
from .store import Config, Store
from .tasks import TASKS

__all__ = ["run_all", "train", "training"]

Record = dict[str, Any]


def train(config: Config, steps: int | None = None) -> Record:
    """Train one configuration and return its record.

    Seconds do not count building or measuring. "cpu" is this process's own CPU time (one thread);
    "cpu_step" is the optimizers' share of it. Both move with what else the machine does and from day
    to day, by up to a factor of two: what compares optimizers is measured in turns (`costs`).

    Args:
        config: what to run.
        steps: stop early (for tests); the schedule stays the task's.
    """
    run = training(config, steps)
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def training(config: Config, steps: int | None = None) -> Generator[float, None, Record]:
    """`train`, step by step: yields each step's CPU seconds, returns the record."""
    torch.set_num_threads(1)
    task, peer = TASKS[config.task], PEERS[config.optimizer]
    if config.share != 1.0:
        task = replace(task, steps=max(1, round(task.steps * config.share)))
    problem = task.build(config.seed)
    model = problem.model
    more = (config.rest,) if peer.rest else ()
    bundle = peer.make(model, config.rate, task.weight_decay, *more)
    curves: dict[str, list[float]] = {
        name: [] for name in ("step", "loss", "accuracy", "train", "wall", "cpu", "cpu_step")
    }
    wall = cpu = cpu_step = 0.0
    recent: list[torch.Tensor] = []

    def measure(step: int) -> bool:
        model.eval()
        with torch.no_grad(), bundle.evaluation():
            found = problem.measure(model)
        model.train()
        train_loss = torch.stack(recent).mean().item() if recent else math.nan
        recent.clear()
        row = (
            step,
            found["loss"],
            found.get("accuracy", math.nan),
            train_loss,
            wall,
            cpu,
            cpu_step,
        )
        for values, value in zip(curves.values(), row, strict=True):
            values.append(value)
        return math.isfinite(found["loss"]) and (not step or math.isfinite(train_loss))

    total = task.steps if steps is None else min(steps, task.steps)
    every = max(1, task.steps // task.evaluations)
    model.train()
    healthy = measure(0)
    for step in range(total):
        factor = task.factor(step)
        if not bundle.scheduled and step >= math.ceil(task.warm_up * task.steps):
            factor = 1.0
        bundle.set_factor(factor)
        batch = next(problem.batches)
        started, cpu_started = time.perf_counter(), time.process_time()
        bundle.zero_grad()
        loss = problem.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        ready = time.process_time()
        bundle.step()
        done = time.process_time()
        wall += time.perf_counter() - started
        cpu += done - cpu_started
        cpu_step += done - ready
        recent.append(loss.detach())
        yield done - cpu_started
        if (step + 1) % every == 0 or step + 1 == total:
            healthy = measure(step + 1)
            if not healthy:
                break
    return _record(config, curves, healthy, sum(p.numel() for p in model.parameters()))


def _record(
    config: Config, curves: dict[str, list[float]], healthy: bool, parameters: int
) -> Record:
    losses = curves["loss"]
    tail = losses[-TASKS[config.task].tail :]
    final = sum(tail) / len(tail) if healthy else math.inf
    finite = [x for x in losses if math.isfinite(x)]
    if all(math.isnan(a) for a in curves["accuracy"]):
        del curves["accuracy"]
    return {
        "key": config.key,
        "task": config.task,
        "optimizer": config.optimizer,
        "rate": config.rate,
        "seed": config.seed,
        "share": config.share,
        "rest": config.rest,
        "final": final,
        "best": min(finite, default=math.inf),
        "diverged": not healthy or not final <= losses[0],
        "parameters": parameters,
        "curves": {
            name: [int(v) if name == "step" else _short(v) for v in values]
            for name, values in curves.items()
        },
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _attempt(config: Config) -> Record:
    try:
        return train(config)
    except Exception:
        # A peer that fails on a task is a result too; it must not end the battery.
        return {
            "key": config.key, "task": config.task, "optimizer": config.optimizer,
            "rate": config.rate, "seed": config.seed, "share": config.share, "rest": config.rest,
            "final": math.inf, "best": math.inf, "diverged": True, "parameters": 0, "curves": {},
            "error": traceback.format_exc(limit=3),
        }  # fmt: skip


def run_all(configs: Iterable[Config], store: Store, jobs: int, label: str) -> None:
    """Run what the store lacks, over `jobs` processes of one thread each."""
    missing = [config for config in dict.fromkeys(configs) if config not in store]
    if not missing:
        return
    with tqdm(total=len(missing), desc=label, unit="run", dynamic_ncols=True) as bar:

        def finish(record: Record) -> None:
            store.add(record)
            bar.set_postfix_str(
                f"{record['task']} {record['optimizer']} {record['rate']:g} → {record['final']:.4g}"
            )
            bar.update()

        if jobs == 1:
            for config in missing:
                finish(_attempt(config))
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            for future in as_completed([pool.submit(_attempt, config) for config in missing]):
                finish(future.result())
