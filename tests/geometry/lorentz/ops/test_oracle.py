"""Every operation against the textbook formula at 60 digits, k ∈ {0.3, 1, 2.7}, radii 0 … 40.

Errors are geodesic distances between our result and the oracle's, measured by the oracle, and
bounded by a multiple of the resolution of the stored points (Proposition 2).
"""

import math

import mpmath
import pytest
import rpt.geometry.lorentz as lorentz
import torch

RADII = [0.0, 1e-6, 0.5, 4.0, 12.0, 40.0]
EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
DTYPES = [torch.float64, torch.float32]


def resolution(dtype, *radii):
    """Distance at which a stored point of such a radius lies from the true one, k = 1."""
    a = max(radii)
    return EPS[dtype] * (1.0 + a + math.sinh(a))


def pairs(directions, dtype, far_only=False):
    u = directions(2 * len(RADII) ** 2).to(dtype)
    u = u / u.norm(dim=-1, keepdim=True)
    index = 0
    for a in RADII:
        for b in RADII:
            zero = torch.zeros_like(u[0])
            x = (torch.tensor(a, dtype=dtype), u[index] if a else zero)
            y = (torch.tensor(b, dtype=dtype), u[index + 1] if b else zero)
            index += 2
            yield x, y


def close(oracle, ours, expected, bound):
    """Geodesic distance from our stored result to the expected ambient point, in units of √k."""
    error = oracle.distance(oracle.point(*ours), expected) / oracle.root
    assert float(error) <= bound, f"off by {float(error):.3g}, allowed {bound:.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_distances_of_separated_points(oracle, directions, dtype):
    k = float(oracle.k)
    for x, y in pairs(directions, dtype):
        expected = oracle.distance(oracle.point(*x), oracle.point(*y))
        tolerance = 8 * EPS[dtype] * (1.0 + float(x[0]) + float(y[0])) * math.sqrt(k)
        assert abs(float(lorentz.distance(x, y, k=k)) - float(expected)) <= tolerance
        squared = float(lorentz.squared_distance(x, y, k=k))
        scale = 16 * EPS[dtype] * (1.0 + float(x[0]) + float(y[0])) ** 2 * k
        assert abs(squared - float(expected**2)) <= scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a", [0.5, 4.0, 8.0, 12.0, 15.0, 17.0])
def test_distances_of_near_points_to_the_resolution(oracle, directions, dtype, a):
    for spread in (1e-3, 0.3):
        u = directions(1)[0]
        v = u + spread / math.sinh(a) * directions(1, seed=3)[0]
        x = (torch.tensor(a, dtype=dtype), (u / u.norm()).to(dtype))
        y = (torch.tensor(a + spread / 2, dtype=dtype), (v / v.norm()).to(dtype))
        ours = float(lorentz.distance(x, y, k=float(oracle.k)))
        expected = oracle.distance(oracle.point(*x), oracle.point(*y))
        allowed = 4 * resolution(dtype, a) * float(oracle.root)
        assert abs(ours - float(expected)) <= allowed


