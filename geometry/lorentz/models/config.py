"""What a vision transformer here is made of: sizes, components, and the paper's ablations.

Example:
    >>> import torch, rpt.geometry.lorentz as lorentz
    >>> lorentz.SIZES["tiny"]["depth"], len(lorentz.ABLATION), len(lorentz.RADIUS_ABLATION)
    (9, 7, 8)
"""

from __future__ import annotations

from dataclasses import dataclass

from ...checks import check_choice, check_count, check_number
from ..layers.radius import RADIUS_RULES

# Polar-ViT paper, App. D.3 and D.4.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 192, "depth": 9, "num_heads": 12, "mlp_width": 384},
    "small": {"width": 384, "depth": 12, "num_heads": 6, "mlp_width": 1536},
    "base": {"width": 768, "depth": 12, "num_heads": 12, "mlp_width": 3072},
}


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "radius": RADIUS_RULES,
    "norm": ("gyro", "space"),
    "residual": ("boost", "gyro", "space"),
    "encoding": ("horospherical", "boost", None),
    "encoding_scheme": ("shared", "paper"),
    "position_table": ("learned", "sine_cosine", None),
    "readout": ("centroid", "class_token"),
    "head": ("mlr", "linear"),
}


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and components of a `PolarViT`, its ambient twin or a `EuclideanViT`.

    Args:
        num_classes: C.
        image_size: side of the square images.
        patch_size: side of the patches, which tile the image.
        in_channels: colours.
        width, depth, num_heads, mlp_width: of the transformer.
        k: initial curvature −1/k, shared by all layers.
        learnable_curvature: whether k is learned.
        radius: rule for the output radius of every fully connected layer (Table 6).
        radius_std: random deviation of the anchored rule's start (Table 6).
        norm: "gyro" layer norm, or "space": a Euclidean layer norm of the space coordinates.
        residual: "boost" (Eq. 12), "gyro" (one whole boost), "space" (sum of coordinates).
        alpha: initial step of the first two.
        encoding: of queries and keys: "horospherical", "boost" or None.
        encoding_scheme: of the horospherical encoding, see `HorosphericalEncoding`.
        initial_rate: its ρ_h at the start.
        position_table: absolute positions, "learned", "sine_cosine" or None.
        readout: "centroid" of all tokens (the mean, in a Euclidean model) or "class_token".
        head: "mlr", hyperbolic multinomial logistic regression, or "linear" on the tangent vector
            at the origin.

    A Euclidean model reads sizes, position table and readout; the rest has no meaning there.

    Raises:
        ValueError: a choice that does not exist, or sizes that do not fit.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> config = lorentz.ViTConfig(num_classes=10, image_size=8, depth=1, readout="class_token")
        >>> lorentz.PolarViT(config)(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """

    num_classes: int
    image_size: int
    patch_size: int = 4
    in_channels: int = 3
    width: int = 192
    depth: int = 9
    num_heads: int = 12
    mlp_width: int = 384
    k: float = 1.0
    learnable_curvature: bool = False
    radius: str = "anchored"
    radius_std: float = 0.0
    norm: str = "gyro"
    residual: str = "boost"
    alpha: float = 0.1
    encoding: str | None = "horospherical"
    encoding_scheme: str = "shared"
    initial_rate: float = 1.0
    position_table: str | None = "learned"
    readout: str = "centroid"
    head: str = "mlr"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in ("num_classes", "image_size", "patch_size", "in_channels", *SIZES["tiny"]):
            check_count(name, getattr(self, name))
        for name in ("alpha", "initial_rate"):
            check_number(name, getattr(self, name))
        check_number("radius_std", self.radius_std, 0.0)
        check_number("k", self.k, above=0.0)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size={self.patch_size} does not tile image_size={self.image_size}"
            )
        if self.width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide width={self.width}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return self.grid[0] * self.grid[1]


_POLAR_START = {"radius": "lorentz", "encoding": None}

# Each row of Table 5 and what it is built from; "ambient" names the arithmetic.
ABLATION: dict[str, tuple[str, dict[str, str | None]]] = {
    "split-head Lorentz ViT, class token": (
        "ambient",
        {**_POLAR_START, "norm": "space", "residual": "space", "readout": "class_token"},
    ),
    "+ polar arithmetic, gyro layer norm": ("polar", {**_POLAR_START, "residual": "space"}),
    "+ boost residual": ("polar", {**_POLAR_START, "residual": "gyro"}),
    "+ polar boost residual": ("polar", _POLAR_START),
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
