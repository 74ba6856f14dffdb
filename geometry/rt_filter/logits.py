"""The step formulas of the filter, shared by every path: precisions, distances, logits.

Everything that depends on a pair of tokens only through its time lag sits in `LagTables`;
magnitudes and cosines join in `directional_logits` and `radial_logits`. All of it runs in float32 or better.

Source: RT-Filter paper, Algorithm 1 steps 3–5, appendix A.4 and C.2.1, extension G.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .parameters import FilterScalars
from .transport import decay_factor, process_variance

__all__ = [
    "LagTables",
    "PolarSettings",
    "directional_logits",
    "lag_tables",
    "masked_log_sum_exp",
    "masked_softmax",
    "radial_logits",
    "robust_filter_logits",
]


class PolarSettings(NamedTuple):
    """What is switched on. Hashable, so that compiled graphs specialise on it.

    weights: "student_t" or "exponential" influence weights, or "none" (Gaussian likelihood).
    magnitude_precision: whether κ grows with the transported magnitude.
    decay: whether magnitudes and variances decay with the lag.
    radial: "own" attention weights A_R, "shared" (A_T reused), "joint" (A_R times the directional
        influence weights; dense path only), or "off".
    radial_exponent: "likelihood" for ν_r + 1, "influence" for 1 (Algorithm 1 as printed).
    exact: the exact directional estimate of G.1 instead of the chordal one.
    process: whether there is process noise at all (its variance is costly to evaluate).
    """

    weights: str = "student_t"
    magnitude_precision: bool = True
    decay: bool = True
    radial: str = "own"
    radial_exponent: str = "likelihood"
    exact: bool = False
    process: bool = True


class LagTables(NamedTuple):
    """Functions of the lag alone; broadcastable against (batch, heads, queries, keys).

    κ̃ = slope·m² + offset; log κ = log κ̃ + log_ratio; ρ and ρ̃ as logarithm and value; E = decay.
    """

    slope: Tensor
    offset: Tensor
    log_ratio: Tensor
    log_rho: Tensor
    rho_tilde: Tensor
    decay: Tensor


def lag_tables(lag: Tensor, scalars: FilterScalars, settings: PolarSettings) -> LagTables:
    """Algorithm 1, step 3: the parts of κ, κ̃, ρ and ρ̃ that depend on the lag.

    Args:
        lag: t_i − t_j of any shape; scalars must broadcast against it.
    """
    zero = torch.zeros_like(lag * scalars.decay)
    if settings.decay:
        factor = decay_factor(lag, scalars.decay)
    else:
        factor = torch.ones_like(zero)
    noise: Tensor | float = 0.0
    if settings.decay and settings.process:
        noise = scalars.process_noise * process_variance(lag, scalars.decay)
    squared = factor * factor
    tangential = scalars.key_tangential * squared + noise + scalars.inflation_tangential
    residual = tangential + scalars.query_tangential
    if settings.magnitude_precision:
        slope, offset = squared / residual, scalars.magnitude_floor / residual
    else:
        slope, offset = zero, 1.0 / residual
    radial = scalars.key_radial * squared + noise + scalars.inflation_radial
    return LagTables(
        slope=slope,
        offset=offset,
        log_ratio=torch.log(residual / tangential),
        log_rho=-torch.log(radial),
        rho_tilde=1.0 / (radial + scalars.query_radial),
        decay=factor,
    )


def directional_logits(
    gap: Tensor,
    key_magnitude: Tensor,
    tables: LagTables,
    scalars: FilterScalars,
    settings: PolarSettings,
) -> Tensor:
    """L_T = log κ − (ν_t + 1) log(1 + d²/ν_t), or log κ − d²/ν_t with exponential weights.

    Args:
        gap: 1 − c_ij ≥ 0 (chordal, d² = 2 κ̃ gap) or 1 − |c_ij|² (exact, d² = κ̃ gap).
        key_magnitude: m_j, (…, 1, keys).

    Returns:
        Logits of gap's shape, without the inverse temperature.
    """
    kappa_tilde = tables.slope * (key_magnitude * key_magnitude) + tables.offset
    scale = scalars.sphere_scale * (1.0 if settings.exact else 2.0) / scalars.nu_tangential
    distance = scale * kappa_tilde * gap
    log_kappa = torch.log(kappa_tilde) + tables.log_ratio
    if settings.weights == "none":
        return log_kappa + torch.zeros_like(gap)
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

    Args:
        projected: c_ij M̂_ij, the transported magnitude seen along the query's direction.
        query_magnitude: m_i, (…, queries, 1).
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

    Args:
        product: Re(q̃_i†k̃_j), (…, queries, keys); query_squared (…, queries, 1), key_squared
            (…, 1, keys) squared norms; lag broadcastable against product.
        dimension: complex features per head.
    """
    if decay:
        factor = decay_factor(lag, scalars.decay)
        noise = scalars.process_noise * process_variance(lag, scalars.decay)
    else:
        factor, noise = torch.ones_like(lag * scalars.decay), torch.zeros_like(lag)
    squared = factor * factor
    variance = noise + scalars.key_tangential * squared + scalars.inflation_tangential
    residual = (query_squared + squared * key_squared - 2.0 * factor * product).clamp_min(0.0)
    distance = residual / ((variance + scalars.query_tangential) * dimension)
    distance = distance / scalars.nu_tangential
    robust = (scalars.nu_tangential + 1.0) * torch.log1p(distance) if student_t else distance
    return -torch.log(variance) - robust, factor


def masked_softmax(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the last dimension where `allowed`; a row with nothing allowed is zero.

    Logits of −inf count as not allowed. Gradients stay finite in every case.
    """
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    peak = logits.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    unnormalised = torch.exp(logits - peak)
    total = unnormalised.sum(-1, keepdim=True)
    return unnormalised / total.masked_fill(total == 0, 1.0)


def masked_log_sum_exp(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """log Σ_j exp(logits) over allowed keys, (…,): −inf for a fully masked row, gradients
    finite.
    """
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    peak = logits.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    total = torch.exp(logits - peak).sum(-1)
    empty = total == 0
    value = torch.log(total.masked_fill(empty, 1.0)) + peak.squeeze(-1)
    return value.masked_fill(empty, float("-inf"))
