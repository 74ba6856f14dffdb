"""What the Polar-ViT paper replaces in its model, one part at a time (Tables 5 and 6)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from rpt.geometry.checks import check_choice, check_number
from rpt.geometry.lorentz import (
    BoostResidual,
    GyroLayerNorm,
    HorosphericalEncoding,
    LorentzMLR,
    PatchEmbedding,
    Point,
    PolarLinear,
    PolarMLP,
    PolarMultiheadAttention,
    PolarViT,
    PositionTable,
    ScoreCoordinates,
    ViTConfig,
    axis_boost,
    centroid,
    exp_map_origin,
    from_space,
    gyro_add,
    gyro_scale,
    log_map_origin,
    polar_score_coordinates,
    to_space,
)
from rpt.geometry.lorentz.layers.sites import NoSites
from rpt.geometry.lorentz.models.vit import PolarLayers
from rpt.geometry.lorentz.ops.scalar import asinh_exp, log_sinh
from torch import Tensor, nn

__all__ = ["ABLATION", "RADIUS_ABLATION", "RADIUS_RULES", "AblationConfig", "AblationViT"]

RADIUS_RULES = (
    "anchored",
    "lorentz",
    "power",
    "affine_klein",
    "affine_direction",
    "sigmoid",
    "bounded",
)
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "radius": RADIUS_RULES,
    "norm": ("gyro", "space"),
    "residual": ("boost", "gyro", "space"),
    "encoding": ("horospherical", "boost", None),
    "readout": ("centroid", "class_token"),
    "head": ("mlr", "linear"),
}
_START = {"radius": "lorentz", "encoding": None}

# Each row of Table 5 and what it is built from; "ambient" names the arithmetic.
ABLATION: dict[str, tuple[str, dict[str, str | None]]] = {
    "split-head Lorentz ViT, class token": (
        "ambient",
        {**_START, "norm": "space", "residual": "space", "readout": "class_token"},
    ),
    "+ polar arithmetic, gyro layer norm": ("polar", {**_START, "residual": "space"}),
    "+ boost residual": ("polar", {**_START, "residual": "gyro"}),
    "+ polar boost residual": ("polar", _START),
    "+ PolarLinear": ("polar", {"encoding": None}),
    "+ horospherical encoding (Polar-ViT)": ("polar", {}),
    "Lorentz boost encoding instead": ("polar", {"encoding": "boost"}),
}

# Each row of Table 6.
RADIUS_ABLATION: dict[str, dict[str, str | float]] = {
    "anchored gain": {"radius": "anchored"},
    "anchored gain, σ = 0.1": {"radius": "anchored", "radius_std": 0.1},
    "anchored gain, σ = 0.2": {"radius": "anchored", "radius_std": 0.2},
    "free power of the norm": {"radius": "power"},
    "affine, Klein input": {"radius": "affine_klein"},
    "affine, unit-direction input": {"radius": "affine_direction"},
    "sigmoid-bounded": {"radius": "sigmoid"},
    "hard bound": {"radius": "bounded"},
}


@dataclass(frozen=True)
class AblationConfig(ViTConfig):
    """The settings of a `ViTConfig`, and the parts to take.

    Args:
        radius: rule for the output radius of every fully connected layer (Table 6).
        radius_std: random deviation of the anchored rule's start (Table 6).
        norm: "gyro" layer norm, or "space": a Euclidean layer norm of the space coordinates.
        residual: "boost" (Eq. 12), "gyro" (one whole boost), "space" (sum of coordinates).
        encoding: of queries and keys: "horospherical", "boost" or None.
        readout: "centroid" of all tokens (the mean, in a Euclidean model) or "class_token", for
            models without an encoding: it has no place among the patches.
        head: "mlr", or "linear" on the tangent vector at the origin.

    A Euclidean model reads sizes, position table and readout.
    """

    radius: str = "anchored"
    radius_std: float = 0.0
    norm: str = "gyro"
    residual: str = "boost"
    encoding: str | None = "horospherical"
    readout: str = "centroid"
    head: str = "mlr"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_number("radius_std", self.radius_std, 0.0)


class RadiusRule(nn.Module):
    """ℓ = ln sinh a′ (…) from ln(‖h‖/√k) (…), the input radius a (…), χ = tanh(a) u and u (…, n).

    All but `HardBound` start from a random point.
    """

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        raise NotImplementedError


class FreePower(RadiusRule):
    """ℓ = β ln(‖h‖/√k) + φ₀ with β drawn around 1 with standard deviation ½."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(1.0 + 0.5 * torch.randn(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        return self.power.to(a.dtype) * log_norm + self.bias.to(a.dtype)


