"""Transport, closure and certificate against the specification's formulas written out in float64."""

import minimal_rotation_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rpt import ResidualPolarTransport
from rpt.rule.length import next_gain
from rpt.rule.scalars import numbers_of
from rpt.rule.transport import (
    carry,
    certificate,
    live_frame,
    rotation,
    store_frame,
)

TAU = 1e-7
TENSORS = numbers_of(torch.float64, False)


def vectors(seed, count=3, n=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, n, generator=generator, dtype=torch.float64)


def holds(stored):
    return stored.norm(dim=-1, keepdim=True) > 0.5


def through_library(m, stored, p, t, **options):
    frame = live_frame(p, stored, holds(stored), TAU, TENSORS)
    carried = carry(
        m.clone(),
        stored,
        p,
        frame,
        beta1=0.9,
        correction=1 - 0.9**t,
        transport_eps=TAU,
        numbers=TENSORS,
        **options,
    )
    following = stored.clone()
    store_frame(following, p, frame, TENSORS)
    return frame, carried, following


@pytest.mark.parametrize(
    "kind", ["random", "close", "opposite", "near opposite", "vanished", "first"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_carry_follows_the_formulas(kind, dtype):
    m, stored, p = vectors(3)
    stored = stored / stored.norm()
    if kind == "close":
        p = 5 * stored + 0.3 * p
    elif kind == "opposite":
        p = -2 * stored
    elif kind == "near opposite":
        p = -2 * stored + 1e-3 * p
    elif kind == "vanished":
        p = 1e-9 * p
    elif kind == "first":
        stored = torch.zeros_like(stored)
    frame, carried, following = through_library(m.to(dtype), stored.to(dtype), p.to(dtype), 4)
    expected = oracle.transported(
        m[0].numpy(), stored[0].numpy(), p[0].numpy(), 4, beta1=0.9, tau=TAU
    )
    accuracy = 1e-12 if dtype == torch.float64 else 1e-5
    for actual, wanted in zip(
        (carried.momentum, following, carried.update), expected[:3], strict=True
    ):
        np.testing.assert_allclose(actual[0], wanted, atol=accuracy * 10, rtol=accuracy)
    np.testing.assert_allclose(
        [frame.coherence.item(), frame.confidence.item()], expected[3:], atol=accuracy
    )


@given(st.integers(0, 10_000), st.integers(2, 30))
def test_rotation_is_an_isometry_that_takes_one_frame_to_the_other(seed, n):
    m, stored, p = vectors(seed, n=n)
    stored = stored / stored.norm()
    frame = live_frame(p, stored, holds(stored), TAU, TENSORS)
    # Full confidence shows the bare rotation: its part across h enters unfaded.
    bare = frame._replace(confidence=torch.ones_like(frame.confidence))
    h = p / p.norm()

    def turn(vector):
        along_old, along_new = (vector * stored).sum(-1, True), (vector * h).sum(-1, True)
        on_m, on_old, on_new = rotation(along_old, along_new, bare, TAU, TENSORS)
        return on_m * vector + on_old * stored + on_new * h

    if 1 + frame.coherence.item() < 1e-3:
        return
    torch.testing.assert_close(turn(stored), h, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(turn(m).norm(), m.norm(), rtol=1e-8, atol=1e-9)
    other = vectors(seed + 1, n=n)[0]
    inner = torch.linalg.vecdot(turn(m), turn(other))
    torch.testing.assert_close(inner, torch.linalg.vecdot(m, other), rtol=1e-7, atol=1e-7)


def test_full_confidence_closes_the_lag_exactly():
    m, stored, p = vectors(0)
    stored = p / p.norm()
    _, carried, _ = through_library(m, stored, p, 3)
    h = p / p.norm()
    # ⟨u, h⟩ = ‖P‖ when ρ = 1: no lag along the live axis.
    torch.testing.assert_close((carried.update * h).sum(), p.norm())


def test_without_transport_and_closure_it_is_plain_momentum():
    m, stored, p = vectors(1)
    stored = stored / stored.norm()
    _, carried, _ = through_library(m, stored, p, 5, transport=False, closure=False)
    momentum = 0.9 * m + 0.1 * p
    torch.testing.assert_close(carried.momentum, momentum)
    torch.testing.assert_close(carried.update, momentum / (1 - 0.9**5))


def test_padding_changes_nothing():
    m, stored, p = vectors(2)
    stored = stored / stored.norm()
    _, short, _ = through_library(m, stored, p, 2)
    padded = [torch.nn.functional.pad(x, (0, 20)) for x in (m, stored, p)]
    _, long, _ = through_library(*padded, 2)
    torch.testing.assert_close(long.update[:, :12], short.update)
    assert not long.update[:, 12:].any()


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certificate_removes_what_opposes_the_gradient(dtype, scale):
    u, g = vectors(4, 2)
    if (u * g).sum() > 0:
        u = -u
    certified, length, cosine = certificate(u.to(dtype), (g * scale).to(dtype), TENSORS)
    torch.testing.assert_close(length, certified.norm(dim=1, keepdim=True))
    expected = u - (u * g).sum() / g.square().sum() * g
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(certified.double(), expected, rtol=tolerance, atol=tolerance)
    assert cosine.item() == 0
    along = certified.double() @ g.mT / certified.double().norm() / g.norm()
    assert abs(along.item()) < (1e-14 if dtype == torch.float64 else 1e-6)


def test_certificate_leaves_descent_alone_and_survives_zeros():
    u, g = vectors(5, 2)
    if (u * g).sum() < 0:
        u = -u
    certified, length, cosine = certificate(u, g, TENSORS)
    assert torch.equal(certified, u)
    torch.testing.assert_close(length, u.norm(dim=1, keepdim=True))
    torch.testing.assert_close(cosine, (u * g).sum().view(1, 1) / u.norm() / g.norm())
    zero = torch.zeros_like(g)
    for pair in ((u, zero), (zero, g), (zero, zero)):
        certified, length, cosine = certificate(*pair, TENSORS)
        assert torch.equal(certified, pair[0])
        assert length == pair[0].norm()
        assert cosine.item() == 1


def test_certificate_sees_a_sign_that_float32_loses():
    # ⟨u, g⟩ is -1e-9 of its terms' size: float32 sums cannot tell its sign.
    g = torch.tensor([[1.0, 1.0, 1.0]])
    u = torch.tensor([[1e8, -1e8, -1.0]])
    certified, _, _ = certificate(u, g, TENSORS)
    assert (
        certified.double() @ g.double().mT
    ).item() >= -16  # half a unit in the last place of 1e8


def test_gain_follows_its_formula_and_its_bounds():
    def g(gain, q, **o):
        o = {"rate": 0.02, "target": 0.0, "low": 0.25, "high": 4.0} | o
        return next_gain(torch.tensor(gain, dtype=torch.float64), torch.tensor(q), **o).item()

    assert g(1.0, 0.5) == pytest.approx(np.exp(0.01))
    assert g(2.0, -1.0, target=0.5) == pytest.approx(2 * np.exp(-0.03))
    assert g(3.99, 1.0, rate=1.0) == 4.0
    assert g(0.26, -1.0, rate=1.0) == 0.25


@pytest.mark.parametrize("spike", [1e2, 1e5, 1e12, 1e20, 1e-12])
@pytest.mark.parametrize(
    ("preset", "roots"), [("drop_in", "auto"), ("drop_in", "low_rank"), ("paper", "full")]
)
def test_one_gradient_of_another_size_is_survived(preset, roots, spike):
    # With stale roots its request once drowned the momentum for hundreds of steps, or overflowed.
    torch.manual_seed(0)
    weight, vector = nn.Parameter(torch.randn(16, 12)), nn.Parameter(torch.randn(16))
    optimizer = ResidualPolarTransport([weight, vector], lr=1e-3, roots=roots, preset=preset)
    true = torch.randn(16, 12)
    for t in range(80):
        scale = spike if t == 40 else 1.0
        weight.grad = (torch.randn(16, 12) if t == 40 else true + 0.3 * torch.randn(16, 12)) * scale
        vector.grad = torch.randn(16) * scale
        before = weight.detach().clone()
        optimizer.step()
    step = before - weight.detach()
    assert weight.isfinite().all()
    assert vector.isfinite().all()
    cosine = torch.nn.functional.cosine_similarity(step.flatten(), true.flatten(), dim=0)
    assert cosine.item() > 0.4
