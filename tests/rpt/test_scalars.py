"""A step's numbers as arrays and as tensors: the same formulas, the same results."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpt.rule.length import next_energy, rescale, signal, step_rms
from rpt.rule.polar import polar_schedule, polar_share
from rpt.rule.scalars import numbers_of
from rpt.rule.transport import carry, certificate, live_frame, norm, store_frame

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


def whole_step(m, stored, p, g, on_host, **options):
    numbers = numbers_of(m.dtype, on_host)
    read = numbers.read
    held = read(stored.norm(dim=-1, keepdim=True) > 0.5)
    m, stored = m.clone(), stored.clone()
    frame = live_frame(p, stored, held, TAU, numbers)
    assert isinstance(frame.length, np.ndarray) == on_host
    correction = read(torch.full((len(p), 1), 0.4).to(p))
    carried = carry(
        m,
        stored,
        p,
        frame,
        beta1=0.9,
        correction=correction,
        transport_eps=TAU,
        numbers=numbers,
        **options,
    )
    store_frame(stored, p, frame, numbers)
    shaped = polar_share(
        carried.update.view(len(p), 4, -1),
        read(torch.linspace(0, 1, len(p)).to(p)[:, None]),
        polar_schedule("tight", 4),
        TAU,
        numbers,
    ).flatten(1)
    certified, length, cosine = certificate(shaped, g, numbers)
    sizes = read(torch.full((len(p), 1), float(p.shape[1])).to(p))
    energy = read(torch.linspace(-1, 40, len(p)).to(p)[:, None].clone())
    energy[:] = next_energy(energy, frame.length, 0.9, correction, numbers)
    strength = signal(read(norm(m)), energy, 0.9, correction, numbers)
    limit = read(torch.linspace(0.1, 3, len(p)).to(p)[:, None])
    target = step_rms(1.2, strength, length / sizes**0.5, limit, numbers)
    scaled = rescale(certified.clone(), length, target, sizes, numbers)
    found = (*frame, carried.closing, length, cosine, energy, strength, target)
    return [m, stored, shaped, certified, scaled, *(numbers.tensor(x) for x in found)]


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
    host, device = (numbers_of(torch.float32, on_host) for on_host in (True, False))
    host.read(tensor)[1] = 7.0
    assert tensor[1].eq(7).all()
    assert device.read(tensor) is tensor
    assert host.tensor(host.read(tensor)).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("on_host", [True, False])
def test_bounds_and_choices(on_host):
    numbers = numbers_of(torch.float32, on_host)
    x = numbers.read(torch.tensor([-2.0, 0.5, torch.nan, torch.inf]))
    bounded = numbers.tensor(numbers.at_most(numbers.at_least(x, -1.0), 1.0))
    expected = torch.tensor([-1.0, 0.5, torch.nan, 1.0])
    torch.testing.assert_close(bounded, expected, equal_nan=True)
    chosen = numbers.tensor(numbers.where(x > 0, x, 0.0))
    torch.testing.assert_close(chosen, torch.tensor([0.0, 0.5, 0.0, torch.inf]))
    assert chosen.dtype == torch.float32
    cast = numbers.tensor(numbers.cast(x, numbers.wide))
    assert cast.dtype == torch.float64


def test_only_rows_in_doubt_are_certified_anew():
    # An update exactly along its gradient must come back bit for bit, whatever its neighbour does.
    u = torch.tensor([[1.0, 2.0, 3.0], [1.0, 0.0, 0.0]])
    g = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 1.0, 0.0]])
    certified, length, cosine = certificate(u, g, numbers_of(torch.float32, True))
    assert torch.equal(certified[0], u[0])
    torch.testing.assert_close(certified[1], torch.tensor([0.5, 0.5, 0.0]))
    np.testing.assert_allclose(length[:, 0], [14**0.5, 0.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(cosine[:, 0], [1.0, 0.0], atol=1e-6)
    assert torch.equal(u[1], torch.tensor([1.0, 0.0, 0.0]))
