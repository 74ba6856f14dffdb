"""Polar factors by singular values, in NumPy float64."""

import numpy as np
import scipy.linalg


def polar_factor(matrix):
    """The orthogonal factor U of M = UH, scipy's (RPT specification, section 4: what O is near to)."""
    return scipy.linalg.polar(matrix)[0]


def on_singular_values(matrix, steps, *, tight):
    """Newton–Schulz X ← aX + (bA + cA²)X, A = XXᵀ, one singular value at a time.

    RPT specification, section 4. `tight` divides by the Schatten 8-norm first, else by the Frobenius norm.
    """
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    scale = (s**8).sum() ** 0.125 if tight else np.linalg.norm(s)
    s = s / scale
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return u * s @ vh


def polar_share(u, factor, alpha):
    """u with a share α of its polar factor, as long as before (RPT specification, section 4)."""
    blend = (1 - alpha) * u + alpha * factor * np.linalg.norm(u) / np.linalg.norm(factor)
    return blend * np.linalg.norm(u) / np.linalg.norm(blend)
