"""The ambient Lorentz vision transformer: `PolarViT` in the arithmetic of the literature."""

from __future__ import annotations

from rpt.geometry.lorentz.models.vit import PolarViT

from .ambient_layers import AmbientLayers, TextbookLayers

__all__ = [
    "AmbientViT",
    "TextbookViT",
]


class AmbientViT(PolarViT):
    """`PolarViT` on ambient coordinates: the same parameters by the same names, other arithmetic.

    A baseline: in float32 it is accurate to radius 4 and lost at 8. The default configuration is
    the whole Polar-ViT; the paper's own starting point is the first row of `ABLATION`.
    """

    layers = AmbientLayers


class TextbookViT(AmbientViT):
    """`AmbientViT` without the customary clamps on inner products and centroids."""

    layers = TextbookLayers
