"""Symmetric matrices as their lower triangles, row by row: half the memory, exactly the same numbers.

The triangle of a leading block is a prefix of the whole one, so that a matrix padded with zeros can
be cropped as a view.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["pack", "packed_length", "relative_change_packed", "unpack"]


def packed_length(size: int) -> int:
    """Entries of the lower triangle of a (size, size) matrix, diagonal included."""
    return size * (size + 1) // 2


@cache
def _positions(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the triangle's entries lie in the flattened matrix: as (row, column) and as (column, row)."""
    rows, cols = torch.tril_indices(size, size, device=device)
    kind = torch.int32 if size**2 < 2**31 else torch.int64
    return (rows * size + cols).to(kind), (cols * size + rows).to(kind)


@cache
def _weights(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """√2 off the diagonal, 1 on it: a triangle times these has the whole matrix's Frobenius norm."""
    rows, cols = torch.tril_indices(size, size, device=device)
    weights = torch.full(rows.shape, 2.0**0.5, dtype=dtype, device=device)
    return weights.masked_fill_(rows == cols, 1.0)


def pack(matrix: Tensor) -> Tensor:
    """(b, n, n) symmetric -> (b, n(n+1)/2); only the lower triangle is read."""
    size = matrix.shape[-1]
    return matrix.flatten(1).index_select(1, _positions(size, matrix.device)[0])


def unpack(packed: Tensor, size: int) -> Tensor:
    """(b, n(n+1)/2) -> (b, n, n), exactly symmetric."""
    below, above = _positions(size, packed.device)
    flat = packed.new_empty(len(packed), size * size)
    flat.index_copy_(1, above.long(), packed).index_copy_(1, below.long(), packed)
    return flat.view(-1, size, size)


def relative_change_packed(now: Tensor, reference: Tensor, size: int) -> Tensor:
    """‖now - reference‖_F / ‖reference‖_F of packed matrices (b, c, n(n+1)/2), over all but b; 0/0 is 0."""
    weights = _weights(size, now.dtype, now.device)
    change = torch.linalg.vector_norm(((now - reference) * weights).flatten(1), dim=1)
    length = torch.linalg.vector_norm((reference * weights).flatten(1), dim=1)
    return torch.where(change > 0, change / length, 0.0)
