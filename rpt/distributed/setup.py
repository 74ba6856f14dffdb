"""From an optimizer's parameters to teams of ranks and a plan for each."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..manifold import manifold_of
from ..ownership import Ownership, is_sharded
from ..store.cost import CostModel
from ..store.layout import compute_dtype, form_of, vector_length_class
from ..store.schema import holds_state
from .agreement import all_agree, checksums, differing, rendezvous, signature
from .holding import Holding
from .plan import Item, make_plan
from .ranks import OwnerRanks, ReplicatedRanks
from .team import Team
from .wire import communication_device

_STEP_REMEDY = (
    "Every rank that holds the parameters must take the step. If only some ranks train, or each trains "
    "a model of its own, build the optimizer with ownership='local'"
)


def distribute(mode: str, optimizer: Any, previous: Ownership | None = None) -> Ownership:
    """The ownership object for a mode; a collective.

    Args:
        mode: "auto", "owner", "replicated" or "local".
        optimizer: whose parameters are to be shared.
        previous: earlier owners, kept.

    Raises:
        RuntimeError: ranks that disagree about the parameters; parameters of FSDP1; a sharded
            parameter with "local"; points of a manifold cut apart; a rank that never comes.

    Example:
        >>> import torch, torch.distributed as dist, rpt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.ones(4, 3))
        >>> type(rpt.distributed.distribute("auto", rpt.RPT([weight]))).__name__
        'OwnerRanks'
        >>> dist.destroy_process_group()
    """
    groups = [group["params"] for group in optimizer.param_groups]
    every = [(g, p) for g, group in enumerate(groups) for p in group]
    plain = [(g, p) for g, p in every if not is_sharded(p)]
    shards = [(g, p) for g, p in every if is_sharded(p)]
    if shards and mode == "local":
        raise RuntimeError(
            "ownership='local' cannot update sharded parameters (DTensor): a shard of a matrix has no "
            "polar factor of its own. Leave ownership out"
        )
    for _, parameter in plain:
        _refuse_flat_shard(parameter)
    for g, parameter in shards:
        _refuse_shard(parameter, g, optimizer)
    if mode == "auto" and not shards and _held_by_zero(optimizer):
        return Ownership()
    number = _next_number()
    if plain and dist.get_world_size() > 1:
        world = dist.group.WORLD
        assert world is not None
        rendezvous(f"step()#{number}", _STEP_REMEDY, world)
        if not _same_parameters(mode, groups, [p for _, p in plain], world):
            if not shards:
                return Ownership()
            raise RuntimeError(
                "some parameters are sharded (DTensor) and the others differ between ranks: shard or "
                "broadcast them, or give them to an optimizer of their own with ownership='local'"
            )
    owners = previous.owners if isinstance(previous, OwnerRanks) else {}
    teams = []
    for members, group in _teams(plain, shards):
        if not all_agree(signature([[h.parameter for _, h in members]]), group):
            raise RuntimeError(
                "ranks that share parameters have them in different orders, shapes or placements: "
                "build the model and the parameter groups alike on all of them"
            )
        teams.append(_team(members, group, optimizer, owners))
    return (ReplicatedRanks if mode == "replicated" else OwnerRanks)(teams, optimizer, number)


def _held_by_zero(optimizer: Optimizer) -> bool:
    """Whether it is the local part of a `ZeroRedundancyOptimizer`: each rank then has its own parameters."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None:
        return False
    # That class marks neither parameters nor the optimizer it builds. Once, and where it is loaded only.
    return any(
        issubclass(type(thing), module.ZeroRedundancyOptimizer)
        and getattr(thing, "optim", None) is optimizer
        for thing in gc.get_objects()
    )


_built = 0


def _next_number() -> int:
    """Counts on every rank alike, as long as all build their optimizers in the same order."""
    global _built
    _built += 1
    return _built


def _same_parameters(
    mode: str, groups: Sequence[Sequence[Tensor]], plain: Sequence[Tensor], group: Any
) -> bool:
    """Whether all ranks hold the same plain parameters, with the same values."""
    device = communication_device(group, plain[0].device)
    if not all_agree(signature(groups), group):
        problem = "ranks have different parameters (shapes, dtypes or groups)"
    else:
        different = differing(checksums(plain, device), group)
        if not different:
            return True
        shown = ", ".join(f"{i} {tuple(plain[i].shape)}" for i in different[:3])
        problem = f"{len(different)} parameters have different values on different ranks ({shown})"
    if mode == "auto":
        warnings.warn(
            f"{problem}: every rank updates its own, on its own. If they are replicas, wrap the model "
            "in DistributedDataParallel or broadcast it before the first step; if each rank trains a "
            "model of its own, pass ownership='local' to say so",
            stacklevel=5,
        )
        return False
    raise RuntimeError(
        f"ownership={mode!r}: {problem}. Broadcast the model from one rank before the first step "
        "(DistributedDataParallel does)"
    )


