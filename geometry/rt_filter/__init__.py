"""The radial–tangential filter and the Polar Transformer.

`rt_filter` is the filter as a plain function; `PolarAttention` one learned step of it,
`RobustFilterAttention` its isotropic ancestor, `PolarTransformerBlock` and `PolarTransformer` what
is built from them. Underneath are pure functions: the model (`model`), transport in time
(`transport`), the sphere (`sphere`), the step formulas (`logits`), and the ways to compute one
attention (`paths`).

Source: P. Racioppo, "The Transformer as a Polar State Estimator" (the RT-Filter paper).
"""

from .attention import PolarAttention
from .base import AttentionWeights
from .cache import FilterCache
from .filter import RTFilterResult, isotropic_filter, rt_filter
from .model import (
    complex_to_real,
    inner_product,
    multiply_by_i,
    radial_projector,
    radial_tangential_covariance,
    radial_tangential_precision,
    real_to_complex,
    tangential_projector,
    unit_direction,
)
from .robust import RobustFilterAttention
from .simulation import Trajectories, simulate_trajectories
from .sphere import geodesic_angle, slerp, sphere_exp, sphere_log, tangent_project
from .transformer import PolarTransformer, PolarTransformerBlock
from .transport import (
    process_variance,
    rotary_frequencies,
    rotate,
    rotation_angles,
    transport_state,
)

__all__ = [
    "AttentionWeights",
    "FilterCache",
    "PolarAttention",
    "PolarTransformer",
    "PolarTransformerBlock",
    "RTFilterResult",
    "RobustFilterAttention",
    "Trajectories",
    "complex_to_real",
    "geodesic_angle",
    "inner_product",
    "isotropic_filter",
    "multiply_by_i",
    "process_variance",
    "radial_projector",
    "radial_tangential_covariance",
    "radial_tangential_precision",
    "real_to_complex",
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
