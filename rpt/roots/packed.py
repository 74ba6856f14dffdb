"""Symmetric matrices as their lower triangles, row by row: half the memory, exactly the same numbers.

The triangle of a leading block is a prefix of the whole one, so that a matrix padded with zeros can
be cropped as a view.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def packed_length(size: int) -> int:
    """Entries of the lower triangle of a (size, size) matrix, diagonal included."""
    return size * (size + 1) // 2


# The state entry with which a traced step brings `lower(size, ...)[0]`, as an input of its graph.
PLACES = "lower %d"


@cache
def lower(size: int, device: torch.device, mode: object = None) -> tuple[Tensor, Tensor]:
    """Where the triangle's entries lie in the flattened matrix: as (row, column) and as (column, row).

    `mode` is that of fake tensors (`fake_mode`): what is made for one may be used in no other.
    """
    rows, cols = torch.tril_indices(size, size, device=device)
    kind = torch.int32 if size**2 < 2**31 else torch.int64
    return (rows * size + cols).to(kind), (cols * size + rows).to(kind)


@cache
def _weights(size: int, dtype: torch.dtype, device: torch.device, mode: object = None) -> Tensor:
    """√2 off the diagonal, 1 on it: a triangle times these has the whole matrix's Frobenius norm."""
    rows, cols = torch.tril_indices(size, size, device=device)
    weights = torch.full(rows.shape, 2.0**0.5, dtype=dtype, device=device)
    return weights.masked_fill_(rows == cols, 1.0)


def fake_mode(tensor: Tensor) -> object:
    """The mode of a fake tensor, None of a real one."""
    return getattr(tensor, "fake_mode", None)


def unpack(packed: Tensor, size: int) -> Tensor:
    """(b, n(n+1)/2) -> (b, n, n), exactly symmetric."""
    below, above = lower(size, packed.device, fake_mode(packed))
    flat = packed.new_empty(len(packed), size * size)
    flat.index_copy_(1, above.long(), packed).index_copy_(1, below.long(), packed)
    return flat.view(-1, size, size)


def relative_change_packed(now: Tensor, reference: Tensor, size: int) -> Tensor:
    """‖now - reference‖_F / ‖reference‖_F of packed matrices (b, c, n(n+1)/2), over all but b; 0/0 is 0."""
    weights = _weights(size, now.dtype, now.device, fake_mode(now))
    change = torch.linalg.vector_norm(((now - reference) * weights).flatten(1), dim=1)
    length = torch.linalg.vector_norm((reference * weights).flatten(1), dim=1)
    return torch.where(change > 0, change / length, 0.0)
