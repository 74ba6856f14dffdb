"""From an estimate to the increment of a state: Algorithm 1, step 7, and the gain of extension G.3."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import AttentionWeights
from .model import multiply_by_i
from .sphere import tangent_project

__all__ = ["FilterStep", "across", "bayes_gain"]


class FilterStep(NamedTuple):
    """The result of one filtering step.

    output: (batch, tokens, d_model), the increment of the residual stream, in the input's dtype.
    weights: attention weights, or None.
    log_precision: with gain="bayes", log λ⁺ of each token's direction, (batch, heads, tokens).
    """

    output: Tensor
    weights: AttentionWeights | None
    log_precision: Tensor | None


def across(own: Tensor, direction: Tensor, *, exact: bool) -> Tensor:
    """The part of `direction` across a state's own unit direction; both (…, 2d).

    With the exact directional estimate of G.1 the complex projector: no component along iV, either.
    """
    tangential = tangent_project(own, direction)
    return tangent_project(multiply_by_i(own), tangential) if exact else tangential


def bayes_gain(
    log_found: Tensor, log_before: Tensor | None, *, carry: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor]:
    """K = λ_ū/(λ⁻ + λ_ū) and log λ⁺ = log(λ⁻ + λ_ū), λ⁻ = carry·λ⁺_before + λ_0 (G.3).

    Args:
        log_found: log λ_ū, (batch, heads, tokens).
        log_before: log λ⁺ of the layer before, or None in the first.
        carry, floor: carry and λ_0, (heads,).
    """
    prior = torch.log(floor).to(log_found.dtype)[:, None].expand_as(log_found)
    if log_before is not None:
        carried = torch.log(carry).to(log_found.dtype)[:, None]
        prior = torch.logaddexp(log_before.to(log_found.dtype) + carried, prior)
    return torch.sigmoid(log_found - prior), torch.logaddexp(log_found, prior)
