"""The polar share against singular value decompositions in float64 and scipy's polar factor."""

import numpy as np
import polar_factor_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpt import ResidualPolarTransport
from rpt.rule import polar
from rpt.rule.polar import polar_factor, polar_schedule, polar_share, working_dtype
from rpt.rule.scalars import numbers_of

TENSORS = numbers_of(torch.float64, False)
QUINTIC = (3.4445, -4.7750, 2.0315)
SHAPES = [(1, 1), (1, 9), (9, 1), (4, 4), (5, 8), (8, 5), (3, 70), (70, 3), (16, 16), (33, 16)]


def random(shape, seed=0, dtype=torch.float64, batch=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype)


def on_singular_values(matrix, schedule):
    return oracle.on_singular_values(matrix.double().numpy(), schedule.steps, tight=schedule.tight)


def test_the_published_schedule_is_five_equal_quintic_steps():
    schedule = polar_schedule("quintic", 5)
    assert schedule.steps == (QUINTIC,) * 5
    assert not schedule.tight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["quintic", "tight"])
@pytest.mark.parametrize("steps", [2, 3, 5, 8])
def test_steps_act_on_singular_values(shape, name, steps):
    schedule = polar_schedule(name, steps)
    matrix = random(shape)
    actual = polar_factor(matrix, schedule, TENSORS)
    for one, expected in zip(actual, matrix, strict=True):
        np.testing.assert_allclose(one, on_singular_values(expected, schedule), atol=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tight_schedule_converges_to_scipys_polar_factor(shape):
    schedule = polar_schedule("tight", 14)
    matrix = random(shape)
    actual = polar_factor(matrix, schedule, TENSORS)
    for one, source in zip(actual, matrix, strict=True):
        np.testing.assert_allclose(one, oracle.polar_factor(source.numpy()), atol=1e-6)


@pytest.mark.parametrize("condition", [1e1, 1e3])
@pytest.mark.parametrize("shape", [(16, 16), (16, 64)])
def test_five_steps_come_as_near_as_measured(shape, condition):
    u, _, vh = np.linalg.svd(random(shape)[0].numpy(), full_matrices=False)
    s = np.geomspace(1, 1 / condition, min(shape))
    matrix = torch.tensor(u * s @ vh)[None]
    wanted = torch.tensor(u @ vh)
    for name in ("quintic", "tight"):
        found = polar_factor(matrix, polar_schedule(name, 5), TENSORS)[0]
        error = ((found - wanted).norm() / wanted.norm()).item()
        assert error < (0.35 if condition == 10 else 0.6), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["quintic", "tight"])
def test_transposes_agree(shape, name):
    schedule = polar_schedule(name, 5)
    matrix = random(shape)
    torch.testing.assert_close(
        polar_factor(matrix.mT, schedule, TENSORS).mT, polar_factor(matrix, schedule, TENSORS)
    )


@pytest.mark.parametrize("name", ["quintic", "tight"])
@pytest.mark.parametrize("shape", [(4, 6), (4, 9), (5, 5)])
def test_zero_matrices_stay_zero(name, shape):
    schedule = polar_schedule(name, 5)
    zero = torch.zeros(2, *shape)
    assert not polar_factor(zero, schedule, TENSORS).any()
    assert not polar_share(zero, torch.ones(2, 1), schedule, 1e-7, TENSORS).any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["quintic", "tight"])
def test_share_follows_the_formula(shape, name):
    schedule = polar_schedule(name, 5)
    update = random(shape)
    weight = torch.tensor([0.3, 1.0], dtype=torch.float64)
    actual = polar_share(update, weight[:, None], schedule, 1e-7, TENSORS)
    for one, u, alpha in zip(actual, update, weight, strict=True):
        expected = oracle.polar_share(u.numpy(), on_singular_values(u, schedule), float(alpha))
        np.testing.assert_allclose(one, expected, rtol=1e-7, atol=1e-8)


def test_weight_zero_is_the_update_bit_for_bit():
    update = random((5, 8), dtype=torch.float32)
    actual = polar_share(
        update, torch.tensor([[0.0], [0.5]]), polar_schedule("tight", 3), 1e-7, TENSORS
    )
    assert torch.equal(actual[0], update[0])
    assert not torch.equal(actual[1], update[1])


def test_updates_below_the_threshold_are_left_alone():
    update = 1e-9 * random((5, 8), dtype=torch.float32)
    actual = polar_share(update, torch.ones(2, 1), polar_schedule("quintic", 5), 1e-7, TENSORS)
    assert torch.equal(actual, update)


@pytest.mark.parametrize("shape", [(1, 1), (4, 6), (4, 9), (200, 200)])
def test_the_tight_factor_ignores_its_matrix_s_length(shape):
    schedule = polar_schedule("tight", 3)
    matrix = random(shape, dtype=torch.float32)
    matrix /= matrix.norm(dim=(-2, -1), keepdim=True)
    expected = polar_factor(matrix, schedule, TENSORS)
    for on_host in (True, False):
        numbers = numbers_of(torch.float32, on_host)
        weight = numbers.read(torch.ones(2, 1))
        for length in (1e12, 1e-3, 1e-5, 1e-7, 1e-12):
            actual = polar_factor(length * matrix, schedule, numbers)
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
        # Here float32 ends: no direction is promised, but nothing may grow beyond a factor's length.
        for length in (1e-18, 1e-20, 1e-22, 1e-30, 1e-40):
            actual = polar_factor(length * matrix, schedule, numbers)
            assert actual.norm(dim=(-2, -1)).amax() < 1.5 * min(shape) ** 0.5
            tiny = length * matrix
            with np.errstate(all="ignore"):
                shared = polar_share(tiny, weight, schedule, 1e-7, numbers)
            assert torch.equal(shared, tiny)


