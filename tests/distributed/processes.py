"""Run a function on several gloo processes, with a hard limit in seconds."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

available = hasattr(os, "fork") and dist.is_available() and dist.is_gloo_available()
needs_processes = pytest.mark.skipif(not available, reason="needs fork and gloo")


def run(function: Callable[..., Any], ranks: int, *args: Any, limit: float = 60.0) -> list[Any]:
    """`function(*args)` on every rank of a fresh process group; their results, by rank.

    Fails if any rank raises, or if all are not through within `limit` seconds (a deadlock).
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank,
            (ranks, folder, limit, function, args),
            nprocs=ranks,
            join=False,
            start_method="fork",
        )
        deadline = time.monotonic() + limit
        try:
            while not context.join(timeout=max(0.1, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    pytest.fail(f"{function.__name__} on {ranks} ranks took over {limit} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [
            torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(ranks)
        ]


def _rank(
    rank: int, ranks: int, folder: str, limit: float, function: Callable[..., Any], args: Any
) -> None:
    # A deadlock says where every rank stood.
    faulthandler.dump_traceback_later(0.8 * limit)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    try:
        torch.save(function(*args), Path(folder) / f"result{rank}")
    finally:
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()