class Affine(RadiusRule):
    """a′ = softplus(λa + φᵀχ + φ₀), or φᵀu in place of φᵀχ: positive, and its slope 1 far out."""

    def __init__(self, features: int, *, klein: bool) -> None:
        super().__init__()
        self.klein = klein
        self.gain = nn.Parameter(1.0 + 0.5 * torch.randn(()))
        self.direction = nn.Parameter(torch.randn(features) / math.sqrt(features))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        read = chi if self.klein else u
        radius = self.gain.to(a.dtype) * a + (read * self.direction.to(a.dtype)).sum(-1)
        return log_sinh(nn.functional.softplus(radius + self.bias.to(a.dtype)) + 1e-6)


class SigmoidBounded(RadiusRule):
    """cosh a′ = 1 + e^s σ(φᵀχ + φ₀), bounded (Chen et al. 2022, with χ for ambient coordinates)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.direction = nn.Parameter(torch.randn(features) / math.sqrt(features))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        logit = (chi * self.direction.to(a.dtype)).sum(-1) + self.bias.to(a.dtype)
        # cosh² − 1 = (cosh − 1)(cosh + 1): from the logarithm of cosh − 1, which may be tiny.
        log_rise = self.log_scale.to(a.dtype) + nn.functional.logsigmoid(logit)
        return 0.5 * (log_rise + torch.log(torch.exp(log_rise) + 2.0))


class HardBound(RadiusRule):
    """The plain Lorentz layer cut at a′ = 4: no gradient beyond."""

    def forward(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        return log_sinh(asinh_exp(log_norm).clamp(max=4.0))


def make_radius_rule(name: str, features: int) -> RadiusRule | None:
    """The rule of this name for inputs of dimension n; None for the two that `PolarLinear` has."""
    check_choice("radius", name, RADIUS_RULES)
    if name == "power":
        return FreePower()
    if name in ("affine_klein", "affine_direction"):
        return Affine(features, klein=name == "affine_klein")
    if name == "sigmoid":
        return SigmoidBounded(features)
    return HardBound() if name == "bounded" else None


class AblationLinear(PolarLinear):
    """`PolarLinear` with any of the `RADIUS_RULES`."""

    def __init__(
        self, in_features: int, out_features: int, *, radius: str = "anchored", **options: Any
    ) -> None:
        own = radius if radius == "anchored" else "lorentz"
        super().__init__(in_features, out_features, radius=own, **options)
        self.other_rule = make_radius_rule(radius, in_features)

    def log_radius(self, log_norm: Tensor, a: Tensor, chi: Tensor, u: Tensor) -> Tensor:
        if self.other_rule is None:
            return super().log_radius(log_norm, a, chi, u)
        return self.other_rule(log_norm, a, chi, u) + self.radius_offset.to(a.dtype)

    @torch.no_grad()
    def scatter_(self, std: float) -> None:
        """Draw the anchored rule's parameters around the anchor; φ is scaled by 1/√n."""
        for p in (
            self.norm_power_change,
            self.radius_gain,
            self.radius_direction,
            self.radius_bias,
        ):
            p.normal_(std=std / p.numel() ** 0.5)


class AblationMLP(PolarMLP):
    """`PolarMLP` with any radius rule."""

    layer = AblationLinear


class AblationPatchEmbedding(PatchEmbedding):
    """`PatchEmbedding` with any radius rule."""

    layer = AblationLinear


class AblationMultiheadAttention(PolarMultiheadAttention):
    """`PolarMultiheadAttention` with any radius rule."""

    layer = AblationLinear


class BoostEncoding(HorosphericalEncoding):
    """Lorentz boosts in place of shifts (after HoPE, Dai et al. 2025): one of rapidity m ρ_h / M per
    grid axis, along space axis 0 (and 2)."""

    def forward(
        self, x: Any, positions: Tensor | None = None, *, offset: int = 0
    ) -> ScoreCoordinates:
        a, u, steps = self.read(x, positions, offset)
        for axis, step in enumerate(steps):
            a, u = axis_boost((a, u), step, axis=2 * axis)
        return polar_score_coordinates((a, u))


