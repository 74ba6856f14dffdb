"""A step's numbers as arrays and as tensors: the same formulas, the same results."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpt.length import next_energy, rescale, signal, step_rms
from rpt.polar import polar_schedule, polar_share
from rpt.scalars import as_scalars, as_tensor, at_least, at_most, choose, quiet, write_columns
from rpt.transport import carry, certificate, live_frame, norm, store_frame

TAU = 1e-7


def rows(seed, count, n, dtype):
    generator = torch.Generator().manual_seed(seed)
    m, stored, p, g = torch.randn(4, count, n, generator=generator, dtype=torch.float64)
    stored = stored / stored.norm(dim=-1, keepdim=True)
    # Every kind of row: an ordinary one, none stored, a vanished request, its opposite, one in line.
    kinds = torch.arange(count) % 5
    stored[kinds == 1] = 0.0
    p[kinds == 2] *= 1e-12
    p[kinds == 3] = -2.0 * stored[kinds == 3]
    p[kinds == 4] = stored[kinds == 4] + 0.1 * p[kinds == 4]
    return [x.to(dtype) for x in (m, stored, p, g)]


def whole_step(m, stored, p, g, host_reads, **options):
    held = as_scalars(stored.norm(dim=-1, keepdim=True) > 0.5, host_reads)
    m, stored = m.clone(), stored.clone()
    frame = live_frame(p, stored, held, TAU, host_reads)
    assert isinstance(frame.length, np.ndarray) == host_reads
    carried = carry(m, stored, p, frame, beta1=0.9, correction=0.4, transport_eps=TAU, **options)
    store_frame(stored, p, frame)
    shaped = polar_share(
        carried.update.view(len(p), 4, -1),
        torch.linspace(0, 1, len(p)).to(p),
        polar_schedule("tight", 4),
        TAU,
        host_reads,
    ).flatten(1)
    certified, length, cosine = certificate(shaped, g, host_reads)
    sizes = as_scalars(torch.full((len(p), 1), float(p.shape[1])).to(p), host_reads)
    correction = as_scalars(torch.full((len(p), 1), 0.4).to(p), host_reads)
    energy = as_scalars(torch.linspace(-1, 40, len(p)).to(p)[:, None].clone(), host_reads)
    energy[:] = next_energy(energy, frame.length, 0.9, correction)
    strength = signal(as_scalars(norm(m), host_reads), energy, 0.9, correction)
    limit = as_scalars(torch.linspace(0.1, 3, len(p)).to(p)[:, None], host_reads)
    target = step_rms(1.2, strength, length / sizes**0.5, limit)
    scaled = rescale(certified.clone(), length, target, sizes)
    numbers = (*frame, carried.closing, length, cosine, energy, strength, target)
    return [m, stored, shaped, certified, scaled, *(as_tensor(x) for x in numbers)]


@given(st.integers(0, 1000), st.integers(1, 11), st.sampled_from([4, 12, 64]), st.booleans())
def test_arrays_and_tensors_take_the_same_step(seed, count, n, closure):
    for dtype, accuracy in ((torch.float32, 2e-4), (torch.float64, 1e-11)):
        given_rows = rows(seed, count, n, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fast, plain = (whole_step(*given_rows, host, closure=closure) for host in (True, False))
        for a, b in zip(fast, plain, strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=accuracy, atol=accuracy)


def test_arrays_share_the_tensors_memory():
    tensor = torch.zeros(3, 2)
    as_scalars(tensor, True)[1] = 7.0
    assert tensor[1].eq(7).all()
    assert as_scalars(tensor, False) is tensor
    assert as_tensor(as_scalars(tensor, True)).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("host_reads", [True, False])
def test_bounds_and_choices(host_reads):
    x = as_scalars(torch.tensor([-2.0, 0.5, torch.nan, torch.inf]), host_reads)
    bounded = as_tensor(at_most(at_least(x, -1.0), 1.0))
    expected = torch.tensor([-1.0, 0.5, torch.nan, 1.0])
    torch.testing.assert_close(bounded, expected, equal_nan=True)
    chosen = as_tensor(choose(x > 0, x, 0.0))
    torch.testing.assert_close(chosen, torch.tensor([0.0, 0.5, 0.0, torch.inf]))
    assert chosen.dtype == torch.float32
    target = torch.zeros(4, 2)
    write_columns(target, (x.reshape(4, 1), (x > 0).reshape(4, 1)))
    torch.testing.assert_close(target[:, 0], as_tensor(x), equal_nan=True)
    assert target[:, 1].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_quiet_arithmetic_divides_by_zero_without_a_warning():
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("error")
        assert np.isinf(np.ones(1) / np.zeros(1)).all()


def test_only_rows_in_doubt_are_certified_anew():
    # An update exactly along its gradient must come back bit for bit, whatever its neighbour does.
    u = torch.tensor([[1.0, 2.0, 3.0], [1.0, 0.0, 0.0]])
    g = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 1.0, 0.0]])
    certified, length, cosine = certificate(u, g, host_reads=True)
    assert torch.equal(certified[0], u[0])
    torch.testing.assert_close(certified[1], torch.tensor([0.5, 0.5, 0.0]))
    np.testing.assert_allclose(length[:, 0], [14**0.5, 0.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(cosine[:, 0], [1.0, 0.0], atol=1e-6)
    assert torch.equal(u[1], torch.tensor([1.0, 0.0, 0.0]))
