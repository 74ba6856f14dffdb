"""Acceptance cases 1 to 4: loss scaling, non-finite gradients, decompositions, the right power."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from optimizer_states import assert_bitwise, snapshot
from torch import nn

from rpt import ResidualPolarTransport
from rpt.roots import BlockedRoots, FullRoots, LowRankRoots, inverse_root

BACKENDS = ["auto", "full", "blocked", "low_rank"]


# -- 1: loss scaling -------------------------------------------------------------------------------


class Scaled:
    """Case 1's model, trained plainly or through a GradScaler."""

    def __init__(self, scaled):
        torch.manual_seed(1)
        self.x, self.y = torch.randn(8, 3), torch.randn(8, 2)
        self.model = nn.Linear(3, 2, bias=False)
        self.optimizer = ResidualPolarTransport(self.model.parameters(), lr=1e-2)
        self.optimizer.attach_model(self.model, observe_every=1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=scaled)
        self.ranks = []

    def step(self, spoil=False):
        self.optimizer.zero_grad()
        loss = (self.model(self.x) - self.y).square().mean()
        self.scaler.scale(loss).backward()
        if spoil:
            self.model.weight.grad[0, 0] = math.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()
        state = self.optimizer.state[self.model.weight]
        self.ranks.append(float(state["residual_entropy_rank"]))


def test_case_01_loss_scaling_changes_nothing():
    plain, scaled = Scaled(False), Scaled(True)
    for _ in range(5):
        plain.step()
        scaled.step()
    assert 0 < plain.ranks[-1] < 1
    np.testing.assert_allclose(scaled.ranks, plain.ranks, atol=1e-6)
    torch.testing.assert_close(scaled.model.weight, plain.model.weight, rtol=1e-5, atol=0)


def test_case_01_an_overflowed_step_leaves_no_trace():
    seen, never = Scaled(True), Scaled(True)
    for run in (seen, never):
        for _ in range(5):
            run.step()
    before = snapshot(seen.optimizer)
    seen.step(spoil=True)
    assert_bitwise(snapshot(seen.optimizer), before)
    assert seen.scaler.get_scale() == 32768.0
    seen.step()
    never.step()
    assert seen.optimizer.state[seen.model.weight]["observations"] == 6
    assert_bitwise(snapshot(seen.optimizer), snapshot(never.optimizer))


# -- 2: a non-finite gradient without a scaler -----------------------------------------------------


class FiniteOnly(FullRoots):
    """Full roots that refuse to be called with anything but finite matrices."""

    def accumulate(self, state, gradient, beta2):
        assert gradient.isfinite().all()
        super().accumulate(state, gradient, beta2)

    def apply(self, state, gradient):
        assert gradient.isfinite().all()
        return super().apply(state, gradient)


class Spoiled:
    def __init__(self, **options):
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        options.setdefault("roots", FiniteOnly())
        self.optimizer = ResidualPolarTransport(
            self.model.named_parameters(), lr=1e-2, max_root_staleness=1, **options
        )
        self.x = torch.randn(3, 16, 4)

    def step(self, i, spoil=None, clip=False, take=True):
        self.optimizer.zero_grad()
        self.model(self.x[i]).square().mean().backward()
        if spoil is not None:
            self.model[0].weight.grad[0, 0] = spoil
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if take:
            self.optimizer.step()


