"""Sizes and settings of a vision transformer.

Example:
    >>> import torch, rpt.geometry.lorentz as lorentz
    >>> lorentz.SIZES["tiny"]["depth"]
    9
"""

from __future__ import annotations

from dataclasses import dataclass

from ...checks import check_choice, check_count, check_number

# Polar-ViT paper, App. D.3 and D.4.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 192, "depth": 9, "num_heads": 12, "mlp_width": 384},
    "small": {"width": 384, "depth": 12, "num_heads": 6, "mlp_width": 1536},
    "base": {"width": 768, "depth": 12, "num_heads": 12, "mlp_width": 3072},
}


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and settings of a `PolarViT`, or of a model that it is compared with.

    Args:
        num_classes: C.
        image_size: side of the square images.
        patch_size: side of the patches, which tile the image.
        in_channels: colours.
        width, depth, num_heads, mlp_width: of the transformer.
        k: initial curvature −1/k, shared by all layers.
        learnable_curvature: whether k is learned.
        alpha: initial step of the residual connections.
        encoding_scheme: see `HorosphericalEncoding`.
        initial_rate: its ρ_h at the start.
        position_table: absolute positions, "learned", "sine_cosine" or None.

    Raises:
        ValueError: a choice that does not exist, or sizes that do not fit.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> config = lorentz.ViTConfig(num_classes=10, image_size=8, depth=1, k=0.5)
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
    alpha: float = 0.1
    encoding_scheme: str = "shared"
    initial_rate: float = 1.0
    position_table: str | None = "learned"

    def __post_init__(self) -> None:
        check_choice("encoding_scheme", self.encoding_scheme, ("shared", "paper"))
        check_choice("position_table", self.position_table, ("learned", "sine_cosine", None))
        for name in ("num_classes", "image_size", "patch_size", "in_channels", *SIZES["tiny"]):
            check_count(name, getattr(self, name))
        for name in ("alpha", "initial_rate"):
            check_number(name, getattr(self, name))
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
