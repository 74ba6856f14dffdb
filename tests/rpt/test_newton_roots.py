"""Inverse fourth roots by products against scipy's fractional powers in float64."""

from __future__ import annotations

import inverse_root_oracle as oracle
import numpy as np
import pytest
import torch

from rpt.roots.newton import newton_inverse_root, smallest


def spectrum(kind, n):
    return {
        "few": torch.cat([torch.linspace(10, 100, 4), torch.zeros(n - 4)]),
        "spread": torch.logspace(-8, 0, n),
        "decaying": torch.arange(1, n + 1).pow(-2.0),
        "flat": torch.ones(n),
    }[kind].double()


def covariance(kind, n):
    torch.manual_seed(n)
    basis = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    matrix = (basis * spectrum(kind, n)) @ basis.mT
    return 0.5 * (matrix + matrix.mT)


@pytest.mark.parametrize("kind", ["few", "spread", "decaying", "flat"])
@pytest.mark.parametrize(("n", "worst"), [(8, 1e-3), (64, 2e-3), (256, 1e-2)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_against_scipy(kind, n, worst, scale):
    a = covariance(kind, n) * scale
    values = torch.linalg.eigvalsh(a)
    bound = float((values / values[-1]).pow(4).sum() ** 0.25 * values[-1])
    floor = max(1e-4 * float(values.mean()), smallest(n, torch.float32) * bound)
    expected = oracle.matrix_power(a.numpy() + floor * np.eye(n), -0.25)
    found = newton_inverse_root(a.float()[None])
    assert not found.failed.any()
    error = np.linalg.norm(found.root[0].double().numpy() - expected) / np.linalg.norm(expected)
    assert error < worst
    top = float(torch.linalg.eigvalsh(a)[-1]) + floor
    assert top / floor * 0.95 < float(found.condition) < 1.01 * n**0.25 * top / floor


def test_in_float64_it_is_exact_to_the_last_step_of_the_schedule():
    a = covariance("spread", 32)
    expected = oracle.matrix_power(
        a.numpy() + 1e-4 * float(a.diagonal().mean()) * np.eye(32), -0.25
    )
    found = newton_inverse_root(a[None]).root[0].numpy()
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-6


def test_zero_padded_and_broken_matrices():
    small = covariance("decaying", 5).float()
    padded = torch.zeros(3, 8, 8)
    padded[0, :5, :5] = small
    padded[2] = torch.nan
    found = newton_inverse_root(padded, sizes=torch.tensor([5.0, 8.0, 8.0]))
    alone = newton_inverse_root(small[None])
    torch.testing.assert_close(found.root[0, :5, :5], alone.root[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.root[1], torch.eye(8), rtol=1e-5, atol=1e-5)
    assert found.failed.tolist() == [False, False, True]


@pytest.mark.parametrize("n", [64, 256, 1024])
@pytest.mark.parametrize("ridge", [1e-4, 1e-8])
def test_one_direction_on_a_long_side_and_a_tiny_ridge(n, ridge):
    """Neither may leave the range the iteration was made for."""
    torch.manual_seed(n)
    vector = torch.nn.functional.normalize(torch.randn(n, dtype=torch.float64), dim=0)
    a = torch.outer(vector, vector)
    floor = max(ridge / n, smallest(n, torch.float32))
    expected = floor**-0.25 * (torch.eye(n) - a) + (1 + floor) ** -0.25 * a
    found = newton_inverse_root(a.float()[None], ridge=ridge)
    assert not found.failed.any()
    error = torch.linalg.matrix_norm(found.root[0].double() - expected, 2)
    assert error < 0.02 * torch.linalg.matrix_norm(expected, 2)


def test_the_precision_of_products_is_put_back():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        newton_inverse_root(torch.eye(4)[None])
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
