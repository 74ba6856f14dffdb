"""Residual connections: the polar boost (Eq. 12), the ambient boost and the space sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...checks import check_number
from ..ops.coordinates import from_unit_space, unit_space
from ..ops.gyro import boost_step, gyro_add, gyro_scale
from ..ops.point import Point, PointLike
from .norm import read_tokens, refuse_causal, token_weights
from .sites import NoSites


class BoostResidual(NoSites):
    """x ↦ the boost of x along and across its own direction, by α times the block's output.

    The radial steps of a sample are centred over its tokens, so that no token moves outward on
    average and the radius needs no cap. That uses the mean over tokens: **not causal**, for
    encoders only; `center=False` has no means and may be used anywhere.

    Args:
        alpha: initial step size; learned, never decayed.
        center: whether to centre the radial steps over the tokens.

    Raises:
        TypeError, ValueError: a mask that is no padding mask, or causal use of means.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(4, 5, 8))
        >>> lorentz.BoostResidual()(x, update=x).u.shape
        torch.Size([4, 5, 8])
    """

    undecayed_parameters = ("alpha",)

    def __init__(self, alpha: float = 0.1, *, center: bool = True) -> None:
        super().__init__()
        check_number("alpha", alpha)
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))
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

        `key_padding_mask` is (…, P) bool: padding takes no part in the mean step, and is read as
        the origin. `is_causal` is refused unless `center` is False.
        """
        if self.center:
            refuse_causal(is_causal, "BoostResidual(center=True)")
        (a, u), update = read_tokens(key_padding_mask, "BoostResidual", x, update)
        weights = None
        if self.center:
            weights, _ = token_weights(a, key_padding_mask)
        return boost_step((a, u), update, self.alpha, weights)

    def extra_repr(self) -> str:
        return f"center={self.center}"


class GyroResidual(NoSites):
    """x ⊕ (α ⊗ f(x)): one whole boost per token, the ablation before the polar form.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(4, 5, 8))
        >>> lorentz.GyroResidual()(x, update=x).u.shape
        torch.Size([4, 5, 8])
    """

    undecayed_parameters = ("alpha",)

    def __init__(self, alpha: float = 0.1) -> None:
        super().__init__()
        check_number("alpha", alpha)
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))

    def forward(
        self, x: PointLike, update: PointLike, key_padding_mask: Tensor | None = None
    ) -> Point:
        """Move tokens x by the block output `update` of the same shapes; padding is the origin."""
        x, update = read_tokens(key_padding_mask, "GyroResidual", x, update)
        return gyro_add(x, gyro_scale(self.alpha, update))


class SpaceResidual(NoSites):
    """Add space coordinates (Chen et al. 2022): the residual the paper's ablation starts from.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(4, 5, 8))
        >>> lorentz.SpaceResidual()(x, update=x).u.shape
        torch.Size([4, 5, 8])
    """

    def forward(
        self, x: PointLike, update: PointLike, key_padding_mask: Tensor | None = None
    ) -> Point:
        """Add `update` to x by their space coordinates; padding is the origin."""
        (a, u), (b, v) = read_tokens(key_padding_mask, "SpaceResidual", x, update)
        return from_unit_space(unit_space(a, u) + unit_space(b, v))
