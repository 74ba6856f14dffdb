"""Inverse fourth roots by products against scipy's fractional powers in float64."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from rpt.roots.newton import newton_inverse_root


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
    floor = 1e-4 * float(a.diagonal().mean())
    expected = scipy.linalg.fractional_matrix_power(a.numpy() + floor * np.eye(n), -0.25)
    found = newton_inverse_root(a.float()[None])
    assert not found.failed.any()
    error = np.linalg.norm(found.root[0].double().numpy() - expected) / np.linalg.norm(expected)
    assert error < worst
    top = float(torch.linalg.eigvalsh(a)[-1]) + floor
    assert top / floor * 0.99 < float(found.condition) < 1.01 * n**0.25 * top / floor


def test_in_float64_it_is_exact_to_the_last_step_of_the_schedule():
    a = covariance("spread", 32)
    expected = scipy.linalg.fractional_matrix_power(
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
