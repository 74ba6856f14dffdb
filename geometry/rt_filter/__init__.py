"""The radial–tangential filter and the Polar Transformer.

`rt_filter` is the filter as a plain function; `PolarAttention` one learned step of it,
`RobustFilterAttention` its isotropic ancestor, `PolarTransformerBlock` and `PolarTransformer` what
is built from them. Underneath are pure functions: the model and its likelihood (`model`), transport
in time (`transport`), the sphere (`sphere`), the step formulas (`logits`), and the ways to compute one
attention (`paths`).

Source: P. Racioppo, "The Transformer as a Polar State Estimator" (the RT-Filter paper).
"""

from ..softmax import masked_softmax
from .attention import PolarAttention
from .base import AttentionWeights, FilterStep
from .cache import FilterCache
from .filter import RTFilterResult, isotropic_filter, rt_filter
from .logits import (
    PolarSettings,
    directional_logits,
    lag_tables,
    radial_logits,
    robust_filter_logits,
)
from .model import (
    complex_to_real,
    exact_radial_term,
    exact_tangential_term,
    first_order_radial_term,
    first_order_tangential_term,
    inner_product,
    multiply_by_i,
    negative_log_likelihood,
    propagate_covariance,
    radial_projector,
    radial_tangential_covariance,
    radial_tangential_precision,
    real_to_complex,
    tangential_projector,
    unit_direction,
)
from .parameters import FilterScalars
from .paths.dense import PolarEstimate, PolarInputs, polar_estimate
from .paths.slabs import kernel_estimate
from .robust import RobustFilterAttention, robust_filter_estimate
from .simulation import Trajectories, simulate_trajectories
from .sphere import geodesic_angle, slerp, sphere_exp, sphere_log, tangent_project
from .transformer import FeedForward, PolarTransformer, PolarTransformerBlock
from .transport import (
    decay_factor,
    process_variance,
    rotary_frequencies,
    rotate,
    rotation_angles,
    transport_state,
)
from .visibility import Visibility

__all__ = [
    "AttentionWeights",
    "FeedForward",
    "FilterCache",
    "FilterScalars",
    "FilterStep",
    "PolarAttention",
    "PolarEstimate",
    "PolarInputs",
    "PolarSettings",
    "PolarTransformer",
    "PolarTransformerBlock",
    "RTFilterResult",
    "RobustFilterAttention",
    "Trajectories",
    "Visibility",
    "complex_to_real",
    "decay_factor",
    "directional_logits",
    "exact_radial_term",
    "exact_tangential_term",
    "first_order_radial_term",
    "first_order_tangential_term",
    "geodesic_angle",
    "inner_product",
    "isotropic_filter",
    "kernel_estimate",
    "lag_tables",
    "masked_softmax",
    "multiply_by_i",
    "negative_log_likelihood",
    "polar_estimate",
    "process_variance",
    "propagate_covariance",
    "radial_logits",
    "radial_projector",
    "radial_tangential_covariance",
    "radial_tangential_precision",
    "real_to_complex",
    "robust_filter_estimate",
    "robust_filter_logits",
    "rotary_frequencies",
    "rotate",
    "rotation_angles",
    "rt_filter",
    "simulate_trajectories",
    "slerp",
    "sphere_exp",
    "sphere_log",
    "tangent_project",
    "tangential_projector",
    "transport_state",
    "unit_direction",
]
