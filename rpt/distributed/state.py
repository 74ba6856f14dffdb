"""Checkpoints: the state of owned parameters collected from their owners, and given back to them.

Under DDP every rank receives the whole state as plain tensors, as if it had kept it all along. Under
FSDP2 what has the parameter's shape comes back as a DTensor sharded like the parameter, other large
tensors (the metric) as DTensors sharded along their longest side, small ones as plain tensors. Both are
what `torch.distributed.checkpoint` saves once and reshards to any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..manifold import manifold_of
from ..store.schema import TRAVELLING, numbered
from .holding import box_slices, shard_box
from .team import Team

# Tensors of fewer entries stay whole on every rank.
SMALL = 1024


def whole_state(
    team: Team, state: Mapping[Tensor, Any], whole: MutableMapping[Tensor, Any]
) -> None:
    """Fill `whole` with the records of all the team's owned parameters. A collective."""
    for i, described in share_keys(team, state, range(len(team.parameters))).items():
        parameter, owner = team.parameters[i], team.plan.owner[i]
        record = {}
        for key, description in described.items():
            if isinstance(description, Tensor):
                value = _broadcast(team, owner, description, state.get(parameter, {}).get(key))
                description = _placed(team, i, value.to(parameter.device))
            record[key] = description
        whole[parameter] = record


def share_new_keys(team: Team, state: Mapping[Tensor, Any]) -> None:
    """After a step: `share_keys` of what took part for the first time, or first since a load."""
    new = [i for i in team.live if i not in team.announced]
    if new:  # on all ranks alike
        share_keys(team, state, new)
        team.announced.update(new)


def share_keys(
    team: Team, state: Mapping[Tensor, Any], indices: Iterable[int]
) -> dict[int, dict[str, Any]]:
    """Give every rank's records the keys that their owners' have; a collective.

    Tools that walk through `optimizer.state` (a flattened distributed checkpoint) must find the same
    keys on every rank. Where a rank does not own a parameter, tensors that only its owner needs are
    empty.

    Returns:
        By position in the team, for those that have a state, the owner's record with tensors on the meta
        device. Points on a manifold have no owner: every rank steps its own.
    """
    mine: dict[int, dict[str, Any]] = {}
    for i in indices:
        record = state.get(team.parameters[i])
        if record and team.owns(i) and manifold_of(team.parameters[i]) is None:
            mine[i] = {
                key: value.to("meta") if isinstance(value, Tensor) else value
                for key, value in numbered(record).items()
            }
    gathered: list[Any] = [None] * team.size
    dist.all_gather_object(gathered, mine, group=team.group)
    every = {i: described for part in gathered for i, described in part.items()}
    for i, described in every.items():
        parameter = team.parameters[i]
        record = state.get(parameter)
        if record is None or team.owns(i):
            continue
        for key in record.keys() - described.keys():
            del record[key]
        for key, value in described.items():
            empty = isinstance(value, Tensor)
            record.setdefault(key, _nothing(parameter, value.dtype) if empty else value)
    return dict(sorted(every.items()))


def _nothing(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands on other ranks for a tensor that only a parameter's owner needs."""
    return torch.empty(0, dtype=dtype, device=parameter.device)


def _broadcast(team: Team, owner: int, like: Tensor, value: Tensor | None) -> Tensor:
    """The owner's tensor on every rank, a fresh copy on its communication device."""
    if team.rank == owner:
        assert value is not None
        buffer = value.detach().to(team.device).clone(memory_format=torch.contiguous_format)
    else:
        buffer = torch.empty(like.shape, dtype=like.dtype, device=team.device)
    if like.numel():
        dist.broadcast(buffer, dist.get_global_rank(team.group, owner), group=team.group)
    return buffer


def _placed(team: Team, i: int, value: Tensor) -> Tensor:
    holding = team.members[i][1]
    if not holding.sharded or (value.numel() < SMALL and value.shape != holding.parameter.shape):
        return value
    from torch.distributed.tensor import DTensor, Replicate, Shard

    parameter: Any = holding.parameter
    mesh = parameter.device_mesh
    if value.shape == holding.parameter.shape:
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
    team.announced.clear()
    for i, parameter in enumerate(team.parameters):
        record = state.get(parameter)
        if not record or manifold_of(parameter) is not None:
            continue
        # Ranks may have read the keys in different orders, and must gather in one.
        for key in sorted(record):
            value = record[key]
            if isinstance(value, dict):
                # What a flattened checkpoint does not have comes as an empty dict.
                del record[key]
            if not isinstance(value, Tensor):
                continue
            if hasattr(value, "full_tensor"):
                record[key] = value = value.full_tensor()
            if not keep(i) and key not in TRAVELLING:
                record[key] = _nothing(parameter, value.dtype)
