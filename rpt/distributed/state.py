"""Checkpoints: the state of owned parameters collected from their owners, and given back to them.

Under DDP every rank receives the whole state as plain tensors, as if it had kept it all along. Under
FSDP2 what has the parameter's shape comes back as a DTensor sharded like the parameter, other large
tensors (the metric) as DTensors sharded along their longest side, small ones as plain tensors. Both are
what `torch.distributed.checkpoint` saves once and reshards to any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .holding import box_slices, shard_box

if TYPE_CHECKING:
    from .team import Team

__all__ = ["adopt_state", "whole_state"]

# Tensors of fewer entries stay whole on every rank.
SMALL = 1024


def whole_state(
    team: Team, state: Mapping[Tensor, Any], whole: MutableMapping[Tensor, Any]
) -> None:
    """Fill `whole` with the records of all the team's parameters. A collective."""
    mine: dict[int, list[tuple[str, Any]]] = {}
    for i, parameter in enumerate(team.parameters):
        record = state.get(parameter)
        if record and team.owns(i):
            mine[i] = [(key, _described(value)) for key, value in record.items()]
    gathered: list[Any] = [None] * team.size
    dist.all_gather_object(gathered, mine, group=team.group)
    for i, parameter in enumerate(team.parameters):
        owner = team.plan.owner[i]
        if i not in gathered[owner]:
            continue
        record = {}
        for key, description in gathered[owner][i]:
            if not isinstance(description, _Shape):
                record[key] = description
                continue
            value = _broadcast(team, owner, description, state.get(parameter, {}).get(key))
            record[key] = _placed(team, i, value.to(parameter.device))
        whole[parameter] = record


class _Shape:
    """Shape and dtype of a tensor, as sent to ranks that have to receive it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def _described(value: Any) -> Any:
    return _Shape(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _broadcast(team: Team, owner: int, shape: _Shape, value: Tensor | None) -> Tensor:
    """The owner's tensor on every rank, a fresh copy on its communication device."""
    if team.rank == owner:
        assert value is not None
        buffer = value.detach().to(team.device).clone(memory_format=torch.contiguous_format)
    else:
        buffer = torch.empty(shape.shape, dtype=shape.dtype, device=team.device)
    if math.prod(shape.shape):
        dist.broadcast(buffer, dist.get_global_rank(team.group, owner), group=team.group)
    return buffer


def _placed(team: Team, i: int, value: Tensor) -> Tensor:
    holding = team.members[i][1]
    if not holding.sharded or (value.numel() < SMALL and value.shape != holding.global_shape()):
        return value
    from torch.distributed.tensor import DTensor, Replicate, Shard

    parameter: Any = holding.parameter
    mesh = parameter.device_mesh
    if value.shape == holding.global_shape():
        placements = tuple(parameter.placements)
        box = holding.boxes[team.rank]
    else:
        # Along the last mesh dimension: the one within which shards lie (the first replicates).
        longest = max(range(value.ndim), key=lambda dim: value.shape[dim])
        placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(longest))
        box = shard_box(value.shape, tuple(mesh.mesh.shape), placements, mesh.get_coordinate())
    # A copy of its own: the whole tensor can go.
    local = value[box_slices(box)].clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def adopt_state(team: Team, state: Mapping[Tensor, Any], keep: Callable[[int], bool]) -> None:
    """Turn loaded records into this rank's own: whole plain tensors where it owns, else counters.

    A collective where records hold DTensors.
    """
    from .team import SCALARS

    for i, parameter in enumerate(team.parameters):
        record = state.get(parameter)
        if not record:
            continue
        for key, value in list(record.items()):
            if not isinstance(value, Tensor):
                continue
            if hasattr(value, "full_tensor"):
                record[key] = value = value.full_tensor()
            if not keep(i) and key not in SCALARS:
                del record[key]
