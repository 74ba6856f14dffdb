"""Properties that must hold for all points: inverses, isometry, group laws, triangle inequality."""

import hypothesis.strategies as st
import pytest
import rpt.geometry.lorentz as lorentz
import torch
from hypothesis import given, settings

N = 4
QUICK = settings(max_examples=40)


@st.composite
def points(draw, max_radius=8.0):
    """A point in float64, the origin among them."""
    a = draw(st.one_of(st.just(0.0), st.floats(1e-6, max_radius)))
    seed = draw(st.integers(0, 10**6))
    u = torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u = u / u.norm() if a else torch.zeros_like(u)
    return lorentz.Point(torch.tensor(a, dtype=torch.float64), u)


curvatures = st.sampled_from([0.3, 1.0, 2.7])


def near(x, y, scale=1.0):
    """Equal to the resolution of float64 points at such radii."""
    reach = float(torch.maximum(x.a, y.a)) + scale
    allowed = 1e-14 * torch.tensor(reach).exp().item() + 1e-12
    assert float(lorentz.distance(x, y)) <= allowed


@QUICK
@given(points(), points(), curvatures)
def test_log_is_the_inverse_of_exp(x, y, k):
    tangent = lorentz.log_map(x, y, k=k)
    near(lorentz.exp_map(x, tangent, k=k), y, scale=float(x.a) + 2)
    length = lorentz.tangent_norm(x, tangent)
    assert float(length) == pytest.approx(float(lorentz.distance(x, y, k=k)), rel=1e-9, abs=1e-9)


@QUICK
@given(points(), points(), points(), curvatures)
def test_distance_is_a_metric(x, y, z, k):
    d = lambda p, q: float(lorentz.distance(p, q, k=k))  # noqa: E731
    assert d(x, x) == 0.0
    assert d(x, y) == pytest.approx(d(y, x), rel=1e-12, abs=1e-12)
    assert d(x, z) <= d(x, y) + d(y, z) + 1e-9


@QUICK
@given(points(), points(), points())
def test_gyro_addition_is_an_isometry_with_inverse(x, y, z):
    moved_y, moved_z = lorentz.gyro_add(x, y), lorentz.gyro_add(x, z)
    scale = float(x.a + y.a + z.a)
    assert float(lorentz.distance(moved_y, moved_z)) == pytest.approx(
        float(lorentz.distance(y, z)), rel=1e-8, abs=1e-14 * 2.718**scale + 1e-9
    )
    near(lorentz.gyro_add(lorentz.gyro_negate(x), moved_y), y, scale=2 * float(x.a) + 2)
    origin = lorentz.origin_like(x.u)
    near(lorentz.gyro_add(x, origin), x, 2)
    near(lorentz.gyro_add(origin, x), x, 2)
    # Left cancellation at the origin is exact: the mean of one token is centred onto it.
    assert float(lorentz.gyro_add(lorentz.gyro_negate(x), x).a) <= 1e-15 * 2.718 ** float(x.a) * 4


@QUICK
@given(points(), points(), st.floats(-3, 3), st.floats(-3, 3))
def test_horospherical_shifts_are_a_group_of_isometries(x, y, s, t):
    shift = lambda p, r: lorentz.horospherical_shift(p, r, axis=1, shift_axis=0)  # noqa: E731
    scale = 8.0
    near(shift(shift(x, s), t), shift(x, s + t), scale)
    near(shift(shift(x, s), -s), x, scale)
    assert float(lorentz.distance(shift(x, s), shift(y, t))) == pytest.approx(
        float(lorentz.distance(x, shift(y, t - s))), rel=1e-6, abs=1e-6
    )


@QUICK
@given(points(), points(), points(), curvatures)
def test_transport_keeps_inner_products_and_turns_the_geodesic(x, y, z, k):
    to_y, to_z = lorentz.log_map(x, y, k=k), lorentz.log_map(x, z, k=k)
    moved_y = lorentz.parallel_transport(x, y, to_y, k=k)
    moved_z = lorentz.parallel_transport(x, y, to_z, k=k)
    expected = float(lorentz.inner(x, to_y, to_z))
    assert float(lorentz.inner(y, moved_y, moved_z)) == pytest.approx(expected, rel=1e-8, abs=1e-8)
    back = lorentz.log_map(y, x, k=k)
    assert float(moved_y.radial) == pytest.approx(-float(back.radial), rel=1e-7, abs=1e-7)
    assert torch.allclose(moved_y.perpendicular, -back.perpendicular, atol=1e-7)


@QUICK
@given(points(), st.floats(-3, 3), st.floats(-3, 3))
def test_scalar_multiplication(x, s, t):
    near(
        lorentz.gyro_scale(s, lorentz.gyro_scale(t, x)),
        lorentz.gyro_scale(s * t, x),
        10 * float(x.a),
    )
    near(
        lorentz.gyro_add(lorentz.gyro_scale(s, x), lorentz.gyro_scale(t, x)),
        lorentz.gyro_scale(s + t, x),
        6 * float(x.a) + 1,
    )


@QUICK
@given(st.lists(points(4.0), min_size=1, max_size=5), points(4.0), st.floats(1e-3, 1e3))
def test_centroid_commutes_with_isometries_and_ignores_scale(members, g, factor):
    a = torch.stack([p.a for p in members])
    u = torch.stack([p.u for p in members])
    weights = torch.linspace(1.0, 2.0, len(members), dtype=torch.float64)
    mean = lorentz.centroid((a, u), weights)
    near(lorentz.centroid((a, u), factor * weights), mean, 4)
    each = lorentz.Point(g.a.expand_as(a), g.u.expand_as(u))
    moved = lorentz.centroid(lorentz.gyro_add(each, (a, u)), weights)
    near(moved, lorentz.gyro_add(g, mean), 12)


@QUICK
@given(points(), st.sampled_from([1, 2, 4]))
def test_heads_round_trip(x, heads):
    near(lorentz.join_heads(lorentz.split_heads(x, heads)), x, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_heads_round_trip_far_out(dtype):
    a = torch.tensor([1e-6, 0.5, 8.0, 40.0, 85.0], dtype=dtype)
    u = torch.nn.functional.normalize(torch.randn(5, 12, dtype=dtype), dim=-1)
    back = lorentz.join_heads(lorentz.split_heads((a, u), 3))
    eps = torch.finfo(dtype).eps
    assert torch.allclose(back.a, a, rtol=4 * eps, atol=4 * eps)
    assert torch.allclose(back.u, u, atol=8 * eps)


def test_heads_at_the_origin():
    """Zero slices and whole origins: no NaN, and derivatives by the space coordinates."""
    space = torch.zeros(3, 6, dtype=torch.float64)
    space[1, :2] = 1.0
    space.requires_grad_()
    function = lambda s: lorentz.to_space(  # noqa: E731
        lorentz.join_heads(lorentz.split_heads(lorentz.from_space(s), 3))
    )
    jacobian = torch.autograd.functional.jacobian(function, space)
    expected = torch.eye(18, dtype=torch.float64).reshape(3, 6, 3, 6)
    assert torch.allclose(jacobian, expected, atol=1e-12)
