"""Inverse roots by scipy's fractional powers in float64, and at sixty digits."""

import mpmath
import numpy as np
import scipy.linalg


def covariances(gradients, beta2):
    """L̂ and R̂ of one matrix from its gradients (steps, rows, cols) (RPT specification, section 1)."""
    _, rows, cols = gradients.shape
    left, right = np.zeros((rows, rows)), np.zeros((cols, cols))
    for g in gradients:
        left = beta2 * left + (1 - beta2) * g @ g.T / cols
        right = beta2 * right + (1 - beta2) * g.T @ g / rows
    correction = 1 - beta2 ** len(gradients)
    return left / correction, right / correction


def matrix_power(matrix, power):
    """A fractional power of a symmetric positive definite matrix, by scipy's Schur method."""
    return scipy.linalg.fractional_matrix_power(matrix, power).real


def floored_root(matrix, power=-0.25, *, ridge):
    """V max(Λ, floor)^power Vᵀ, floor = ridge · mean(max(Λ, 0)) (RPT specification, section 1)."""
    values, vectors = scipy.linalg.eigh(matrix)
    floor = ridge * np.maximum(values, 0).mean()
    lifted = (vectors * np.maximum(values, floor)) @ vectors.T
    return matrix_power(lifted, power)


def root_at_sixty_digits(matrix, power):
    """V Λ^power Vᵀ of a symmetric positive definite matrix (RPT specification, section 1, without floor)."""
    with mpmath.workdps(60):
        values, vectors = mpmath.eigsy(mpmath.matrix(matrix.tolist()))
        root = vectors * mpmath.diag([value ** mpmath.mpf(power) for value in values]) * vectors.T
        return np.array(root.tolist(), dtype=float)