class SpaceLayerNorm(NoSites, nn.LayerNorm):
    """A Euclidean layer norm of the space coordinates (in units of √k): what the paper starts from."""

    undecayed_parameters = ("weight", "bias")

    def __init__(self, features: int, *, k: object = None) -> None:
        super().__init__(features)

    def forward(self, x: Any) -> Any:
        """Points (…), (…, n) to points of the same shapes."""
        return from_space(super().forward(to_space(x)))


class GyroResidual(NoSites):
    """x ⊕ (α ⊗ f(x)): one whole boost per token, the ablation before the polar form."""

    undecayed_parameters = ("alpha",)

    def __init__(self, alpha: float = 0.1) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))

    def forward(self, x: Any, update: Any) -> Any:
        """Move tokens x by the block output `update` of the same shapes."""
        return gyro_add(x, gyro_scale(self.alpha, update))


class SpaceResidual(NoSites):
    """Add space coordinates (Chen et al. 2022): what the paper starts from."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()

    def forward(self, x: Any, update: Any) -> Any:
        """Add `update` to x by their space coordinates."""
        return from_space(to_space(x) + to_space(update))


class TangentLinear(nn.Linear):
    """A Euclidean linear head on log_o of the points."""

    def __init__(self, features: int, num_classes: int, *, k: Any) -> None:
        super().__init__(features, num_classes)
        self.curvature = k

    def forward(self, x: Any) -> Tensor:
        """Points (…), (…, n) → logits (…, C)."""
        return super().forward(log_map_origin(x, k=self.curvature()))

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """It reads a new representation: the logarithm of a centroid."""
        return [self]


class Parts:
    """The parts by name, and what is done with tokens; `AmbientParts` has the same."""

    patch_embedding: Any = AblationPatchEmbedding
    position_table: Any = PositionTable
    attention: Any = AblationMultiheadAttention
    mlp: Any = AblationMLP
    norms: ClassVar[dict[str, Any]] = {"gyro": GyroLayerNorm, "space": SpaceLayerNorm}
    residuals: ClassVar[dict[str, Any]] = {
        "boost": BoostResidual,
        "gyro": GyroResidual,
        "space": SpaceResidual,
    }
    encodings: ClassVar[dict[str, Any]] = {
        "horospherical": HorosphericalEncoding,
        "boost": BoostEncoding,
    }
    heads: ClassVar[dict[str, Any]] = {"mlr": LorentzMLR, "linear": TangentLinear}

    @staticmethod
    def prepend(token: Tensor, x: Any, k: Tensor) -> Any:
        """Put exp at the origin of one vector (n,) before the tokens of every sample."""
        batch = x.a.shape[0]
        a, u = exp_map_origin(token, k=k)
        return Point(
            torch.cat([a.expand(batch, 1), x.a], 1), torch.cat([u.expand(batch, 1, -1), x.u], 1)
        )

    @staticmethod
    def first(x: Any) -> Any:
        """The first token of every sample."""
        return Point(x.a[:, 0], x.u[:, 0])

    @staticmethod
    def pool(x: Any, k: Tensor) -> Any:
        """The centroid of every sample's tokens."""
        return centroid(x)


class AblationViT(PolarViT):
    """`PolarViT` with any part replaced (`AblationConfig`)."""

    config_type = AblationConfig
    config: AblationConfig
    parts = Parts

    def __init__(self, config: AblationConfig) -> None:
        super().__init__(config)
        self.class_token: nn.Parameter | None = None
        if config.readout == "class_token":
            self.class_token = nn.Parameter(0.02 * torch.randn(config.width))
        if config.radius_std:
            for module in self.modules():
                if isinstance(module, AblationLinear):
                    module.scatter_(config.radius_std)

    def layers(self) -> PolarLayers:
        config, parts = self.config, self.parts
        return PolarLayers(
            patch_embedding=partial(parts.patch_embedding, radius=config.radius),
            position_table=parts.position_table,
            norm=parts.norms[config.norm],
            attention=partial(parts.attention, radius=config.radius),
            encoding=parts.encodings.get(config.encoding, lambda *_, **__: None),
            mlp=partial(parts.mlp, radius=config.radius),
            residual=parts.residuals[config.residual],
            head=parts.heads[config.head],
        )

    def embed(self, images: Tensor) -> Any:
        x = super().embed(images)
        if self.class_token is None:
            return x
        return self.parts.prepend(self.class_token, x, self.curvature())

    def pool(self, x: Any) -> Any:
        if self.class_token is not None:
            return self.parts.first(x)
        return self.parts.pool(x, self.curvature())
