"""Products known to be symmetric, in blocks, against whole ones."""

import numpy as np
import pytest
import torch

from rpt.rule import polar
from rpt.rule.polar import polar_factor, polar_schedule
from rpt.rule.scalars import numbers_of


@pytest.mark.parametrize("size", [1, 3, 64, 255, 256, 259, 300])
@pytest.mark.parametrize("flipped", [False, True])
def test_blocks_give_the_whole_product(size, flipped, monkeypatch):
    monkeypatch.setattr(polar, "_blocks_pay", lambda size, device: True)
    x = torch.randn(2, size, 40, dtype=torch.float64)
    x = x.mT.contiguous().mT if flipped else x
    gram = x @ x.mT
    torch.testing.assert_close(polar._symmetric(x, x.mT), gram, rtol=1e-12, atol=1e-12)
    found = polar._symmetric(gram, gram, gram, 0.5, 2.0)
    torch.testing.assert_close(found, 0.5 * gram + 2.0 * gram @ gram, rtol=1e-12, atol=1e-8)


def test_blocks_are_for_large_matrices_on_a_cpu():
    assert polar._blocks_pay(256, torch.device("cpu"))
    assert not polar._blocks_pay(255, torch.device("cpu"))
    assert not polar._blocks_pay(4096, torch.device("cuda"))


@pytest.mark.parametrize("shape", [(256, 256), (260, 300), (256, 600), (600, 256)])
@pytest.mark.parametrize("name", ["tight", "quintic"])
def test_a_polar_factor_in_blocks_is_the_one_in_whole_products(shape, name, monkeypatch):
    matrix = torch.randn(1, *shape, dtype=torch.float64)
    numbers = numbers_of(torch.float64, True)
    blocks = polar_factor(matrix, polar_schedule(name, 3), numbers)
    monkeypatch.setattr(polar, "_blocks_pay", lambda size, device: False)
    whole = polar_factor(matrix, polar_schedule(name, 3), numbers)
    np.testing.assert_allclose(blocks, whole, rtol=0, atol=1e-11)
