"""Lorentz geometry in polar coordinates: points far from the origin, in float32, unclipped.

Points are pairs (a, u) (`Point`). `ops` holds pure functions, on which `layers`, `attention` and
`models` stand; `optim` holds what an optimizer needs of a manifold.
"""

from .attention.blocked import blocked_attention, fused_attention
from .attention.cache import PolarCache
from .attention.multihead import HeadGain, PolarMultiheadAttention
from .attention.position import BoostEncoding, HorosphericalEncoding
from .attention.scores import ScoreCoordinates, dense_attention, polar_score_coordinates
from .hyperboloid import Lorentz
from .layers.classifier import LorentzMLR
from .layers.convolution import (
    CentroidPool2d,
    PolarConv2d,
    PolarDropout,
    PolarMaxPool2d,
    PolarReLU,
    SpaceActivation,
)
from .layers.curvature import Curvature
from .layers.embedding import LorentzEmbedding, PatchEmbedding, PositionTable, sine_cosine_table
from .layers.linear import PolarLinear, PolarMLP
from .layers.norm import GyroLayerNorm, PolarBatchNorm2d, SpaceLayerNorm
from .layers.radius import RADIUS_RULES
from .layers.residual import BoostResidual, GyroResidual, SpaceResidual
from .models.calibrate import calibrate_
from .models.config import ABLATION, RADIUS_ABLATION, SIZES, ViTConfig
from .models.unet import PolarUNet, dice_score, segmentation_loss
from .models.vit import PolarViT
from .ops.centroid import centroid, centroids
from .ops.coordinates import (
    from_ambient,
    from_poincare,
    from_space,
    gradient_from_ambient,
    gradient_from_polar,
    inner,
    tangent_from_ambient,
    tangent_norm,
    tangent_to_ambient,
    to_ambient,
    to_poincare,
    to_space,
)
from .ops.distance import (
    distance,
    distance_to_origin,
    mlr_logits,
    pairwise_distance,
    pairwise_squared_distance,
    squared_distance,
)
from .ops.gyro import axis_boost, boost, boost_step, gyro_add, gyro_negate, gyro_scale
from .ops.horosphere import (
    HalfSpace,
    from_half_space,
    half_space_squared_distance,
    horospherical_distance,
    horospherical_shift,
    pairwise_half_space_squared_distance,
    to_half_space,
)
from .ops.maps import exp_map, exp_map_origin, log_map, log_map_origin, parallel_transport
from .ops.point import Point, PointLike, Tangent, TangentLike, origin_like, radius_limit
from .ops.space import (
    centroid_pool2d,
    concatenate,
    homogeneous_activation,
    join_heads,
    max_pool2d,
    split_heads,
    upsample2x,
)
from .optim.adamw import RiemannianAdamW, parameter_groups
from .optim.manifold import KeepsManifold, LorentzManifold, LorentzParameter, pack, unpack

__all__ = [
    "ABLATION",
    "RADIUS_ABLATION",
    "RADIUS_RULES",
    "SIZES",
    "BoostEncoding",
    "BoostResidual",
    "CentroidPool2d",
    "Curvature",
    "GyroLayerNorm",
    "GyroResidual",
    "HalfSpace",
    "HeadGain",
    "HorosphericalEncoding",
    "KeepsManifold",
    "Lorentz",
    "LorentzEmbedding",
    "LorentzMLR",
    "LorentzManifold",
    "LorentzParameter",
    "PatchEmbedding",
    "Point",
    "PointLike",
    "PolarBatchNorm2d",
    "PolarCache",
    "PolarConv2d",
    "PolarDropout",
    "PolarLinear",
    "PolarMLP",
    "PolarMaxPool2d",
    "PolarMultiheadAttention",
    "PolarReLU",
    "PolarUNet",
    "PolarViT",
    "PositionTable",
    "RiemannianAdamW",
    "ScoreCoordinates",
    "SpaceActivation",
    "SpaceLayerNorm",
    "SpaceResidual",
    "Tangent",
    "TangentLike",
    "ViTConfig",
    "axis_boost",
    "blocked_attention",
    "boost",
    "boost_step",
    "calibrate_",
    "centroid",
    "centroid_pool2d",
    "centroids",
    "concatenate",
    "dense_attention",
    "dice_score",
    "distance",
    "distance_to_origin",
    "exp_map",
    "exp_map_origin",
    "from_ambient",
    "from_half_space",
    "from_poincare",
    "from_space",
    "fused_attention",
    "gradient_from_ambient",
    "gradient_from_polar",
    "gyro_add",
    "gyro_negate",
    "gyro_scale",
    "half_space_squared_distance",
    "homogeneous_activation",
    "horospherical_distance",
    "horospherical_shift",
    "inner",
    "join_heads",
    "log_map",
    "log_map_origin",
    "max_pool2d",
    "mlr_logits",
    "origin_like",
    "pack",
    "pairwise_distance",
    "pairwise_half_space_squared_distance",
    "pairwise_squared_distance",
    "parallel_transport",
    "parameter_groups",
    "polar_score_coordinates",
    "radius_limit",
    "segmentation_loss",
    "sine_cosine_table",
    "split_heads",
    "squared_distance",
    "tangent_from_ambient",
    "tangent_norm",
    "tangent_to_ambient",
    "to_ambient",
    "to_half_space",
    "to_poincare",
    "to_space",
    "unpack",
    "upsample2x",
]
