"""How one parameter lies on the ranks of a team: boxes, worked out from placements without communication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

# (start, stop) along every dimension.
Box = tuple[tuple[int, int], ...]


def whole_box(shape: Sequence[int]) -> Box:
    """The box that covers a tensor of this shape."""
    return tuple((0, length) for length in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def box_numel(box: Box) -> int:
    return math.prod(box_shape(box))


def box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def shard_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Any],
    coordinate: Sequence[int],
) -> Box:
    """What the rank at `coordinate` of a device mesh holds of a tensor.

    Args:
        shape: the whole tensor's.
        mesh_shape: ranks along every mesh dimension.
        placements: one per mesh dimension: `Replicate`, `Shard(dim)`, or the strided shard that FSDP2
            over tensor parallelism leaves, in which the later mesh dimension split first.
        coordinate: the rank's position on the mesh.

    Returns:
        Its box; an empty one where the rank got no rows. Splits are those of `torch.chunk`.

    Raises:
        ValueError: a placement that is no contiguous box (a pending sum, for example).
    """
    box = list(whole_box(shape))
    for mesh_dim in _order(placements):
        placement = placements[mesh_dim]
        if placement.is_replicate():
            continue
        # A strided shard is no subclass of `Shard` in every torch: both carry `dim`.
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            raise ValueError(
                f"the placement {placement} is no piece of the tensor: redistribute it to "
                "Shard or Replicate first"
            )
        dim = dim % len(box)
        start, stop = box[dim]
        # torch.chunk: pieces of ceil(length / ranks), the last ones shorter or empty.
        piece = -(-(stop - start) // mesh_shape[mesh_dim])
        low = min(start + piece * coordinate[mesh_dim], stop)
        box[dim] = (low, min(low + piece, stop))
    return tuple(box)


def _order(placements: Sequence[Any]) -> Iterator[int]:
    """Mesh dimensions in the order in which they split: strided ones after those to their right."""
    strided = [i for i, p in enumerate(placements) if hasattr(p, "split_factor")]
    yield from (i for i in range(len(placements)) if i not in strided)
    yield from reversed(strided)


class Holding:
    """How one parameter lies on the ranks of a team; here a plain one, the same on `size` ranks.

    Attributes:
        parameter: as the optimizer knows it.
        boxes: what every rank of the team holds of it.
        sharded: whether a rank holds less than the whole. Then gradients travel to the owner and the
            update's pieces travel back; else the owner's gradient is already whole, and what travels
            is the parameter's new value, which leaves replicas equal bit for bit by construction.
    """

    sharded = False

    def __init__(self, parameter: Tensor, size: int) -> None:
        self.parameter = parameter
        self.boxes: list[Box] = [whole_box(parameter.shape)] * size

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's plain part of the parameter, or of its gradient."""
        return tensor

    def source(self, box: Box, owner: int) -> int:
        """The rank that sends this box of the gradient to the owner."""
        return owner