@given(
    st.integers(1, 12), st.integers(1, 12), st.floats(0, 1), st.sampled_from(["quintic", "tight"])
)
def test_length_is_kept_and_directions_commute_with_rotations(rows, cols, alpha, name):
    schedule = polar_schedule(name, 5)
    update = random((rows, cols), seed=rows * 13 + cols, batch=1)
    weight = torch.tensor([alpha], dtype=torch.float64)
    actual = polar_share(update, weight[:, None], schedule, 1e-7, TENSORS)
    torch.testing.assert_close(actual.norm(), update.norm())
    left = torch.linalg.qr(random((rows, rows), 1, batch=1)).Q
    right = torch.linalg.qr(random((cols, cols), 2, batch=1)).Q
    turned = polar_share(left @ update @ right, weight[:, None], schedule, 1e-7, TENSORS)
    torch.testing.assert_close(turned, left @ actual @ right, rtol=1e-7, atol=1e-8)
    # Descent is kept: the share never turns an update by ninety degrees.
    assert (actual * update).sum() > 0


@pytest.mark.parametrize(
    ("name", "steps", "says"),
    [("cubic", 5, "polar_schedule='cubic' must be"), ("tight", 1, "at least 2")],
)
def test_schedules_that_do_not_exist(name, steps, says):
    with pytest.raises(ValueError, match=says):
        polar_schedule(name, steps)


@pytest.mark.parametrize(
    ("name", "dtype", "device", "wanted"),
    [
        ("auto", torch.float32, "cpu", torch.float32),
        ("auto", torch.float64, "cpu", torch.float64),
        ("bfloat16", torch.float32, "cpu", torch.bfloat16),
        ("bfloat16", torch.float64, "cpu", torch.float64),
        ("float32", torch.float64, "cpu", torch.float64),
        ("float32", torch.float32, "cpu", torch.float32),
    ],
)
def test_products_are_lowered_where_asked_and_never_from_float64(name, dtype, device, wanted):
    assert working_dtype(name, torch.zeros(1, dtype=dtype, device=device)) == wanted


@pytest.mark.parametrize("shape", [(48, 48), (40, 64), (16, 64), (64, 16), (3, 70)])
@pytest.mark.parametrize("condition", [1e1, 1e3])
@pytest.mark.parametrize("on_host", [True, False])
def test_bfloat16_products_stay_within_their_rounding(shape, condition, on_host):
    numbers = numbers_of(torch.float32, on_host)
    u, _, vh = np.linalg.svd(random(shape)[0].numpy(), full_matrices=False)
    s = np.geomspace(1, 1 / condition, min(shape))
    matrix = torch.tensor(u * s @ vh, dtype=torch.float32)[None]
    schedule = polar_schedule("tight", 3)
    exact = torch.tensor(on_singular_values(matrix[0], schedule), dtype=torch.float32)
    low = polar_factor(matrix.bfloat16(), schedule, numbers)[0]
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).norm() < 0.04 * exact.norm()
    # Orthogonality: no direction is thrown beyond one, and those above the schedule's reach come to one.
    found = torch.linalg.svdvals(low.float())
    assert found.max() < 1.03
    assert (found[: (s > 0.15).sum()] > 0.95).all()


def test_a_share_in_bfloat16_keeps_the_update_s_length_in_float32():
    update = random((24, 40), dtype=torch.float32) * torch.tensor([1e-4, 1e4])[:, None, None]
    weight = torch.tensor([[0.3], [1.0]])
    schedule = polar_schedule("tight", 3)
    numbers = numbers_of(torch.float32, False)
    low = polar_share(update, weight, schedule, 1e-7, numbers, dtype=torch.bfloat16)
    assert low.dtype == torch.float32
    lengths = update.norm(dim=(-2, -1))
    torch.testing.assert_close(low.norm(dim=(-2, -1)), lengths, rtol=1e-6, atol=0)
    exact = polar_share(update, weight, schedule, 1e-7, numbers)
    assert ((low - exact).norm(dim=(-2, -1)) < 0.04 * lengths).all()
    assert not torch.equal(low, exact)


def trained(steps=6, **options):
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(24, 40, dtype=options.pop("dtype", torch.float32)))
    optimizer = ResidualPolarTransport([p], lr=1e-2, **options)
    for _ in range(steps):
        p.grad = torch.randn(24, 40).to(p)
        optimizer.step()
    return p.detach()


def test_an_explicit_bfloat16_works_on_a_cpu_and_the_presets_stay_exact_there():
    plain = trained()
    low = trained(polar_dtype=torch.bfloat16)
    assert torch.equal(low, trained(polar_dtype="bfloat16"))
    assert not torch.equal(low, plain)
    torch.testing.assert_close(low, plain, rtol=0, atol=1e-2)
    for options in ({}, {"preset": "paper"}, {"dtype": torch.float64}):
        exact = trained(**options, polar_dtype="float32")
        assert torch.equal(trained(**options), exact)
    exact = trained(dtype=torch.float64)
    assert torch.equal(trained(dtype=torch.float64, polar_dtype="bfloat16"), exact)


@pytest.mark.parametrize(
    ("capability", "lowered"), [((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_auto_lowers_on_cuda_devices_that_have_bfloat16(capability, lowered, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert polar._has_bfloat16.__wrapped__(torch.device("cuda")) == lowered
