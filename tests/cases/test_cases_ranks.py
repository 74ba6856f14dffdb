"""Acceptance cases 43, 63, 64, 65 and 69: manifolds and state over ranks, and decompositions that fail."""

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
    # float32 solvers fail on about one of ten of these, half of the time without a word.
    matrices = torch.stack([dead_rows(seed) for seed in range(120)])
    exact = inverse_root(matrices.double()).root
    for found, tolerance in ((inverse_root(matrices), 1e-3), (newton_inverse_root(matrices), 1e-2)):
        assert not found.failed.any()
        error = torch.linalg.matrix_norm(found.root - exact) / torch.linalg.matrix_norm(exact)
        assert error.max() < tolerance


def silent(real, narrow_only):
    """A solver that returns NaN for every matrix with a 7 in its corner."""

    def solve(matrix, **options):
        parts = [part.clone() for part in real(matrix.nan_to_num(), **options)]
        if matrix.dtype == torch.float32 or not narrow_only:
            for part in parts:
                part[matrix[:, 0, 0] == 7] = torch.nan
        return parts

    return solve


def raising(real):
    """A solver that refuses the whole batch for such a matrix in float32."""

    def solve(matrix, **options):
        if matrix.dtype == torch.float32 and (matrix[:, 0, 0] == 7).any():
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrix, **options)

    return solve


@pytest.mark.parametrize("solver", [torch.linalg.eigh, torch.linalg.svd, torch.linalg.qr])
@pytest.mark.parametrize("failure", ["silent", "raising", "hopeless"])
def test_case_64_what_fails_in_float32_is_tried_in_float64_and_alone(solver, failure):
    broken = raising(solver) if failure == "raising" else silent(solver, failure == "silent")
    matrices = torch.eye(4).repeat(3, 1, 1) * torch.tensor([2.0, 7.0, 3.0])[:, None, None]
    parts, failed = decompose(broken, matrices)
    assert failed.tolist() == [False, failure == "hopeless", False]
    for part, expected in zip(parts, solver(matrices), strict=True):
        torch.testing.assert_close(part[~failed], expected[~failed])
        assert part.isfinite().all()
        assert part.dtype == torch.float32


@pytest.mark.parametrize("name", ["eigh", "svd"])
def test_case_64_a_low_rank_root_keeps_what_it_had(monkeypatch, name):
    backend, gradient = LowRankRoots(2), torch.randn(2, 5, 6, generator=torch.Generator())
    state = backend.create(2, 5, 6, dtype=torch.float32, device=gradient.device)
    damping = Damping(1e-4, torch.zeros(2))
    backend.accumulate(state, gradient, 0.9)
    backend.refresh(state, (5, 6), torch.full((2,), 0.1), damping)
    before = backend.apply(state, gradient)
    real, calls = getattr(torch.linalg, name), []

    def fail(matrix, **options):
        parts = [part.clone() for part in real(matrix, **options)]
        # The second matrix of the batch, and whatever is tried alone after it.
        for part in parts:
            part[-1] = torch.nan
        calls.append(len(matrix))
        return parts

    monkeypatch.setattr(torch.linalg, name, fail)
    backend.accumulate(state, 2 * gradient, 0.9)
    refreshed = backend.refresh(state, (5, 6), torch.full((2,), 0.19), damping)
    monkeypatch.undo()
    assert refreshed.failed.tolist() == [False, True]
    assert 1 in calls
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
