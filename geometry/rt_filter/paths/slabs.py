"""The memory-linear path with gradients in closed form.

What depends on a pair of tokens only through its lag comes from tables (`slab_tables`). With them:

    k = slope·m_j² + offset                         κ̃_ij times its scale
    L = β log(k ratio) − c log(1 + k S)             S = 1 − cos, or − c k S with exponential weights
    x = m_j E (1 − S),  y = x − m_i                 radial residual
    L_R = log_rho − c_r log(1 + rho y²)             or − rho y²
    v̄ = softmax(L) v,   m̄ = Σ_j softmax(L_R) x      (softmax(L) where the radial weights are shared)

Both passes walk over slabs of a fixed size, groups of heads times slices of queries; the backward
pass recomputes a slab, then applies the chain rule to the lines above (`slab_math`). The two passes are
custom operators: opaque to torch.compile, and without double backward (the dense path has it).

Source: RT-Filter paper, Algorithm 1 steps 3–6 (the cost claimed in appendix C.2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...masks import additive_mask
from ...softmax import SECOND_DERIVATIVES
from ..logits import PolarSettings
from ..parameters import FilterScalars
from ..visibility import Visibility, rows_that_see
from .dense import PolarEstimate, PolarInputs
from .slab_math import CAUSAL, EXPONENTIAL, MAGNITUDES, MASKED, RADIAL, SHARED, Work
from .slab_tables import Numbers

__all__ = ["slab_estimate"]

INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor query_magnitude, Tensor key_magnitude,"
    " Tensor numbers, Tensor query_times, Tensor key_times, Tensor? bias, Tensor seed, int flags,"
    " int ahead, float dropout"
)
DIFFERENTIABLE, REST = 6, 7


def _empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)


@torch.library.custom_op(
    "rt_filter::polar_forward", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)"
)
def _polar_forward(*inputs):  # type: ignore[no-untyped-def]
    return Work(*inputs).forward()


@_polar_forward.register_fake
def _(query, key, value, query_magnitude, *rest):  # type: ignore[no-untyped-def]
    return _empty_like(query, query_magnitude)


@torch.library.custom_op(
    "rt_filter::polar_backward",
    mutates_args=(),
    schema=(
        "(Tensor direction_grad, Tensor magnitude_grad, Tensor direction, Tensor mean,"
        f" {INPUTS}) -> ({', '.join(['Tensor'] * DIFFERENTIABLE)})"
    ),
)
def _polar_backward(direction_grad, magnitude_grad, direction, mean, *inputs):  # type: ignore[no-untyped-def]
    return Work(*inputs).backward(direction_grad, magnitude_grad, direction, mean)


@_polar_backward.register_fake
def _(direction_grad, magnitude_grad, direction, mean, *inputs):  # type: ignore[no-untyped-def]
    return _empty_like(*inputs[:DIFFERENTIABLE])


def _save_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.flags, ctx.ahead, ctx.dropout = inputs
    ctx.save_for_backward(*output, *tensors)


def _propagate(ctx, direction_grad, magnitude_grad):  # type: ignore[no-untyped-def]
    grads = _polar_backward(
        direction_grad, magnitude_grad, *ctx.saved_tensors, ctx.flags, ctx.ahead, ctx.dropout
    )
    return (*grads, *(None for _ in range(REST)))


def _refuse(ctx, *gradients):  # type: ignore[no-untyped-def]
    raise RuntimeError(SECOND_DERIVATIVES)


_polar_forward.register_autograd(_propagate, setup_context=_save_for_backward)
_polar_backward.register_autograd(_refuse)


def slab_estimate(
    inputs: PolarInputs,
    view: Visibility,
    scalars: FilterScalars,
    settings: PolarSettings,
    ahead: int | None,
    dropout: float = 0.0,
) -> PolarEstimate:
    """`dense.polar_estimate` in memory linear in the tokens, for chordal settings without process
    noise; its mask and times have no gradient.

    Args:
        ahead: how many keys precede query 0 (the cache's length) where query i stands at time
            ahead + i, key j at time j; None at other times.
    """
    exponential = settings.weights == "exponential"
    temperature, one = scalars.temperature, torch.ones_like(scalars.temperature)
    likelihood = settings.radial_exponent == "likelihood" and not exponential
    numbers = Numbers(
        decay=scalars.decay if settings.decay else torch.zeros_like(one),
        key=scalars.key_tangential,
        inflation=scalars.inflation_tangential,
        query=scalars.query_tangential,
        floor=scalars.magnitude_floor if settings.magnitude_precision else one,
        scale=scalars.sphere_scale * 2.0 / scalars.nu_tangential,
        radial_key=scalars.key_radial,
        radial_inflation=scalars.inflation_radial,
        radial_query=scalars.query_radial,
        radial_nu=scalars.nu_radial,
        temperature=temperature,
        exponent=temperature if exponential else temperature * (scalars.nu_tangential + 1.0),
        radial_exponent=scalars.nu_radial + 1.0 if likelihood else one,
    )
    flags = EXPONENTIAL * exponential + MAGNITUDES * settings.magnitude_precision
    flags += RADIAL * (settings.radial != "off") + SHARED * (settings.radial == "shared")
    flags += CAUSAL * view.causal
    seed = torch.randint(2**31, (), device="cpu") if dropout else torch.zeros((), dtype=torch.long)
    bias = _bias(view, inputs.query.dtype)
    grid, times = -1 if ahead is None else ahead, (view.query_times, view.key_times)
    direction, mean = _polar_forward(
        *inputs, torch.stack(numbers), *times, bias, seed, flags, grid, dropout
    )
    own = inputs.query_magnitude
    mean = own if settings.radial == "off" else mean
    if bias is not None or ahead is None:
        everything = torch.ones(inputs.key.shape[::2], dtype=torch.bool, device=own.device)
        visible = rows_that_see(everything, view)
        direction = direction.masked_fill(~visible[..., None], 0.0)
        mean = torch.where(visible, mean, own)
    return PolarEstimate(direction, mean)


def _bias(view: Visibility, dtype: torch.dtype) -> Tensor | None:
    """Padding and mask as one additive mask, finite: MASKED where nothing may pass."""
    bias = None
    if view.padding is not None:
        bias = additive_mask(~view.padding, dtype).clamp_min(MASKED)[:, None, None]
    if view.mask is not None:
        mask = additive_mask(view.mask, dtype).clamp_min(MASKED)
        bias = mask if bias is None else bias + mask
    return bias
