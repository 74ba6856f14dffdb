"""Symmetric matrices as triangles: exact round trips and norms."""

import numpy as np
import pytest
import torch

import rpt
from rpt.roots import FullRoots
from rpt.roots.packed import lower, packed_length, relative_change_packed, unpack


def pack(matrix):
    """(b, n, n) -> its lower triangles, as `accumulate` picks them."""
    return matrix.flatten(1)[:, lower(matrix.shape[-1], matrix.device)[0]]


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


@pytest.mark.parametrize(
    ("roots", "most"), [("full", 20.1), ("blocked", 14.1), ("low_rank(rank=32)", 12.1)]
)
def test_the_state_of_a_square_matrix_stays_small(roots, most):
    """Momentum, frame and metric, in bytes per parameter of a 256×256 matrix; AdamW's state is 8."""
    parameter = torch.nn.Parameter(torch.randn(256, 256))
    optimizer = rpt.ResidualPolarTransport([parameter], roots=roots)
    parameter.grad = torch.randn(256, 256)
    optimizer.step()
    tensors = (v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor))
    assert sum(v.numel() * v.element_size() for v in tensors) <= most * parameter.numel()
