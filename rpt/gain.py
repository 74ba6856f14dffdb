"""The coherence-controlled scalar gain of a parameter group (RPT guide; off in the default preset)."""

from __future__ import annotations

from torch import Tensor

__all__ = ["next_gain"]


def next_gain(
    gain: Tensor, coherence: Tensor, *, rate: float, target: float, low: float, high: float
) -> Tensor:
    """g <- clip(exp(ln g + rate (q̄ - target)), low, high).

    Args:
        gain: g, 0-d float64.
        coherence: q̄, the mean frame coherence of the group's parameters that had one, 0-d.
        rate: `gain_rate`.
        target: `target_coherence`.
        low: `min_gain`.
        high: `max_gain`.
    """
    return (gain.log() + rate * (coherence.to(gain) - target)).exp().clamp(low, high)
