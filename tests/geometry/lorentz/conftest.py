"""An independent oracle: the textbook ambient formulas in mpmath at 60 digits."""

import sys
from pathlib import Path

import mpmath
import pytest
import torch

# The models compared with, `baselines`, are among the examples.
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

DIGITS = 60


class AmbientOracle:
    """Ambient Lorentz operations on single points; points are lists (time, space…)."""

    def __init__(self, k):
        mpmath.mp.dps = DIGITS
        self.k = mpmath.mpf(k)
        self.root = mpmath.sqrt(self.k)

    def number(self, x):
        return mpmath.mpf(float(x))

    def vector(self, x):
        return [mpmath.mpf(float(value)) for value in x]

    def point(self, a, u):
        """A stored pair; the direction is made exactly unit (or 0) first."""
        a, u = self.number(a), self.vector(u)
        norm = mpmath.sqrt(sum(value * value for value in u))
        u = [value / norm if norm else value for value in u]
        return [self.root * mpmath.cosh(a)] + [self.root * mpmath.sinh(a) * value for value in u]

    def inner(self, x, y):
        return -x[0] * y[0] + sum(p * q for p, q in zip(x[1:], y[1:], strict=True))

    def combine(self, *terms):
        return [sum(c * x[i] for c, x in terms) for i in range(len(terms[0][1]))]

    def scale(self, c, x):
        return [c * value for value in x]

    def distance(self, x, y):
        return self.root * mpmath.acosh(max(mpmath.mpf(1), -self.inner(x, y) / self.k))

    def radius(self, x):
        return self.distance([self.root] + [mpmath.mpf(0)] * (len(x) - 1), x)

    def centroid(self, points, weights):
        total = self.combine(*[(w, x) for w, x in zip(weights, points, strict=True)])
        return self.scale(self.root / mpmath.sqrt(-self.inner(total, total)), total)

    def exp(self, x, xi):
        omega = mpmath.sqrt(abs(self.inner(xi, xi))) / self.root
        ratio = mpmath.sinh(omega) / omega if omega else mpmath.mpf(1)
        return self.combine((mpmath.cosh(omega), x), (ratio, xi))

    def log(self, x, y):
        gamma = -self.inner(x, y) / self.k
        d = mpmath.acosh(gamma)
        ratio = d / mpmath.sinh(d) if d else mpmath.mpf(1)
        return self.scale(ratio, self.combine((mpmath.mpf(1), y), (-gamma, x)))

    def transport(self, x, y, xi):
        factor = self.inner(y, xi) / (self.k - self.inner(x, y))
        return self.combine((mpmath.mpf(1), xi), (factor, x), (factor, y))

    def gyro_add(self, x, y):
        dot = sum(p * q for p, q in zip(x[1:], y[1:], strict=True))
        factor = dot / (self.root * (x[0] + self.root)) + y[0] / self.root
        space = [q + factor * p for p, q in zip(x[1:], y[1:], strict=True)]
        return [mpmath.sqrt(self.k + sum(s * s for s in space)), *space]

    def shift(self, x, t, axis=0, shift_axis=1):
        t, nu = self.number(t), x[0] - x[1 + axis]
        moved = list(x)
        change = t * x[1 + shift_axis] + t * t * nu / 2
        moved[1 + shift_axis] += t * nu
        moved[0] += change
        moved[1 + axis] += change
        return moved

    def tangent(self, a, u, radial, perpendicular):
        """Ambient tangent vector from frame components, made exactly tangent."""
        x = self.point(a, u)
        unit = self.scale(1 / (self.root * mpmath.sinh(self.number(a))), x[1:]) if float(a) else []
        space = self.vector(perpendicular)
        if unit:
            along = sum(p * q for p, q in zip(space, unit, strict=True))
            space = [p - along * q for p, q in zip(space, unit, strict=True)]
            r = self.number(radial)
            time = r * x[0] * 0 + r * mpmath.sinh(self.number(a))
            cosh = mpmath.cosh(self.number(a))
            return [time] + [r * cosh * q + p for p, q in zip(space, unit, strict=True)]
        return [mpmath.mpf(0), *space]


@pytest.fixture(params=[0.3, 1.0, 2.7], ids=lambda k: f"k={k}")
def oracle(request):
    return AmbientOracle(request.param)


@pytest.fixture
def directions():
    """Unit directions (count, n) in float64."""

    def make(count, n=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        u = torch.randn(count, n, generator=generator, dtype=torch.float64)
        return u / u.norm(dim=-1, keepdim=True)

    return make
