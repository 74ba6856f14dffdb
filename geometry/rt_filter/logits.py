"""The step formulas of the filter, shared by every path: precisions, distances, logits.

Everything that depends on a pair of tokens only through its time lag sits in `LagTables`;
magnitudes and cosines join in `directional_logits` and `radial_logits`. All of it runs in float32 or better.

Source: RT-Filter paper, Algorithm 1 steps 3–5, appendix A.4 and C.2.1, extension G.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .parameters import FilterScalars
from .transport import process_variance

__all__ = [
    "LagTables",
    "PolarSettings",
    "directional_logits",
    "lag_tables",
    "radial_logits",
    "robust_filter_logits",
]


class PolarSettings(NamedTuple):
    """What is switched on, as `PolarAttention` and `rt_filter` say; weights may be "none", too.

    exact: the directional estimate of G.1 instead of the chordal one. process: whether there is
    process noise at all, whose variance is costly. The dense path alone serves radial="joint".
    """

    weights: str = "student_t"
    magnitude_precision: bool = True
    decay: bool = True
    radial: str = "own"
    radial_exponent: str = "likelihood"
    exact: bool = False
    process: bool = False


class LagTables(NamedTuple):
    """Functions of the lag alone; broadcastable against (batch, heads, queries, keys).

    With x = slope·m² + offset: log κ = log x + log_kappa and log κ̃ = log x + log_tilde. The larger
    of slope and offset is 1, so that neither κ nor κ̃ leaves the dtype's range at long lags, where
    E² does. ρ and ρ̃ as logarithm and value; E = decay.
    """

    slope: Tensor
    offset: Tensor
    log_kappa: Tensor
    log_tilde: Tensor
    log_rho: Tensor
    rho_tilde: Tensor
    decay: Tensor


def lag_tables(lag: Tensor, scalars: FilterScalars, settings: PolarSettings) -> LagTables:
    """Algorithm 1, step 3: what depends on the lag t_i − t_j alone, of the lag's shape."""
    log_decay = _log_decay(lag, scalars, settings.decay)
    noise = _noise(lag, scalars, settings.decay and settings.process)
    tangential, residual = _log_variances(
        log_decay,
        noise + scalars.inflation_tangential,
        scalars.key_tangential,
        scalars.query_tangential,
    )
    radial, radial_residual = _log_variances(
        log_decay, noise + scalars.inflation_radial, scalars.key_radial, scalars.query_radial
    )
    if settings.magnitude_precision:
        floor = _log(scalars.magnitude_floor)
        largest = torch.maximum(2.0 * log_decay, floor)
        slope, offset = torch.exp(2.0 * log_decay - largest), torch.exp(floor - largest)
    else:
        largest = slope = torch.zeros_like(log_decay)
        offset = torch.ones_like(log_decay)
    return LagTables(
        slope=slope,
        offset=offset,
        log_kappa=largest - tangential,
        log_tilde=_bounded(largest - residual),
        log_rho=-radial,
        rho_tilde=torch.exp(_bounded(-radial_residual)),
        decay=torch.exp(log_decay),
    )


def _log(value: Tensor) -> Tensor:
    """log of what may be zero: −inf there, with gradient 0."""
    positive = value > 0
    return torch.where(positive, torch.log(torch.where(positive, value, 1.0)), -float("inf"))


def _bounded(log: Tensor) -> Tensor:
    """Bounded so that its exponential can be squared."""
    return log.clamp_max(0.45 * math.log(torch.finfo(log.dtype).max))


def _log_decay(lag: Tensor, scalars: FilterScalars, decay: bool) -> Tensor:
    """log E = −μ|lag|, from time differences, never as a ratio of two exponentials."""
    return -scalars.decay * lag.abs() if decay else torch.zeros_like(lag * scalars.decay)


def _noise(lag: Tensor, scalars: FilterScalars, process: bool) -> Tensor | float:
    return scalars.process_noise * process_variance(lag, scalars.decay) if process else 0.0


