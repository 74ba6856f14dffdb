"""Lorentz operations by the ambient formulas of the Polar-ViT paper, in mpmath at 60 digits."""

import mpmath

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
        """A stored pair; the direction is made exactly unit (or 0) first (Eq. 2)."""
        a, u = self.number(a), self.vector(u)
        norm = mpmath.sqrt(sum(value * value for value in u))
        u = [value / norm if norm else value for value in u]
        return [self.root * mpmath.cosh(a)] + [self.root * mpmath.sinh(a) * value for value in u]

    def inner(self, x, y):
        """⟨x, y⟩_L, the products of Eq. 3."""
        return -x[0] * y[0] + sum(p * q for p, q in zip(x[1:], y[1:], strict=True))

    def combine(self, *terms):
        return [sum(c * x[i] for c, x in terms) for i in range(len(terms[0][1]))]

    def scale(self, c, x):
        return [c * value for value in x]

    def distance(self, x, y):
        """Eq. 1."""
        return self.root * mpmath.acosh(max(mpmath.mpf(1), -self.inner(x, y) / self.k))

    def radius(self, x):
        return self.distance([self.root] + [mpmath.mpf(0)] * (len(x) - 1), x)

    def centroid(self, points, weights):
        """Eq. 4."""
        total = self.combine(*[(w, x) for w, x in zip(weights, points, strict=True)])
        return self.scale(self.root / mpmath.sqrt(-self.inner(total, total)), total)

    def exp(self, x, xi):
        """cosh ω x + sinhc ω ξ, which Eq. 16 writes in polar form."""
        omega = mpmath.sqrt(abs(self.inner(xi, xi))) / self.root
        ratio = mpmath.sinh(omega) / omega if omega else mpmath.mpf(1)
        return self.combine((mpmath.cosh(omega), x), (ratio, xi))

    def log(self, x, y):
        """D/sinh D (y − cosh D x), which Eq. 19 writes in polar form."""
        gamma = -self.inner(x, y) / self.k
        d = mpmath.acosh(gamma)
        ratio = d / mpmath.sinh(d) if d else mpmath.mpf(1)
        return self.scale(ratio, self.combine((mpmath.mpf(1), y), (-gamma, x)))

    def transport(self, x, y, xi):
        """App. B.5."""
        factor = self.inner(y, xi) / (self.k - self.inner(x, y))
        return self.combine((mpmath.mpf(1), xi), (factor, x), (factor, y))

    def gyro_add(self, x, y):
        """Eq. 20."""
        dot = sum(p * q for p, q in zip(x[1:], y[1:], strict=True))
        factor = dot / (self.root * (x[0] + self.root)) + y[0] / self.root
        space = [q + factor * p for p, q in zip(x[1:], y[1:], strict=True)]
        return [mpmath.sqrt(self.k + sum(s * s for s in space)), *space]

    def shift(self, x, t, axis=0, shift_axis=1):
        """Eq. 10."""
        t, nu = self.number(t), x[0] - x[1 + axis]
        moved = list(x)
        change = t * x[1 + shift_axis] + t * t * nu / 2
        moved[1 + shift_axis] += t * nu
        moved[0] += change
        moved[1 + axis] += change
        return moved

    def tangent(self, a, u, radial, perpendicular):
        """Ambient tangent vector from frame components, made exactly tangent (Eq. 13)."""
        x = self.point(a, u)
        unit = self.scale(1 / (self.root * mpmath.sinh(self.number(a))), x[1:]) if float(a) else []
        space = self.vector(perpendicular)
        if unit:
            along = sum(p * q for p, q in zip(space, unit, strict=True))
            space = [p - along * q for p, q in zip(space, unit, strict=True)]
            r = self.number(radial)
            time = r * mpmath.sinh(self.number(a))
            cosh = mpmath.cosh(self.number(a))
            return [time] + [r * cosh * q + p for p, q in zip(space, unit, strict=True)]
        return [mpmath.mpf(0), *space]
