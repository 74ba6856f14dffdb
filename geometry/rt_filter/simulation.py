"""Trajectories of the radial–tangential model, for tests and pictures.

Source: RT-Filter paper, Eq. 1–5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_count, check_number
from .model import unit_direction
from .sphere import tangent_project
from .transport import transport_state

__all__ = ["Trajectories", "simulate_trajectories"]


class Trajectories(NamedTuple):
    """states and observations: (count, tokens, 2d); times: (tokens,); outliers: (count, tokens).

    What `simulate_trajectories` returns: float64, outliers boolean.

    Example:
        >>> from rpt.geometry.rt_filter import Trajectories
        >>> Trajectories._fields
        ('states', 'observations', 'times', 'outliers')
    """

    states: Tensor
    observations: Tensor
    times: Tensor
    outliers: Tensor


def simulate_trajectories(
    count: int,
    times: Tensor,
    frequencies: Tensor,
    *,
    decay: float = 0.0,
    magnitude: float = 1.0,
    radial_std: float = 0.1,
    tangential_std: float = 0.1,
    outlier_rate: float = 0.0,
    outlier_scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> Trajectories:
    """Draw x(t) = e^{(−μ+iω)t} x(0) and observations with radial and tangential noise (Eq. 1–5).

    Args:
        times: (tokens,), starting anywhere; frequencies: ω, (d,).
        radial_std, tangential_std: η_r and η_t per real coordinate, in units of `magnitude`'s.
        outlier_rate: probability that an observation is replaced by a random direction of
            `outlier_scale` times the true magnitude.

    Raises:
        ValueError: a count, deviation or rate out of range.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import simulate_trajectories
        >>> tracks = simulate_trajectories(8, torch.arange(20.0), torch.tensor([0.3, -1.1]))
        >>> tracks.states.shape, tracks.outliers.shape
        (torch.Size([8, 20, 4]), torch.Size([8, 20]))
    """
    check_count("count", count, 0)
    for name, value in (
        ("decay", decay),
        ("magnitude", magnitude),
        ("radial_std", radial_std),
        ("tangential_std", tangential_std),
        ("outlier_scale", outlier_scale),
        ("outlier_rate", outlier_rate),
        ("1 - outlier_rate", 1.0 - outlier_rate),
    ):
        check_number(name, value, 0.0)
    dimension = 2 * frequencies.shape[0]
    dtype = torch.float64

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    _, start = unit_direction(noise(count, 1, dimension))
    lag = (times - times[:1]).expand(count, -1)
    states = transport_state(
        (magnitude * start).expand(-1, times.shape[0], -1), lag, frequencies, decay
    )
    size, direction = unit_direction(states)
    tokens = times.shape[0]
    across = tangent_project(direction, noise(count, tokens, dimension))
    observed = states + tangential_std * across
    observed = observed + radial_std * noise(count, tokens, 1) * direction
    outliers = torch.rand(count, tokens, generator=generator, dtype=dtype) < outlier_rate
    _, wild = unit_direction(noise(count, tokens, dimension))
    wild = outlier_scale * size.unsqueeze(-1) * wild
    observed = torch.where(outliers.unsqueeze(-1), wild, observed)
    return Trajectories(states, observed, times, outliers)