def _log_variances(
    log_decay: Tensor, added: Tensor, key: Tensor, query: Tensor
) -> tuple[Tensor, Tensor]:
    """Logarithms of σ²_Σ = η²_k E² + added, and of the residual's variance σ²_Σ + η²_q."""
    transported = torch.logaddexp(_log(key) + 2.0 * log_decay, _log(added))
    return transported, torch.logaddexp(transported, _log(query))


def directional_logits(
    gap: Tensor,
    key_magnitude: Tensor,
    tables: LagTables,
    scalars: FilterScalars,
    settings: PolarSettings,
) -> Tensor:
    """L_T = log κ − (ν_t + 1) log(1 + d²/ν_t), or log κ − d²/ν_t with exponential weights.

    Of the shape of gap = 1 − c_ij ≥ 0 (chordal, d² = 2 κ̃ gap) or 1 − |c_ij|² (exact, d² = κ̃ gap),
    without the inverse temperature. key_magnitude: m_j, (…, 1, keys).
    """
    core = tables.slope * (key_magnitude * key_magnitude) + tables.offset
    # An observation that is exactly zero knows no direction: the smallest weight there is.
    core = core.clamp_min(torch.finfo(core.dtype).tiny)
    log_kappa = torch.log(core) + tables.log_kappa
    if settings.weights == "none":
        return log_kappa + torch.zeros_like(gap)
    scale = scalars.sphere_scale * (1.0 if settings.exact else 2.0) / scalars.nu_tangential
    distance = scale * torch.exp(tables.log_tilde) * core * gap
    if settings.weights == "exponential":
        return log_kappa - distance
    return log_kappa - (scalars.nu_tangential + 1.0) * torch.log1p(distance)


def radial_logits(
    projected: Tensor,
    query_magnitude: Tensor,
    tables: LagTables,
    scalars: FilterScalars,
    settings: PolarSettings,
) -> Tensor:
    """L_R = log ρ − (ν_r + 1) log(1 + d_r²/ν_r), d_r² = ρ̃ (c_ij M̂_ij − m_i)²; appendix C.2.1.

    projected: c_ij M̂_ij, magnitudes seen along the query's direction; query_magnitude: m_i, (…, 1).
    """
    off = projected - query_magnitude
    distance = tables.rho_tilde * off * off / scalars.nu_radial
    if settings.weights == "none":
        return tables.log_rho + torch.zeros_like(distance)
    if settings.weights == "exponential":
        return tables.log_rho - distance
    exponent = scalars.nu_radial + 1.0 if settings.radial_exponent == "likelihood" else 1.0
    return tables.log_rho - exponent * torch.log1p(distance)


def robust_filter_logits(
    product: Tensor,
    query_squared: Tensor,
    key_squared: Tensor,
    lag: Tensor,
    scalars: FilterScalars,
    dimension: int,
    *,
    student_t: bool = True,
    decay: bool = True,
) -> tuple[Tensor, Tensor]:
    """Robust Filter Attention's logits and decay factor (appendix A.4), in ambient coordinates.

    L = log P − (ν + 1) log(1 + P̃ ‖R‖²/(ν d)), ‖R‖² = ‖q‖² + E²‖k‖² − 2E Re(q†k).

    product: Re(q̃_i†k̃_j), (…, queries, keys); query_squared (…, queries, 1) and key_squared
    (…, 1, keys) squared norms; dimension: complex features per head.
    """
    log_decay = _log_decay(lag, scalars, decay)
    factor = torch.exp(log_decay)
    variance, with_query = _log_variances(
        log_decay,
        _noise(lag, scalars, decay) + scalars.inflation_tangential,
        scalars.key_tangential,
        scalars.query_tangential,
    )
    residual = query_squared + factor * factor * key_squared - 2.0 * factor * product
    distance = residual.clamp_min(0.0) * torch.exp(_bounded(-with_query))
    distance = distance / (dimension * scalars.nu_tangential)
    robust = (scalars.nu_tangential + 1.0) * torch.log1p(distance) if student_t else distance
    return -variance - robust, factor
