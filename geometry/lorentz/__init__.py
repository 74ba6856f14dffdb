"""Lorentz geometry in polar coordinates: points far from the origin, in float32, unclipped."""

from .boost import axis_boost, boost, boost_step
from .centroid import centroid, centroids
from .convert import from_ambient, from_space, to_ambient, to_space
from .distance import (
    distance,
    distance_to_origin,
    pairwise_distance,
    pairwise_squared_distance,
    squared_distance,
)
from .gyro import gyro_add, gyro_negate, gyro_scale
from .horosphere import (
    HalfSpace,
    from_half_space,
    half_space_squared_distance,
    horospherical_distance,
    horospherical_shift,
    to_half_space,
)
from .maps import exp_map, exp_map_origin, log_map, log_map_origin, parallel_transport
from .point import Point, PointLike, Tangent, TangentLike, origin_like, radius_limit
from .tangent import (
    gradient_from_ambient,
    gradient_from_polar,
    inner,
    tangent_from_ambient,
    tangent_norm,
    tangent_to_ambient,
)

__all__ = [
    "HalfSpace",
    "Point",
    "PointLike",
    "Tangent",
    "TangentLike",
    "axis_boost",
    "boost",
    "boost_step",
    "centroid",
    "centroids",
    "distance",
    "distance_to_origin",
    "exp_map",
    "exp_map_origin",
    "from_ambient",
    "from_half_space",
    "from_space",
    "gradient_from_ambient",
    "gradient_from_polar",
    "gyro_add",
    "gyro_negate",
    "gyro_scale",
    "half_space_squared_distance",
    "horospherical_distance",
    "horospherical_shift",
    "inner",
    "log_map",
    "log_map_origin",
    "origin_like",
    "pairwise_distance",
    "pairwise_squared_distance",
    "parallel_transport",
    "radius_limit",
    "squared_distance",
    "tangent_from_ambient",
    "tangent_norm",
    "tangent_to_ambient",
    "to_ambient",
    "to_half_space",
    "to_space",
]
