"""The exact radial–tangential negative log-likelihood and its first-order forms.

All functions take one current estimate and its transported observations, as lifted complex vectors
or plain real ones, in any floating dtype; `complex_features` chooses between x†y over C^d and the
real dot product. Constants of the Gaussian density and the factor ½ are left out, as in the paper.

Source: RT-Filter paper, Propositions 3 and 4, Corollary 5 (Eq. 8, appendix C.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .model import inner_product

__all__ = [
    "exact_radial_term",
    "exact_tangential_term",
    "first_order_radial_term",
    "first_order_tangential_term",
    "negative_log_likelihood",
]


def _correlation(u: Tensor, v: Tensor, complex_features: bool) -> tuple[Tensor, Tensor]:
    if complex_features:
        return inner_product(u.unsqueeze(-2), v)
    real = (u.unsqueeze(-2) * v).sum(-1)
    return real, torch.zeros_like(real)


def negative_log_likelihood(
    magnitude: Tensor,
    direction: Tensor,
    observations: Tensor,
    radial_variance: Tensor,
    tangential_variance: Tensor,
    *,
    complex_features: bool = True,
) -> Tensor:
    """Σ_j r_j† P_j r_j with r_j = x̂_j − m u, straight from the projectors (Proposition 3's left
    side).

    Args:
        magnitude: m, shape (…).
        direction: unit u, shape (…, n).
        observations: transported x̂_j, shape (…, observations, n).
        radial_variance, tangential_variance: σ_Σr², σ_Σt², shape (…, observations).
    """
    residual = observations - (magnitude.unsqueeze(-1) * direction).unsqueeze(-2)
    real, imaginary = _correlation(direction, residual, complex_features)
    along = real * real + imaginary * imaginary
    across = (residual * residual).sum(-1) - along
    return (along / radial_variance + across / tangential_variance).sum(-1)


def exact_radial_term(
    magnitude: Tensor,
    direction: Tensor,
    observations: Tensor,
    radial_variance: Tensor,
    *,
    complex_features: bool = True,
) -> Tensor:
    """L_R = Σ_j |u†x̂_j − m|²/σ_Σr² (Eq. 8)."""
    real, imaginary = _correlation(direction, observations, complex_features)
    off = real - magnitude.unsqueeze(-1)
    return ((off * off + imaginary * imaginary) / radial_variance).sum(-1)


def exact_tangential_term(
    direction: Tensor,
    observed_magnitudes: Tensor,
    observed_directions: Tensor,
    tangential_variance: Tensor,
    *,
    complex_features: bool = True,
) -> Tensor:
    """L_T = Σ_j m̂_j² (1 − |u†û_j|²)/σ_Σt² (Eq. 8)."""
    real, imaginary = _correlation(direction, observed_directions, complex_features)
    gap = 1.0 - real * real - imaginary * imaginary
    return (observed_magnitudes * observed_magnitudes * gap / tangential_variance).sum(-1)


def first_order_radial_term(
    magnitude: Tensor, observed_magnitudes: Tensor, radial_variance: Tensor
) -> Tensor:
    """L_R(m) = Σ_j (m − m̂_j)²/σ_Σr², decoupled from the direction (Proposition 4)."""
    off = magnitude.unsqueeze(-1) - observed_magnitudes
    return (off * off / radial_variance).sum(-1)


def first_order_tangential_term(
    direction: Tensor,
    observed_magnitudes: Tensor,
    observed_directions: Tensor,
    tangential_variance: Tensor,
) -> Tensor:
    """L_T(u) = Σ_j κ_j ‖u − û_j‖², κ_j = m̂_j²/σ_Σt² (Corollary 5)."""
    chord = torch.linalg.vector_norm(direction.unsqueeze(-2) - observed_directions, dim=-1)
    return (observed_magnitudes**2 / tangential_variance * chord * chord).sum(-1)
