"""Decompositions that fail."""

from __future__ import annotations

import pytest
import torch

import rpt
from rpt.roots import Damping, LowRankRoots, inverse_root
from rpt.roots.eigh import decompose
from rpt.roots.newton import newton_inverse_root

# -- 64: solvers that return NaN without raising ---------------------------------------------------


def dead_rows(seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.zeros(96, 24)
    rows = torch.randperm(96, generator=generator)[:29]
    a[rows] = torch.randn(29, 24, generator=generator)
    return a @ a.T


def test_case_64_matrices_with_zero_rows_all_have_a_root():
    # A float32 solver fails on about one of ten of these, half of the time without a word.
    matrices = torch.stack([dead_rows(seed) for seed in range(120)])
    exact = inverse_root(matrices.double()).root
    for found, tolerance in ((inverse_root(matrices), 1e-3), (newton_inverse_root(matrices), 1e-2)):
        assert not found.failed.any()
        error = torch.linalg.matrix_norm(found.root - exact) / torch.linalg.matrix_norm(exact)
        assert error.max() < tolerance


def silent(real):
    """A solver that returns NaN for every matrix with a 7 in its corner."""

    def solve(matrix):
        parts = [part.clone() for part in real(matrix)]
        for part in parts:
            part[matrix[:, 0, 0] == 7] = torch.nan
        return parts

    return solve


def raising(real, alone):
    """A solver that refuses a batch with such a matrix, or the matrix `alone` too."""

    def solve(matrix):
        if (alone or len(matrix) > 1) and (matrix[:, 0, 0] == 7).any():
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrix)

    return solve


@pytest.mark.parametrize("solver", [torch.linalg.eigh, torch.linalg.svd, torch.linalg.qr])
@pytest.mark.parametrize("failure", ["silent", "of a batch", "hopeless"])
def test_case_64_one_matrix_that_fails_costs_no_other_its_decomposition(solver, failure):
    broken = silent(solver) if failure == "silent" else raising(solver, failure == "hopeless")
    matrices = torch.eye(4).repeat(3, 1, 1) * torch.tensor([2.0, 7.0, 3.0])[:, None, None]
    exact = solver(matrices.double())
    parts, failed = decompose(broken, matrices, [part.shape[1:] for part in exact])
    assert failed.tolist() == [False, failure != "of a batch", False]
    for part, expected in zip(parts, exact, strict=True):
        torch.testing.assert_close(part[~failed], expected[~failed])


@pytest.mark.parametrize("name", ["eigh", "svd"])
def test_case_64_a_low_rank_root_keeps_what_it_had(monkeypatch, name):
    backend, gradient = LowRankRoots(2), torch.randn(2, 5, 6, generator=torch.Generator())
    state = backend.create(2, 5, 6, dtype=torch.float32, device=gradient.device)
    damping = Damping(1e-4, torch.zeros(2))
    backend.accumulate(state, gradient, 0.9)
    backend.refresh(state, (5, 6), torch.full((2,), 0.1), damping)
    before = backend.apply(state, gradient)
    real = getattr(torch.linalg, name)

    def fail(matrix, **options):
        parts = [part.clone() for part in real(matrix, **options)]
        for part in parts:
            part[-1] = torch.nan  # the second matrix of the batch
        return parts

    monkeypatch.setattr(torch.linalg, name, fail)
    backend.accumulate(state, 2 * gradient, 0.9)
    refreshed = backend.refresh(state, (5, 6), torch.full((2,), 0.19), damping)
    monkeypatch.undo()
    assert refreshed.failed.tolist() == [False, True]
    after = backend.apply(state, gradient)
    assert torch.equal(after[1], before[1])
    assert after.isfinite().all()
    assert not torch.equal(after[0], before[0])


def test_case_64_a_step_with_such_a_metric_keeps_no_old_root():
    weight = torch.nn.Parameter(torch.randn(96, 24, generator=torch.Generator().manual_seed(1)))
    optimizer = rpt.ResidualPolarTransport([weight], 1e-3, roots="full", max_root_staleness=1)
    for seed in (46, 47, 90):
        generator = torch.Generator().manual_seed(seed)
        weight.grad = torch.zeros(96, 24)
        rows = torch.randperm(96, generator=generator)[:29]
        weight.grad[rows] = torch.randn(29, 24, generator=generator)
        optimizer.step()
    assert weight.isfinite().all()
    assert int(optimizer.state[weight]["root_failures"]) == 0
