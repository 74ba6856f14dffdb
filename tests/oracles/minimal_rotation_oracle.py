"""Transport by the minimal rotation, and axial closure, line by line in NumPy float64."""

import numpy as np


def transported(m, stored, p, t, *, beta1, tau):
    """m, h₋, u, q and ρ after one step of one parameter (RPT specification, sections 2 and 3).

    The momentum is carried by the minimal rotation that takes the stored frame to the live one.
    """
    n = np.linalg.norm(p)
    h = p / max(n, tau)
    have = np.linalg.norm(stored) > 0.5
    q, rho = 1.0, 1.0
    new_stored = h
    if n <= tau:
        rho, h, new_stored = 0.0, np.zeros_like(p), stored
    elif have:
        q = float(np.clip(stored @ h, -1, 1))
        rho = float(np.clip(q, 0, 1))
        if 1 + q > tau:
            a = m @ stored
            z = m - a * stored
            carried = a * h + z - (z @ h) / (1 + q) * (stored + h)
            across = carried - (carried @ h) * h
            m = (1 - rho) * m + rho * ((carried @ h) * h + rho * across)
    m = beta1 * m + (1 - beta1) * p
    mean = m / (1 - beta1**t)
    u = beta1 * mean + (1 - beta1) * p + rho * beta1 * (n - mean @ h) * h
    return m, new_stored, u, q, rho
