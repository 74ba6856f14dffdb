"""Models in the arithmetic of the literature, and a Euclidean one: for comparison only.

`from baselines import AmbientViT` works for scripts in `examples/`.
"""

from .ambient_layers import AmbientLayers, TextbookLayers
from .ambient_unet import AmbientUNet
from .ambient_vit import AmbientViT, TextbookViT
from .euclidean_vit import EuclideanViT

__all__ = [
    "AmbientLayers",
    "AmbientUNet",
    "AmbientViT",
    "EuclideanViT",
    "TextbookLayers",
    "TextbookViT",
]
