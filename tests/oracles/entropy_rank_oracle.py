"""The entropy rank of an observation, by singular values in NumPy float64."""

import numpy as np


def entropy_rank(x: np.ndarray, delta: np.ndarray, ridge: float = 1e-7) -> float:
    """Of activations (B, n) and cotangents (B, m), centred, not sketched (RPT specification, section 6)."""
    x, delta = x - x.mean(0), delta - delta.mean(0)
    x, delta = x / np.sqrt((x**2).mean()), delta / np.sqrt((delta**2).mean())
    c, k = x.T @ x / len(x), x.T @ delta / len(x)
    operator = np.linalg.solve(c + ridge * np.trace(c) / len(c) * np.eye(len(c)), k)
    p = np.linalg.svd(operator, compute_uv=False) ** 2
    p = p[p > 0] / p.sum()
    return float(np.exp(-(p * np.log(p)).sum()) / min(operator.shape))
