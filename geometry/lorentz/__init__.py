"""Lorentz geometry in polar coordinates: points far from the origin, in float32, unclipped.

Points are pairs (a, u) (`Point`); the ambient baseline is in `rpt.geometry.lorentz.ambient`.
"""

from .activation import PolarDropout, PolarReLU, SpaceActivation, homogeneous_activation
from .attention import PolarCache, PolarMultiheadAttention
from .boost import axis_boost, boost, boost_step
from .calibrate import calibrate_
from .centroid import centroid, centroids
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
from .manifold import LorentzManifold, LorentzParameter, pack, unpack
from .maps import exp_map, exp_map_origin, log_map, log_map_origin, parallel_transport
from .mlr import LorentzMLR, mlr_logits
from .norm import GyroLayerNorm
from .optim import RiemannianAdamW, parameter_groups
from .point import Point, PointLike, Tangent, TangentLike, origin_like, radius_limit
from .position import BoostEncoding, HorosphericalEncoding
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

__all__ = [
    "BoostEncoding",
    "BoostResidual",
    "Curvature",
    "GyroLayerNorm",
    "GyroResidual",
    "HalfSpace",
    "HeadGain",
    "HorosphericalEncoding",
    "LorentzEmbedding",
    "LorentzMLR",
    "LorentzManifold",
    "LorentzParameter",
    "PatchEmbedding",
    "Point",
    "PointLike",
    "PolarCache",
    "PolarDropout",
    "PolarLinear",
    "PolarMLP",
    "PolarMultiheadAttention",
    "PolarReLU",
    "PositionTable",
    "RiemannianAdamW",
    "ScoreCoordinates",
    "SpaceActivation",
    "SpaceResidual",
    "Tangent",
    "TangentLike",
    "axis_boost",
    "boost",
    "boost_step",
    "calibrate_",
    "centroid",
    "centroids",
    "dense_attention",
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
]
