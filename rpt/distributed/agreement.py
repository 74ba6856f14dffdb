"""What ranks ask each other: is everyone here, do all hold the same, and who can take this step?"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rpt.observers.staging import Committed

from ..apply import largest_entries
from .wire import communication_device

PATIENCE = timedelta(minutes=10)
WARN_AFTER = timedelta(seconds=30)


def rendezvous(name: str, remedy: str, group: dist.ProcessGroup) -> None:
    """Wait until every rank of `group` has come to the point called `name`.

    A collective that some rank never calls hangs; this says which ranks are missing and what to do.

    Raises:
        RuntimeError: after `PATIENCE`, naming the missing ranks and the remedy.
    """
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(group)
    keys = {rank: f"rpt/{name}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], "here")

    first = min(WARN_AFTER, PATIENCE)
    for limit, last in ((first, False), (PATIENCE - first, True)):
        try:
            store.wait(list(keys.values()), max(limit, timedelta(milliseconds=1)))
            return
        except (RuntimeError, dist.DistStoreError):
            absent = [rank for rank, key in keys.items() if not store.check([key])]
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


class Findings(NamedTuple):
    """What all ranks together found; the same on every rank.

    Attributes:
        present: per parameter whether any rank has a gradient.
        missing: per parameter whether any rank has none.
        peaks: per parameter the largest absolute entry of any rank's gradient; inf where one is not
            finite.
        lows: likewise the smallest of the ranks' largest entries; inf where no rank has a gradient.
            Replicas whose gradients were averaged have the same.
        observed: mean of all ranks' observations, weighted by their number.
        refusals: ranks that cannot take this step (an error of their own).
    """

    present: list[bool]
    missing: list[bool]
    peaks: list[float]
    lows: list[float]
    observed: Committed
    refusals: list[int]


def exchange_findings(
    parameters: Sequence[Tensor],
    gradients: Mapping[int, Tensor],
    observed: Committed,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    refuses: bool = False,
) -> Findings:
    """Combine every rank's findings: one all-reduce, and a second one if anything was observed.

    Args:
        parameters: the same on every rank, in the same order.
        gradients: by id of the parameter, this rank's local parts.
        observed: this rank's observations.
        group: the ranks.
        device: where the collective's buffer lives.
        refuses: this rank raises an error and only tells the others.
    """
    count, size = len(parameters), dist.get_world_size(group)
    index = {id(p): i for i, p in enumerate(parameters)}
    here = [index[key] for key in gradients]
    seen = {index[id(p)]: r for p, r in observed.ranks.items() if id(p) in index}
    if observed.global_rank is not None:
        seen[count] = observed.global_rank
    # Rows: a gradient here, none here, largest entry, the same negated, an observation.
    rows = torch.zeros(5, count + 1, dtype=torch.float64)
    rows[1], rows[3] = 1.0, -torch.inf
    rows[0, here], rows[1, here] = 1.0, 0.0
    rows[4, list(seen)] = 1.0
    # Behind them a flag per rank.
    flags = torch.zeros(size, dtype=torch.float64)
    flags[dist.get_rank(group)] = float(refuses)
    vector = torch.cat([rows.flatten(), flags]).to(device)
    rows = vector[: rows.numel()].view_as(rows)
    filled = [key for key, gradient in gradients.items() if gradient.numel()]
    if filled:
        # The maximum of NaN and a number is not the same in every backend; that of infinity is.
        largest = largest_entries([gradients[key] for key in filled]).to(rows)
        largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
        where = torch.tensor([index[key] for key in filled], device=device)
        rows[2, where], rows[3, where] = largest, -largest
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    # The host decides which parameters take part: the one synchronisation of a step's beginning.
    numbers = vector.tolist()
    present, missing, peaks, lows, anywhere = (
        numbers[k * (count + 1) : (k + 1) * (count + 1)] for k in range(5)
    )
    return Findings(
        present=[flag > 0 for flag in present[:count]],
        missing=[flag > 0 for flag in missing[:count]],
        peaks=peaks[:count],
        lows=[-low for low in lows[:count]],
        observed=_mean_ranks(
            parameters,
            seen,
            observed,
            [i for i, flag in enumerate(anywhere) if flag],
            group,
            device,
        ),
        refusals=[rank for rank, flag in enumerate(numbers[-size:]) if flag > 0],
    )


def _mean_ranks(
    parameters: Sequence[Tensor],
    seen: Mapping[int, Tensor],
    observed: Committed,
    anywhere: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Committed:
    """Mean of all observations of all ranks, for the positions observed `anywhere`."""
    if not anywhere:
        return Committed({}, None, {})
    sums = torch.zeros(2, len(anywhere), dtype=torch.float64)
    for column, i in enumerate(anywhere):
        if i in seen:
            own = i < len(parameters)
            sums[1, column] = observed.counts.get(parameters[i], 1) if own else 1
    sums = sums.to(device)
    columns = [column for column, i in enumerate(anywhere) if i in seen]
    if columns:
        values = torch.stack([seen[anywhere[column]].to(sums) for column in columns])
        sums[0, columns] = values * sums[1, columns]
    dist.all_reduce(sums, group=group)
    means = sums[0] / sums[1]
    named = [(column, i) for column, i in enumerate(anywhere) if i < len(parameters)]
    return Committed(
        ranks={parameters[i]: means[column] for column, i in named},
        global_rank=means[-1] if anywhere[-1] == len(parameters) else None,
        # That there was one is all that a cadence needs; how many would cost the host a wait.
        counts={parameters[i]: 1 for _, i in named},
    )