@pytest.mark.parametrize("spoil", [math.nan, math.inf, -math.inf])
def test_case_02_one_spoiled_parameter_is_skipped(spoil):
    run = Spoiled()
    run.step(0)
    weight = run.model[0].weight
    before, state = weight.detach().clone(), copy.deepcopy(run.optimizer.state[weight])
    with pytest.warns(UserWarning, match=r"non-finite.*0\.weight"):
        run.step(1, spoil)
    assert torch.equal(weight, before)
    after = dict(run.optimizer.state[weight])
    assert after.pop("skipped") == state.pop("skipped") + 1
    assert_bitwise(after, state)
    assert run.optimizer.state[run.model[2].weight]["step"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(1, spoil)  # the warning comes once
        run.step(2)
    for tensor in run.model.parameters():
        assert tensor.isfinite().all()
        for value in run.optimizer.state[tensor].values():
            assert not isinstance(value, torch.Tensor) or value.isfinite().all()
    assert run.optimizer.telemetry()["total"]["skipped"] == 2


def test_case_02_after_clipping_all_are_skipped():
    run, reference = Spoiled(), Spoiled()
    run.step(0)
    reference.step(0)
    with pytest.warns(UserWarning, match="non-finite"):
        run.step(1, math.nan, clip=True)
    run.step(2)
    reference.step(2)
    for a, b in zip(run.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(a, b)
        ours, theirs = dict(run.optimizer.state[a]), dict(reference.optimizer.state[b])
        assert (ours.pop("skipped"), theirs.pop("skipped")) == (1, 0)
        assert_bitwise(ours, theirs)


def test_case_02_raising_is_an_option_and_changes_nothing():
    run = Spoiled(nonfinite="raise")
    run.step(0)
    before = snapshot(run.optimizer)
    with pytest.raises(RuntimeError, match=r"non-finite gradient in 0\.weight \(8, 4\)"):
        run.step(1, math.nan)
    assert_bitwise(snapshot(run.optimizer), before)


# -- 3: decompositions of low-rank and NaN factors -------------------------------------------------


def test_case_03_damped_low_rank_factor():
    u = torch.ones(512) / 512**0.5
    a = torch.outer(u, u)
    expected = 10 * (torch.eye(512) - a) + 1.0001**-0.25 * a
    # The library damps by a floor under the eigenvalues, where float32's rounding cannot reach it.
    floored = inverse_root(a, ridge=0.0, absolute=1e-4).root
    assert (floored - expected).abs().max() <= 2e-3
    assert (inverse_root(a, ridge=1e-4 * 512).root - expected).abs().max() <= 2e-3
    # Added to the matrix, it is what 511 eigenvalues are, less than float32's rounding apart.
    added = a + 1e-4 * torch.eye(512)
    assert (inverse_root(added.double()).root - expected).abs().max() <= 2e-3
    assert (inverse_root(added).root - expected).abs().max() <= 2e-3
    both = torch.stack([torch.eye(512), added])
    assert (inverse_root(both).root[1] - expected).abs().max() <= 2e-3
    assert float(expected[0, 0]) == pytest.approx(9.982422, abs=1e-5)
    assert float(expected[0, 1]) == pytest.approx(-0.0175782, abs=1e-6)


def test_case_03_undamped_low_rank_factor_is_finite():
    u = torch.ones(512) / 512**0.5
    for ridge in (0.0, 1e-4):
        result = inverse_root(torch.outer(u, u), ridge=ridge)
        assert result.root.isfinite().all()
        assert not result.failed


def test_case_03_nan_matrix_is_reported_and_never_solved(monkeypatch):
    solved = []
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: solved.append(m.clone()) or original(m))
    result = inverse_root(torch.full((4, 4), math.nan))
    assert result.failed
    assert all(m.isfinite().all() for m in solved)


@pytest.mark.parametrize("roots", BACKENDS)
def test_case_03_a_failed_root_keeps_the_previous_one(monkeypatch, roots):
    weight = nn.Parameter(torch.randn(6, 5))
    optimizer = ResidualPolarTransport([weight], lr=1e-2, roots=roots, max_root_staleness=1)
    gradients = torch.randn(4, 6, 5)
    weight.grad = gradients[0]
    optimizer.step()
    held = {k: v.clone() for k, v in optimizer.state[weight].items() if "root" in k and "." in k}

    def broken(*_, **__):
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", broken)
        weight.grad = gradients[1]
        with pytest.warns(UserWarning, match="keeps its previous root"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            weight.grad = gradients[2]
            optimizer.step()
    for key, value in held.items():
        assert torch.equal(optimizer.state[weight][key], value), key
    assert optimizer.telemetry()["total"]["root_failures"] == 2
    weight.grad = gradients[3]
    optimizer.step()
    assert weight.isfinite().all()
    assert optimizer.telemetry()["total"]["root_failures"] == 2


# -- 4: the right power ----------------------------------------------------------------------------


def planted():
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    return q, torch.tensor([1.0, 16.0, 81.0, 256.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("power", "expected"), [(-0.25, (1, 1 / 2, 1 / 3, 1 / 4)), (-0.5, (1, 1 / 4, 1 / 9, 1 / 16))]
)
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8])
def test_case_04_inverse_root_has_the_right_power(power, expected, scale):
    q, values = planted()
    matrix = (scale * (q * values) @ q.T).float()
    root = inverse_root(matrix, power, ridge=0.0).root.double()
    wanted = scale**power * (q * torch.tensor(expected, dtype=torch.float64)) @ q.T
    assert torch.linalg.norm(root - wanted) / torch.linalg.norm(wanted) <= 1e-3


@pytest.mark.parametrize("backend", [FullRoots(), BlockedRoots(4), LowRankRoots(4)])
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8])
def test_case_04_every_backend_applies_the_right_power(backend, scale):
    # Planted so that L = M·scale; the wide side R is isotropic on its range.
    q, values = planted()
    gradient = (scale**0.5 * (q * values.sqrt()) @ q.T * 2).float()
    state = backend.create(1, 4, 4, dtype=torch.float32, device=gradient.device)
    from rpt.roots import Damping

    for _ in range(4):  # low_rank warms its basis up from one refresh to the next
        backend.accumulate(state, gradient[None], 0.9)
        refreshed = backend.refresh(state, (4, 4), torch.ones(1), Damping(0.0, torch.zeros(1)))
    assert not refreshed.failed.any()
    count = 1 - 0.9**4
    request = backend.apply(state, gradient[None])[0].double()
    # L = R = count·M·scale, so L^-1/4 G R^-1/4 = 2 √scale M^1/2 (count M scale)^-1/2.
    expected = 2 / count**0.5 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(request, expected, rtol=0, atol=2e-3)
