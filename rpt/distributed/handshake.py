"""Are all ranks here, and do they hold the same parameters? Asked before the first collective."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import communication_device

__all__ = ["all_agree", "checksums", "differing", "rendezvous", "signature"]

PATIENCE = timedelta(minutes=10)
WARN_AFTER = timedelta(seconds=30)


def rendezvous(
    name: str,
    remedy: str,
    group: dist.ProcessGroup,
) -> None:
    """Wait until every rank of `group` has come to the point called `name`.

    A collective that some rank never calls hangs; this says which ranks are missing and what to do.

    Raises:
        RuntimeError: after `PATIENCE`, naming the missing ranks and the remedy.
    """
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(group)
    keys = {rank: f"rpt/{name}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], "here")

    def missing() -> list[int]:
        return [rank for rank, key in keys.items() if not store.check([key])]

    first = min(WARN_AFTER, PATIENCE)
    for limit, last in ((first, False), (PATIENCE - first, True)):
        try:
            store.wait(list(keys.values()), max(limit, timedelta(milliseconds=1)))
            return
        except (RuntimeError, dist.DistStoreError):
            absent = missing()
            if not absent:
                return
            message = f"rank(s) {absent} have not called {name.split('#')[0]}. {remedy}"
            if last:
                raise RuntimeError(message) from None
            warnings.warn(f"still waiting: {message}", stacklevel=4)


def signature(groups: Sequence[Sequence[Tensor]]) -> int:
    """A number that differs where parameter groups, shapes, dtypes or placements differ."""
    text = repr(
        [
            [(tuple(p.shape), str(p.dtype), repr(getattr(p, "placements", None))) for p in group]
            for group in groups
        ]
    )
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def checksums(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """One exact integer per parameter, the sum of its bits: the same whatever the order of addition."""
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    sums = [
        p.detach()
        .contiguous()
        .reshape(-1)
        .view(whole[min(p.element_size(), 8)])
        .sum(dtype=torch.int64)
        for p in parameters
    ]
    return torch.stack([s.to(device) for s in sums]) if sums else torch.zeros(0, device=device)


def all_agree(value: int, group: dist.ProcessGroup) -> bool:
    """Whether every rank of the group brought the same number."""
    device = communication_device(group, torch.device("cpu"))
    return not differing(torch.tensor([value], dtype=torch.int64, device=device), group)


def differing(values: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Positions at which int64 `values` are not the same on every rank; the same list everywhere."""
    # max(-x) = -min(x): one collective asks for both ends. -x wraps at the lowest integer alone.
    ends = torch.cat([values, -values])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    high, low = ends.chunk(2)
    # A host read: ranks compare before they share work or save, not in every step.
    return torch.nonzero(high != -low).flatten().tolist()
