"""Gyro layer norm over the tokens of a sample (Polar-ViT paper, section 4.4), batch norm of points
(Bdeir et al. 2024), and a layer norm of space coordinates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...checks import check_count, check_number
from ..ops.centroid import centroid
from ..ops.coordinates import from_unit_space, unit_space
from ..ops.gyro import gyro_add, gyro_negate, gyro_scale
from ..ops.maps import exp_map_origin
from ..ops.point import Point, PointLike, promote, promote_point
from .curvature import Curvature, as_curvature_module
from .sites import NoSites


def read_tokens(
    key_padding_mask: Tensor | None, layer: str, *points: PointLike
) -> list[tuple[Tensor, Tensor]]:
    """Points (…, P), (…, P, n) in one dtype, padded ones as origins, so that nothing they held, NaN
    included, reaches a mean or a gradient. What is no (…, P) padding mask is refused."""
    read = promote(*points)
    if key_padding_mask is None:
        return read
    says = (
        f"{layer} takes a boolean padding mask of shape {tuple(read[0][0].shape)} (True at padding)"
    )
    if key_padding_mask.dtype != torch.bool:
        raise TypeError(f"{says}, got {key_padding_mask.dtype}")
    if key_padding_mask.shape != read[0][0].shape:
        raise ValueError(
            f"{says}, got {tuple(key_padding_mask.shape)}; attention masks (causal ones among them)"
            " have no meaning for it"
        )
    column = key_padding_mask.unsqueeze(-1)
    return [(a.masked_fill(key_padding_mask, 0.0), u.masked_fill(column, 0.0)) for a, u in read]


def token_weights(a: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Equal weights (…, P) over the tokens that are not padding, and their number (…, 1)."""
    if key_padding_mask is None:
        count = torch.full_like(a[..., :1], float(a.shape[-1]))
        return torch.full_like(a, 1.0 / max(a.shape[-1], 1)), count
    kept = (~key_padding_mask).to(a.dtype)
    count = kept.sum(-1, keepdim=True)
    return kept / count.clamp(min=1.0), count


def refuse_causal(is_causal: bool, layer: str) -> None:
    """Raise ValueError for causal use."""
    if is_causal:
        raise ValueError(
            f"{layer} takes means over all tokens of a sample, later ones among them: it is not "
            "causal. Use it in encoders only"
        )


