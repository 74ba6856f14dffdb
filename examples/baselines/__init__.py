"""What Polar-ViT is compared with: other parts, ambient arithmetic, flat space.

`from baselines import AmbientViT` works for scripts in `examples/`.
"""

from .ablation import ABLATION, RADIUS_ABLATION, RADIUS_RULES, AblationConfig, AblationViT
from .ambient_unet import AmbientUNet
from .ambient_vit import AmbientViT, TextbookViT
from .euclidean_vit import EuclideanViT

__all__ = [
    "ABLATION",
    "RADIUS_ABLATION",
    "RADIUS_RULES",
    "AblationConfig",
    "AblationViT",
    "AmbientUNet",
    "AmbientViT",
    "EuclideanViT",
    "TextbookViT",
]
