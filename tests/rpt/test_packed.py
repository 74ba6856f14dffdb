"""Symmetric matrices as triangles: exact round trips and norms."""

import numpy as np
import pytest
import torch

from rpt.roots import FullRoots
from rpt.roots.packed import pack, packed_length, relative_change_packed, unpack


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_triangle_is_numpys_and_comes_back_whole(size):
    generator = torch.Generator().manual_seed(size)
    matrix = torch.randn(3, size, size, generator=generator)
    matrix = matrix + matrix.mT
    packed = pack(matrix)
    assert packed.shape == (3, packed_length(size))
    rows, cols = np.tril_indices(size)
    assert np.array_equal(packed.numpy(), matrix.numpy()[:, rows, cols])
    assert torch.equal(unpack(packed, size), matrix)


def test_a_leading_block_is_a_prefix():
    matrix = torch.randn(2, 9, 9)
    matrix = matrix + matrix.mT
    prefix = pack(matrix)[:, : packed_length(5)]
    assert torch.equal(unpack(prefix, 5), matrix[:, :5, :5])


def test_the_relative_change_is_that_of_whole_matrices():
    first, second = torch.randn(2, 4, 3, 6, 6, dtype=torch.float64)
    first, second = first @ first.mT, second @ second.mT
    first[0] = second[0]
    packed = [pack(x.flatten(0, 1)).view(4, 3, -1) for x in (first, second)]
    expected = (first - second).flatten(1).norm(dim=1) / second.flatten(1).norm(dim=1)
    torch.testing.assert_close(relative_change_packed(*packed, 6), expected)
    zero = torch.zeros_like(packed[0])
    assert not relative_change_packed(zero, zero, 6).any()


@pytest.mark.parametrize(("rows", "cols"), [(96, 96), (64, 256)])
def test_a_full_metric_takes_a_root_and_a_triangle_per_side(rows, cols):
    taken = FullRoots(drift_from="age").state_bytes(rows, cols)
    assert taken == 4 * (rows**2 + packed_length(rows) + cols**2 + packed_length(cols))