def _teams(
    plain: Sequence[tuple[int, Tensor]], shards: Sequence[tuple[int, Tensor]]
) -> list[tuple[list[tuple[int, Holding]], Any]]:
    """(members, process group) of every set of ranks, in the same order on all of them."""
    teams: list[tuple[list[tuple[int, Holding]], Any]] = []
    if plain:
        size = dist.get_world_size()
        teams.append(([(g, Holding(p, size)) for g, p in plain], dist.group.WORLD))
    if shards:
        from .dtensor import Sharded, mesh_group, mesh_ranks

        by_ranks: dict[tuple[int, ...], list[tuple[int, Any]]] = {}
        for g, parameter in shards:
            key = tuple(sorted(mesh_ranks(parameter.device_mesh)))  # type: ignore[attr-defined]
            by_ranks.setdefault(key, []).append((g, parameter))
        for members in by_ranks.values():
            group = mesh_group(members[0][1].device_mesh)
            ranks = dist.get_process_group_ranks(group)
            teams.append(([(g, Sharded(p, ranks)) for g, p in members], group))
    return teams


def _team(
    members: list[tuple[int, Holding]], group: Any, optimizer: Any, owners: dict[int, int]
) -> Team:
    items = [_planned_item(holding.parameter, g, optimizer) for g, holding in members]
    settled = {
        i: owners[id(h.parameter)] for i, (_, h) in enumerate(members) if id(h.parameter) in owners
    }
    plan = make_plan(items, dist.get_world_size(group), settled=settled)
    return Team(members, plan, group, optimizer)


def _planned_item(parameter: Tensor, g: int, optimizer: Any) -> Item:
    """A parameter as the planner sees it."""
    options, costs = optimizer.param_groups[g], CostModel()
    dtype, form = compute_dtype(parameter), form_of(parameter, options)
    nbytes = parameter.numel() * dtype.itemsize
    shape = (form.rows, form.cols)
    if not parameter.numel() or manifold_of(parameter) is not None:
        # Nothing to do, or nothing that an owner does.
        return Item(0.0, 0, (g, dtype, shape))
    if not form.matrix:
        key = (g, dtype, vector_length_class(form.cols))
        return Item(costs.vector(parameter.numel()), nbytes, key, together=True)
    metric = optimizer._groups.backend(options["roots"])
    steps = options["polar_steps"] if options["polar_prior"] > 0 else 0
    cost = form.pieces * costs.matrix(*shape, metric, steps)
    if not parameter.requires_grad:
        # Frozen: no work unless it is thawed later.
        cost *= 1e-3
    return Item(cost, nbytes, (g, dtype, min(shape), max(shape)))


def report(optimizer: Any) -> dict[str, Any]:
    """What this rank has and does: plain numbers, for printing.

    Returns:
        parameters and state_bytes owned here, wire_bytes sent per step, and per team the planned
        balance (largest rank's work over the mean) and number of ranks.

    Example:
        >>> import torch, rpt
        >>> found = rpt.distributed.report(rpt.RPT([torch.nn.Parameter(torch.ones(4, 3))]))
        >>> found["mode"], found["wire_bytes"]  # one process, before its first step
        ('Ownership', 0)
    """
    ranks = optimizer._ranks()
    held = [value for record in optimizer.state.values() for value in record.values()]
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    out: dict[str, Any] = {
        "mode": type(ranks).__name__,
        "parameters": sum(holds_state(record) for record in optimizer.state.values()),
        "state_bytes": sum(t.numel() * t.element_size() for t in tensors),
        "wire_bytes": 0,
        "teams": [],
    }
    if isinstance(ranks, OwnerRanks):
        out["wire_bytes"] = sum(team.wire_bytes for team in ranks.teams)
        out["teams"] = [
            {"ranks": team.size, "balance": team.plan.balance, "parameters": len(team.members)}
            for team in ranks.teams
        ]
    return out


def _refuse_shard(parameter: Any, g: int, optimizer: Any) -> None:
    """Refuse a DTensor that is cut where a rank needs it whole."""
    if optimizer.param_groups[g]["stacked"] and parameter.ndim > 2:
        raise RuntimeError(
            f"parameter group {g}: stacked=True cannot be used with sharded parameters (DTensor), as "
            f"one of shape {tuple(parameter.shape)} is: replicate them, or leave stacked out"
        )
    cut = [getattr(placement, "dim", None) for placement in parameter.placements]
    if manifold_of(parameter) is not None and (parameter.ndim - 1 in cut or -1 in cut):
        raise RuntimeError(
            f"{optimizer._name(parameter)} lives on a manifold and is sharded along its coordinates: "
            "shard it along another dimension, so that every rank holds whole points"
        )


def _refuse_flat_shard(parameter: Tensor) -> None:
    """Refuse a parameter of FSDP1, which looks like a plain tensor and is a piece of a flat one."""
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        raise RuntimeError(
            f"a parameter of local shape {tuple(parameter.shape)} belongs to FSDP1 "
            "(FullyShardedDataParallel), whose flat shards have lost the matrices that RPT works on. "
            "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
