"""Shards: FSDP2 and tensor-parallel parameters, of which every rank holds a box (DTensor)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .holding import Box, Holding, box_shape, shard_box


def mesh_ranks(mesh: Any) -> tuple[int, ...]:
    """Global ranks of a device mesh, in its own order."""
    return tuple(mesh.mesh.flatten().tolist())


def mesh_group(mesh: Any) -> dist.ProcessGroup:
    """A process group of exactly the mesh's ranks. A collective where none exists yet."""
    ranks = mesh_ranks(mesh)
    if mesh.ndim == 1:
        return mesh.get_group()
    if sorted(ranks) == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    return mesh._flatten().get_group()


class Sharded(Holding):
    """A DTensor parameter.

    Args:
        parameter: placed by `Shard` and `Replicate`, in any combination, on a mesh of any dimension.
        ranks: global ranks of the team, in the order of its group.

    Raises:
        RuntimeError: a placement that is no box, or a local part that is not the box it should be.
    """

    sharded = True

    def __init__(self, parameter: DTensor, ranks: Sequence[int]) -> None:
        self.parameter: Tensor = parameter
        mesh, placements = parameter.device_mesh, parameter.placements
        grid = mesh.mesh
        where = {int(grid[tuple(c)]): tuple(c) for c in torch.ones_like(grid).nonzero().tolist()}
        try:
            self.boxes: list[Box] = [
                shard_box(parameter.shape, tuple(grid.shape), placements, where[rank])
                for rank in ranks
            ]
        except ValueError as error:
            shape = tuple(parameter.shape)
            raise RuntimeError(f"a DTensor parameter of shape {shape}: {error}") from error
        self._coordinates = [where[rank] for rank in ranks]
        held = tuple(self.local(parameter).shape)
        expected = box_shape(self.boxes[ranks.index(dist.get_rank())])
        if held != expected:
            raise RuntimeError(
                f"a DTensor parameter of shape {tuple(parameter.shape)} placed as {placements} holds "
                f"{held} here where {expected} was expected: RPT does not know this layout. Use plain "
                "Shard or Replicate placements, or ownership='replicated'"
            )

    @torch.no_grad()
    def local(self, tensor: Tensor) -> Tensor:
        assert isinstance(self.parameter, DTensor)
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.placements != self.parameter.placements:
            # A gradient that still is a pending sum (tensor parallelism): finish it.
            tensor = tensor.redistribute(placements=self.parameter.placements)
        return tensor.to_local()

    def source(self, box: Box, owner: int) -> int:
        """Of the ranks that hold the box, the one nearest to the owner on the mesh."""
        if self.boxes[owner] == box:
            return owner
        home = self._coordinates[owner]
        holders = [rank for rank, held in enumerate(self.boxes) if held == box]

        def apart(rank: int) -> int:
            return sum(a != b for a, b in zip(self._coordinates[rank], home, strict=True))

        return min(holders, key=lambda rank: (apart(rank), rank))
