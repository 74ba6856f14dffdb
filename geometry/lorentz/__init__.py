"""Lorentz geometry in polar coordinates: points far from the origin, in float32, unclipped.

Points are pairs (a, u) (`Point`); the ambient baseline is in `rpt.geometry.lorentz.ambient`.
"""

from .activation import PolarDropout, PolarReLU, SpaceActivation, homogeneous_activation
from .ambient_unet import AmbientUNet
from .ambient_vit import AmbientViT, TextbookViT
from .attention import PolarCache, PolarMultiheadAttention
from .batch_norm import PolarBatchNorm2d
from .boost import axis_boost, boost, boost_step
from .calibrate import calibrate_
from .centroid import centroid, centroids
from .conv import PolarConv2d
from .convert import from_ambient, from_space, to_ambient, to_space
from .curvature import Curvature
from .dense_attention import dense_attention
from .distance import (
    distance,
    distance_to_origin,
    pairwise_distance,
    pairwise_squared_distance,
    squared_distance,
)
from .embedding import LorentzEmbedding, PatchEmbedding, PositionTable, sine_cosine_table
from .euclidean_vit import EuclideanViT
from .fused_attention import fused_attention
from .gyro import gyro_add, gyro_negate, gyro_scale
from .heads import HeadGain, join_heads, split_heads
from .horosphere import (
    HalfSpace,
    from_half_space,
    half_space_squared_distance,
    horospherical_distance,
    horospherical_shift,
    pairwise_half_space_squared_distance,
    to_half_space,
)
from .linear import PolarLinear, PolarMLP
from .manifold import KeepsManifold, LorentzManifold, LorentzParameter, pack, unpack
from .maps import exp_map, exp_map_origin, log_map, log_map_origin, parallel_transport
from .mlr import LorentzMLR, mlr_logits
from .norm import GyroLayerNorm, SpaceLayerNorm
from .optim import RiemannianAdamW, parameter_groups
from .point import Point, PointLike, Tangent, TangentLike, origin_like, radius_limit
from .pooling import (
    CentroidPool2d,
    PolarMaxPool2d,
    centroid_pool2d,
    concatenate,
    max_pool2d,
    upsample2x,
)
from .position import BoostEncoding, HorosphericalEncoding
from .radius import RADIUS_RULES
from .residual import BoostResidual, GyroResidual, SpaceResidual
from .score import ScoreCoordinates, polar_score_coordinates
from .tangent import (
    gradient_from_ambient,
    gradient_from_polar,
    inner,
    tangent_from_ambient,
    tangent_norm,
    tangent_to_ambient,
)
from .unet import PolarUNet, dice_score, segmentation_loss
from .vit import PolarViT
from .vit_config import ABLATION, RADIUS_ABLATION, SIZES, ViTConfig

__all__ = [
    "ABLATION",
    "RADIUS_ABLATION",
    "RADIUS_RULES",
    "SIZES",
    "AmbientUNet",
    "AmbientViT",
    "BoostEncoding",
    "BoostResidual",
    "CentroidPool2d",
    "Curvature",
    "EuclideanViT",
    "GyroLayerNorm",
    "GyroResidual",
    "HalfSpace",
    "HeadGain",
    "HorosphericalEncoding",
    "KeepsManifold",
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
    "TextbookViT",
    "ViTConfig",
    "axis_boost",
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
    "to_space",
    "unpack",
    "upsample2x",
]
