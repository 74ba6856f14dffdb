"""Residual connections: the polar boost (Eq. 12), the ambient boost and the space sum."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..ops.coordinates import from_unit_space, unit_space
from ..ops.gyro import boost_step, gyro_add, gyro_scale
from ..ops.point import Point, PointLike
from .checks import check_number
from .norm import read_tokens, refuse_causal, token_weights


class BoostResidual(nn.Module):
    """x ↦ the boost of x along and across its own direction, by α times the block's output.

    The radial steps of a sample are centred over its tokens, so that no token moves outward on
    average and the radius needs no cap. That uses the mean over tokens: **not causal**, for
    encoders only; `center=False` has no means and may be used anywhere.

    Args:
        alpha: initial step size; learned, never decayed.
        center: whether to centre the radial steps over the tokens.
    """

    undecayed_parameters = ("alpha",)

    def __init__(self, alpha: float = 0.1, *, center: bool = True) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(check_number("alpha", alpha)))
        self.center = center

    def forward(
        self,
        x: PointLike,
        update: PointLike,
        key_padding_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Point:
        """Move tokens x (…, P), (…, P, n) by the block output `update` of the same shapes.

        Args:
            x: the residual stream.
            update: f(x).
            key_padding_mask: (…, P) bool, True at padding: takes no part in the mean step, and is
                read as the origin.
            is_causal: refused unless `center` is False.
        """
        if self.center:
            refuse_causal(is_causal, "BoostResidual(center=True)")
        (a, u), update = read_tokens(key_padding_mask, "BoostResidual", x, update)
        weights = None
        if self.center:
            weights, _ = token_weights(a, key_padding_mask)
        return boost_step((a, u), update, self.alpha, weights)

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """No matrix, no site."""
        return []

    def extra_repr(self) -> str:
        return f"center={self.center}"


class GyroResidual(nn.Module):
    """x ⊕ (α ⊗ f(x)): one whole boost per token, the ablation before the polar form."""

    undecayed_parameters = ("alpha",)

    def __init__(self, alpha: float = 0.1) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(check_number("alpha", alpha)))

    def forward(
        self, x: PointLike, update: PointLike, key_padding_mask: Tensor | None = None
    ) -> Point:
        """Move tokens x by the block output `update` of the same shapes; padding is the origin."""
        x, update = read_tokens(key_padding_mask, "GyroResidual", x, update)
        return gyro_add(x, gyro_scale(self.alpha, update))

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """No matrix, no site."""
        return []


class SpaceResidual(nn.Module):
    """Add space coordinates (Chen et al. 2022): the residual the paper's ablation starts from."""

    def forward(
        self, x: PointLike, update: PointLike, key_padding_mask: Tensor | None = None
    ) -> Point:
        """Add `update` to x by their space coordinates; padding is the origin."""
        (a, u), (b, v) = read_tokens(key_padding_mask, "SpaceResidual", x, update)
        return from_unit_space(unit_space(a, u) + unit_space(b, v))

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """No matrix, no site."""
        return []