class GyroLayerNorm(NoSites):
    """Centre the tokens of a sample at their centroid, rescale to a learned spread, translate.

    x̂ = β ⊕ (γ/√(σ² + ε) ⊗ ((⊖x̄) ⊕ x)), σ² the mean squared distance to x̄. At the start γ =
    √k arsinh√(n/k), the radius that a Euclidean layer norm gives, and β is the origin.

    It uses the mean over tokens: **not causal**, for encoders only. A sample with a single token
    has no spread; its token becomes the bias point β. Padding takes no part in the means; padded
    tokens are read as the origin and normalised like others.

    Args:
        features: n.
        k: curvature −1/k, a number or a shared `Curvature`.
        eps: ε, in units of squared radius.

    Parameters: `log_gain`, the deviation of ln γ from its initial value (a scale parameter, not
    decayed), and `bias` (n,), the tangent vector at the origin that β is the exponential of.

    Raises:
        TypeError, ValueError: a mask that is no padding mask, causal use, or another dimension.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(4, 5, 8))
        >>> lorentz.GyroLayerNorm(8)(x).u.shape
        torch.Size([4, 5, 8])
    """

    initial_log_gain: Tensor
    undecayed_parameters = ("log_gain", "bias")

    def __init__(self, features: int, *, k: float | Curvature = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        check_count("features", features)
        check_number("eps", eps, 0.0)
        self.features, self.eps = features, eps
        self.curvature = as_curvature_module(k)
        start = self.curvature.initial
        gain = math.sqrt(start) * math.asinh(math.sqrt(features / start))
        self.log_gain = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("initial_log_gain", torch.tensor(math.log(gain)))

    def forward(
        self,
        x: PointLike,
        key_padding_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Point:
        """Normalise points (…, P), (…, P, n) over P; the mask (…, P) is True at padding."""
        refuse_causal(is_causal, "GyroLayerNorm")
        ((a, u),) = read_tokens(key_padding_mask, "GyroLayerNorm", x)
        if a.dim() == 0 or u.shape[-1] != self.features:
            raise ValueError(
                f"expected points (…, tokens) and (…, tokens, {self.features}), got "
                f"{tuple(a.shape)} and {tuple(u.shape)}"
            )
        k = self.curvature().to(a.dtype)
        weights, count = token_weights(a, key_padding_mask)
        mean = centroid((a, u), weights)
        mean = Point(mean.a.unsqueeze(-1), mean.u.unsqueeze(-2))
        # Centring is an isometry: a token's distance to the mean is its radius afterwards.
        centred = gyro_add(gyro_negate(mean), (a, u))
        variance = k * (weights * centred.a.square()).sum(-1, keepdim=True)
        gain = torch.exp(self.log_gain.to(a.dtype) + self.initial_log_gain.to(a.dtype))
        # A lone token lies at its own mean; what rounding leaves there must not be blown up.
        factor = torch.where(count > 1, gain * torch.rsqrt(variance + self.eps), 0.0)
        scaled = gyro_scale(factor, centred)
        if key_padding_mask is not None or a.shape[-1] < 2:
            scaled = Point(scaled.a, torch.where((count > 1).unsqueeze(-1), scaled.u, 0.0))
        return gyro_add(exp_map_origin(self.bias.to(a.dtype), k=k), scaled)

    def extra_repr(self) -> str:
        return f"{self.features}"


class SpaceLayerNorm(NoSites, nn.LayerNorm):
    """A Euclidean layer norm of the space coordinates (in units of √k): what the ablation of the
    paper starts from. It takes no mean over tokens.

    Radii are limited to twice `radius_limit`, where the space coordinates stay finite. Gain and
    bias are scale parameters, not decayed. Masks are checked as in `GyroLayerNorm`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> x = lorentz.exp_map_origin(torch.randn(4, 5, 8))
        >>> lorentz.SpaceLayerNorm(8)(x).u.shape
        torch.Size([4, 5, 8])
    """

    undecayed_parameters = ("weight", "bias")

    def __init__(self, features: int, *, k: object = None, eps: float = 1e-5) -> None:
        check_count("features", features)
        check_number("eps", eps, 0.0)
        super().__init__(features, eps=eps)

    def forward(  # type: ignore[override]
        self, x: PointLike, key_padding_mask: Tensor | None = None
    ) -> Point:
        """Points (…), (…, n) to points of the same shapes; padded ones are read as the origin."""
        ((a, u),) = read_tokens(key_padding_mask, "SpaceLayerNorm", x)
        space = unit_space(a, u)
        # A layer norm does not change when its argument is scaled: no square overflows.
        largest = space.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
        weight, bias = self.weight.to(a.dtype), self.bias.to(a.dtype)
        eps = self.eps / (largest * largest).clamp(max=1e30)
        scaled = space / largest
        centred = scaled - scaled.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return from_unit_space(centred * torch.rsqrt(variance + eps) * weight + bias)


class PolarBatchNorm2d(NoSites):
    """x ↦ β ⊕ (γ/(δ + ε) ⊗ ((⊖x̄) ⊕ x)), x̄ the centroid of all pixels of the batch.

    δ is the *mean distance* to x̄, not a root mean square: as published. Since (⊖x̄) ⊕ x has the
    distance of x to x̄ as its radius, δ is the mean of radii that are needed anyway. Running
    estimates replace both in evaluation: x̄ by the centroid of old and new with weights
    (1 − momentum, momentum), δ by the same mean.

    Args:
        channels: n.
        k: curvature −1/k, a number or a shared `Curvature`.
        momentum: of the running estimates.
        eps: ε, a distance.

    Parameters: `log_gain` (ln γ) and `bias` (n,), the tangent vector at the origin that β is the
    exponential of: scale parameters, never decayed.

    Raises:
        ValueError: an option that makes no sense, or points of another dimension.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> image = lorentz.exp_map_origin(torch.randn(1, 4, 4, 3))
        >>> lorentz.PolarBatchNorm2d(3)(image).u.shape
        torch.Size([1, 4, 4, 3])
    """

    running_radius: Tensor
    running_direction: Tensor
    running_distance: Tensor
    undecayed_parameters = ("log_gain", "bias")

    def __init__(
        self,
        channels: int,
        *,
        k: float | Curvature = 1.0,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_count("channels", channels)
        check_number("momentum", momentum, 0.0)
        if momentum > 1.0:
            raise ValueError(f"momentum must be at most 1, got {momentum!r}")
        check_number("eps", eps, 0.0)
        self.channels, self.momentum, self.eps = channels, momentum, eps
        self.curvature = as_curvature_module(k)
        self.log_gain = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_radius", torch.zeros(()))
        self.register_buffer("running_direction", torch.zeros(channels))
        self.register_buffer("running_distance", torch.ones(()))

    def forward(self, x: PointLike) -> Point:
        """Points (…), (…, n) to points of the same shapes; means over all leading dimensions.

        An empty batch leaves the running estimates alone.
        """
        a, u = promote_point(x, self.channels)
        root = self.curvature().to(a.dtype).sqrt()
        flat = Point(a.reshape(-1), u.reshape(-1, self.channels))
        if self.training:
            mean = centroid(flat)
        else:
            mean = Point(self.running_radius.to(a.dtype), self.running_direction.to(a.dtype))
        centred = gyro_add(gyro_negate(Point(mean.a[None], mean.u[None])), flat)
        if self.training:
            distance = root * centred.a.sum() / max(1, centred.a.numel())
            if centred.a.numel():
                self._update(mean, distance)
        else:
            distance = self.running_distance.to(a.dtype)
        factor = torch.exp(self.log_gain.to(a.dtype)) / (distance + self.eps)
        bias = exp_map_origin(self.bias.to(a.dtype), k=self.curvature())
        result = gyro_add(Point(bias.a[None], bias.u[None]), gyro_scale(factor, centred))
        return Point(result.a.reshape(a.shape), result.u.reshape(u.shape))

    @torch.no_grad()
    def _update(self, mean: Point, distance: Tensor) -> None:
        dtype = mean.a.dtype
        both = Point(
            torch.stack([self.running_radius.to(dtype), mean.a.detach()]),
            torch.stack([self.running_direction.to(dtype), mean.u.detach()]),
        )
        weights = both.a.new_tensor([1.0 - self.momentum, self.momentum])
        moved = centroid(both, weights)
        self.running_radius.copy_(moved.a)
        self.running_direction.copy_(moved.u)
        self.running_distance.lerp_(distance.detach().to(self.running_distance), self.momentum)

    def extra_repr(self) -> str:
        return f"{self.channels}"
