"""PolarLinear: a fully connected layer that maps direction and radius as separate channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ...checks import check_choice, check_count, check_number
from ..ops.coordinates import klein_row
from ..ops.point import Point, PointLike, promote_point, radius_limit, without_autocast
from ..ops.scalar import asinh_exp, log_cosh, log_of_norm, norm_and_direction
from .curvature import Curvature, as_curvature_module
from .radius import RadiusRule, anchored_log_radius, make_radius_rule
from .sites import NoSites


class DirectionMap(nn.Linear):
    """The matrix of a PolarLinear, a module of its own so that an observer sees it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(1 + in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, 1 + n) → (…, n′), time first."""
        # In float32 also under autocast: bfloat16 directions place a point no better than radius 6.
        with without_autocast(x.device.type):
            return nn.functional.linear(x, self.weight.to(x.dtype))


def _is_homogeneous(activation: Callable[[Tensor], Tensor] | None) -> bool:
    if isinstance(activation, nn.ReLU | nn.LeakyReLU | nn.Identity):
        return True
    return activation in (None, torch.relu, nn.functional.relu, nn.functional.leaky_relu)


class PolarLinear(nn.Module):
    """Polar fully connected layer (Polar-ViT paper, Eq. 8): points of dimension n → n′.

    h = φ(W x) gives the output direction h/‖h‖; the output radius is a′ = arsinh(e^ℓ) with
    ℓ = β ln(‖h‖/√k) + λa + φᵀχ + φ₀, χ = tanh(a) u. At initialisation β = 1 and the rest is 0,
    which is exactly the Lorentz layer whose space coordinates are h. h = 0 gives the origin, with
    zero gradient.

    A radius of any size overflows nothing for φ the identity, relu or leaky relu; other activations
    limit the input radius to `radius_limit`. The radius parameters are stored as deviations from
    their initial values (φ₀ beside the buffer `radius_offset` that `calibrate_` sets), so that
    weight decay pulls them toward those values.

    Args:
        in_features: n, the dimension of the input points.
        out_features: n′.
        k: curvature −1/k, a number or a shared `Curvature`.
        activation: φ, applied to the space coordinates h; None is the identity.
        radius: "anchored", the rule above; "lorentz", the plain Lorentz layer without radius
            parameters; or another of `RADIUS_RULES` (ablations, see `radius.py`).
        radius_std: standard deviation of a random start of the anchored rule's parameters
            around the anchor (an ablation; φ is scaled by 1/√n).
        init: "xavier" for MLPs and embeddings or "orthogonal" for attention, as in the paper.

    For the optimizer: `direction.weight` (n′ × (n+1), time column first) is a Euclidean matrix
    and the layer's observation site; the other parameters are vectors.

    Raises:
        ValueError: a size below 1, an option that does not exist, or points of another dimension.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.PolarLinear(8, 4)(lorentz.exp_map_origin(torch.randn(5, 8))).u.shape
        torch.Size([5, 4])
    """

    radius_offset: Tensor
    calibrated: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        k: float | Curvature = 1.0,
        activation: Callable[[Tensor], Tensor] | None = None,
        radius: str = "anchored",
        radius_std: float = 0.0,
        init: str = "xavier",
    ) -> None:
        super().__init__()
        check_count("in_features", in_features)
        check_count("out_features", out_features)
        check_number("radius_std", radius_std, 0.0)
        check_choice("init", init, ("xavier", "orthogonal"))
        self.in_features, self.out_features = in_features, out_features
        self.curvature = as_curvature_module(k)
        self.direction = DirectionMap(in_features, out_features)
        self.activation = activation
        self.homogeneous = _is_homogeneous(activation)
        self.radius_rule, self.radius_std, self.init = radius, radius_std, init
        self.other_rule: RadiusRule | None = make_radius_rule(radius, in_features)
        if radius == "anchored":
            self.norm_power_change = nn.Parameter(torch.zeros(()))
            self.radius_gain = nn.Parameter(torch.zeros(()))
            self.radius_direction = nn.Parameter(torch.zeros(in_features))
            self.radius_bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("radius_offset", torch.zeros(()))
        self.register_buffer("calibrated", torch.tensor(False))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W anew and put the anchored radius parameters back to their start."""
        with torch.no_grad():
            if self.init == "orthogonal":
                nn.init.orthogonal_(self.direction.weight)
            else:
                nn.init.xavier_uniform_(self.direction.weight)
            if self.radius_rule == "anchored":
                for p in (
                    self.norm_power_change,
                    self.radius_gain,
                    self.radius_direction,
                    self.radius_bias,
                ):
                    p.zero_()
                    if self.radius_std > 0:
                        p.normal_(std=self.radius_std / max(p.numel(), 1) ** 0.5)
            self.radius_offset.zero_()
            self.calibrated.fill_(False)

    def forward(self, x: PointLike, row: Tensor | None = None) -> Point:
        """Map points (…), (…, n) to points (…), (…, n′).

        `row` is `klein_row(a, u)` of the same points, where several layers read them.
        """
        a, u = promote_point(x, self.in_features)
        # W reads x/(√k cosh a) = (1, χ), and ln cosh a is added in the log: nothing overflows.
        row = klein_row(a, u) if row is None else row
        h = self.direction(row)
        if self.homogeneous:
            if self.activation is not None:
                h = self.activation(h)
            log_scale = log_cosh(a)
        else:
            root = self.curvature().to(a.dtype).sqrt()
            scale = root * torch.cosh(a.clamp(max=radius_limit(a.dtype)))
            assert self.activation is not None
            h = self.activation(scale.unsqueeze(-1) * h)
            log_scale = -torch.log(root)
        # The zero vector has no direction to learn from: no gradient, instead of a huge one.
        norm, direction = norm_and_direction(h, at_zero=math.inf)
        log_norm = log_of_norm(norm) + log_scale
        radius = asinh_exp(self.log_radius(log_norm, a, row[..., 1:], u))
        return Point(radius * (norm > 0), direction)

    def log_radius(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        """ℓ = ln sinh a′ from ln(‖h‖/√k), the input radius (…), Klein vector and u (…, n)."""
        offset = self.radius_offset.to(a.dtype)
        if self.other_rule is not None:
            return self.other_rule(log_norm, a, chi, u) + offset
        if self.radius_rule == "lorentz":
            return log_norm + offset
        with without_autocast(a.device.type):
            by_direction = chi @ self.radius_direction.to(a.dtype)
        return anchored_log_radius(
            log_norm,
            a,
            by_direction,
            power_change=self.norm_power_change,
            gain=self.radius_gain,
            bias=self.radius_bias.to(a.dtype) + offset,
        )

    def shift_log_radius_(self, shift: Tensor) -> None:
        """Move the offset φ₀ by a number."""
        with torch.no_grad():
            self.radius_offset.add_(shift.to(self.radius_offset.dtype))
            self.calibrated.fill_(True)

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """The direction map, which reads (1, χ)."""
        return [self.direction]

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, radius={self.radius_rule!r}"


class PolarMLP(NoSites):
    """Two polar layers with an activation between them.

    Args:
        features: dimension of input and output points.
        hidden_features: dimension in between.
        k: curvature −1/k, a number or a shared `Curvature`.
        activation: applied to the space coordinates of the hidden layer.
        radius, radius_std: the radius rule of both layers, see `PolarLinear`.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.PolarMLP(8, 32)(lorentz.exp_map_origin(torch.randn(5, 8))).u.shape
        torch.Size([5, 8])
    """

    layer = PolarLinear

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        k: float | Curvature = 1.0,
        activation: Callable[[Tensor], Tensor] | None = torch.relu,
        radius: str = "anchored",
        radius_std: float = 0.0,
    ) -> None:
        super().__init__()
        curvature = as_curvature_module(k)
        self.first, self.second = (
            self.layer(*sizes, k=curvature, activation=phi, radius=radius, radius_std=radius_std)
            for sizes, phi in (
                ((features, hidden_features), activation),
                ((hidden_features, features), None),
            )
        )

    def forward(self, x: PointLike) -> Point:
        """Map points (…), (…, n) to points of the same shapes."""
        return self.second(self.first(x))