@pytest.mark.parametrize("a", [30.0, 60.0, 85.0, 200.0, 1000.0])
def test_distances_beyond_the_radius_limit(oracle, directions, a):
    mpmath.mp.dps = 950
    u = directions(2).float()
    k = float(oracle.k)
    x = (torch.tensor(a), u[0])
    for y in ((torch.tensor(a + 1), u[1]), (torch.tensor(a + 1), u[0]), (torch.tensor(0.5), u[1])):
        expected = float(oracle.distance(oracle.point(*x), oracle.point(*y)))
        assert float(lorentz.distance(x, y, k=k)) == pytest.approx(expected, rel=1e-5)
    origin = lorentz.origin_like(u[0])
    assert float(lorentz.distance(origin, x, k=k)) == pytest.approx(math.sqrt(k) * a, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions(oracle, directions, dtype):
    k = float(oracle.k)
    for (a, u), _ in pairs(directions, dtype):
        ambient = lorentz.to_ambient((a, u), k=k)
        expected = oracle.point(a, u)
        for ours, true in zip(ambient, expected, strict=True):
            assert float(abs(float(ours) - true)) <= 8 * EPS[dtype] * float(1 + a) * float(
                expected[0]
            )
        close(
            oracle,
            lorentz.from_ambient(ambient, k=k),
            expected,
            6 * (1 + float(a)) * resolution(dtype, float(a)),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponential_map(oracle, directions, dtype):
    k = float(oracle.k)
    tangents = directions(4, n=5, seed=1).to(dtype)
    for (a, u), _ in pairs(directions, dtype):
        for length, direction in zip((1e-8, 0.2, 3.0, 20.0), tangents, strict=True):
            step = length * direction * math.sqrt(k)
            radial = step[0] if a > 0 else 0 * step[0]
            perpendicular = step[1:] - (step[1:] @ u) * u
            ours = lorentz.exp_map((a, u), (radial, perpendicular), k=k)
            xi = oracle.tangent(a, u, radial, perpendicular)
            expected = oracle.exp(oracle.point(a, u), xi)
            reach = max(float(a), float(oracle.radius(expected) / oracle.root))
            close(oracle, ours, expected, 20 * (1 + length) * resolution(dtype, reach))


def test_inward_steps_past_the_origin(oracle, directions):
    k, u = float(oracle.k), directions(1)[0]
    for a in (0.3, 5.0, 12.0):
        for beyond in (-0.25, 0.0, 0.25):
            step = torch.tensor(-(a + beyond) * math.sqrt(k), dtype=torch.float64)
            x = (torch.tensor(a, dtype=torch.float64), u)
            ours = lorentz.exp_map(x, (step, torch.zeros_like(u)), k=k)
            assert float(ours.a) == pytest.approx(abs(beyond), abs=1e-14 * (1 + a))
            if beyond:
                assert torch.allclose(ours.u, -math.copysign(1, beyond) * u)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logarithmic_map(oracle, directions, dtype):
    k = float(oracle.k)
    for x, y in pairs(directions, dtype):
        radial, perpendicular = lorentz.log_map(x, y, k=k)
        ambient = oracle.tangent(*x, radial, perpendicular)
        expected = oracle.log(oracle.point(*x), oracle.point(*y))
        difference = oracle.combine((mpmath.mpf(1), ambient), (mpmath.mpf(-1), expected))
        error = mpmath.sqrt(abs(oracle.inner(difference, difference))) / oracle.root
        a, b = float(x[0]), float(y[0])
        # An angle error of eps moves the far point, seen from x, by eps sinh a.
        allowed = 30 * EPS[dtype] * (1 + a + b) ** 2
        assert float(error) <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
def test_parallel_transport(oracle, directions, dtype):
    k = float(oracle.k)
    tangents = directions(2, n=5, seed=2).to(dtype)
    for x, y in pairs(directions, dtype):
        (a, u), (b, v) = x, y
        step = tangents[0]
        radial = step[0] if a > 0 else 0 * step[0]
        perpendicular = step[1:] - (step[1:] @ u) * u
        ours = lorentz.parallel_transport(x, y, (radial, perpendicular), k=k)
        xi = oracle.tangent(a, u, radial, perpendicular)
        expected = oracle.transport(oracle.point(*x), oracle.point(*y), xi)
        ambient = oracle.tangent(b, v, *ours)
        difference = oracle.combine((mpmath.mpf(1), ambient), (mpmath.mpf(-1), expected))
        error = mpmath.sqrt(abs(oracle.inner(difference, difference)))
        assert float(error) <= 30 * EPS[dtype] * (1 + float(a + b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gyroaddition(oracle, directions, dtype):
    k = float(oracle.k)
    for x, y in pairs(directions, dtype):
        ours = lorentz.gyro_add(x, y, k=k)
        expected = oracle.gyro_add(oracle.point(*x), oracle.point(*y))
        reach = float(oracle.radius(expected) / oracle.root)
        close(oracle, ours, expected, 20 * (1 + reach) * resolution(dtype, reach))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a", [4.0, 8.0, 12.0, 15.0])
def test_gyro_centring_of_clusters(oracle, directions, dtype, a):
    u = directions(1)[0]
    v = u + 0.7 / math.sinh(a) * directions(1, seed=5)[0]
    x = (torch.tensor(a, dtype=dtype), (u / u.norm()).to(dtype))
    y = (torch.tensor(a - 0.3, dtype=dtype), (v / v.norm()).to(dtype))
    ours = lorentz.gyro_add(lorentz.gyro_negate(x), y, k=float(oracle.k))
    expected = oracle.gyro_add(oracle.point(x[0], -x[1]), oracle.point(*y))
    close(oracle, ours, expected, 4 * resolution(dtype, a))


@pytest.mark.parametrize("dtype", DTYPES)
def test_centroid(oracle, directions, dtype):
    k = float(oracle.k)
    for a in RADII:
        for spread in (1.0, 1e-2, 1.0 / math.sinh(a + 0.1)):
            base = directions(1)[0]
            u = base + spread * directions(6, seed=4)
            u = (u / u.norm(dim=-1, keepdim=True)).to(dtype)
            radii = torch.linspace(a, a + 0.5, 6, dtype=dtype)
            weights = torch.tensor([0.5, 1e-5, 0.2, 0.1, 0.0, 0.19999], dtype=dtype)
            ours = lorentz.centroid((radii, u), weights, k=k)
            points = [oracle.point(p, q) for p, q in zip(radii, u, strict=True)]
            expected = oracle.centroid(points, oracle.vector(weights))
            close(oracle, ours, expected, 12 * (1 + a) * resolution(dtype, a + 0.5))
            rows = lorentz.centroids((radii, u), weights[None])
            close(
                oracle,
                (rows.a[0], rows.u[0]),
                expected,
                12 * (1 + a) * resolution(dtype, a + 0.5),
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_horospherical_shift(oracle, directions, dtype):
    k = float(oracle.k)
    for (a, u), _ in pairs(directions, dtype):
        for t in (1e-3, 0.5, -4.0):
            ours = lorentz.horospherical_shift((a, u), t, k=k, axis=1, shift_axis=3)
            expected = oracle.shift(oracle.point(a, u), t, 1, 3)
            reach = max(float(a), float(oracle.radius(expected) / oracle.root))
            close(oracle, ours, expected, 20 * (1 + reach) * resolution(dtype, reach))
            true = float(oracle.distance(oracle.point(a, u), expected))
            law = float(lorentz.horospherical_distance((a, u), t, k=k, axis=1))
            assert law == pytest.approx(true, rel=60 * EPS[dtype] * (1 + float(a)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_space_distance(oracle, directions, dtype):
    k = float(oracle.k)
    for x, y in pairs(directions, dtype):
        p, q = lorentz.to_half_space(x), lorentz.to_half_space(y)
        ours = float(lorentz.half_space_squared_distance(p, q, k=k))
        expected = float(oracle.distance(oracle.point(*x), oracle.point(*y)) ** 2)
        scale = 30 * EPS[dtype] * (1.0 + float(x[0]) + float(y[0])) ** 2 * k
        assert abs(ours - expected) <= scale


def test_shift_near_the_ideal_point(oracle):
    """Close to e_axis the coordinate 1 − u_axis cancels unless taken from the other components."""
    k = float(oracle.k)
    for a in (8.0, 15.0):
        u = torch.tensor([1.0, 3e-6, -2e-6, 1e-6])
        x = (torch.tensor(a), u)
        law = float(lorentz.horospherical_distance(x, 2.0, k=k))
        true = float(oracle.distance(oracle.point(*x), oracle.shift(oracle.point(*x), 2.0)))
        assert law == pytest.approx(true, rel=1e-5)
