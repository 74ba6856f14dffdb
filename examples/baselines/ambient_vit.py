"""The ambient Lorentz vision transformer: `PolarViT` in the arithmetic of the literature."""

from __future__ import annotations

from .ablation import AblationConfig, AblationViT
from .ambient_layers import AmbientParts, TextbookParts

__all__ = [
    "AmbientViT",
    "TextbookViT",
]


class AmbientViT(AblationViT):
    """`PolarViT` on ambient coordinates: the same parameters by the same names, other arithmetic.

    A baseline: in float32 it is accurate to radius 4 and lost at 8. The default configuration is
    the whole Polar-ViT; the paper's own starting point is the first row of `ABLATION`.
    """

    parts = AmbientParts

    def __init__(self, config: AblationConfig) -> None:
        super().__init__(config)
        for module in self.modules():
            if not hasattr(module, "curvature"):
                # No submodule: the polar layers have none there, and names must agree.
                module.__dict__["curvature"] = self.curvature


class TextbookViT(AmbientViT):
    """`AmbientViT` without the customary clamps on inner products and centroids."""

    parts = TextbookParts
