"""The memory-linear path with gradients in closed form, for tokens on a regular time grid.

On a regular grid everything that depends on a pair only through its lag is a vector over lags
(`LagTables`). With the queries of a slice in reverse order, such a vector read with strides (1, 1)
is the slice's whole (queries × keys) table, without a copy. The vectors themselves are made outside
by plain differentiable code (`logits.lag_tables`), so this path knows only how they enter:

    k = slope·m_j² + offset                      κ̃_ij times its scale
    L = β log k + log_ratio − c log(1 + k S)     S = 1 − cos, or − c k S with exponential weights
    x = m_j E (1 − S),  y = x − m_i              radial residual
    L_R = log_rho − c_r log(1 + rho y²)          or − rho y²
    v̄ = softmax(L) v,   m̄ = Σ_j softmax(L_R) x   (softmax(L) where the radial weights are shared)

Both passes walk over slices of queries and groups of heads in scratch buffers of a fixed size; the
backward pass recomputes a slice, then applies the chain rule to the lines above. The two passes are
custom operators: opaque to torch.compile, and without double backward (the dense path has it).

Source: RT-Filter paper, Algorithm 1 steps 3–6 (the cost claimed in appendix C.2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dense import PolarEstimate, PolarInputs
from .kernel_slabs import (
    EXPONENTIAL,
    RADIAL,
    SHARED,
    Gradients,
    Upward,
    Work,
    backward_slab,
    forward_slab,
    multiply_rows,
)
from .logits import PolarSettings, lag_tables
from .parameters import FilterScalars

__all__ = ["MASKED", "kernel_estimate"]

# Below every finite logit, yet finite, so that a fully masked row stays free of NaN.
MASKED = -1e30


@torch.library.custom_op("rt_filter::polar_forward", mutates_args=())
def _polar_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_magnitude: Tensor,
    key_magnitude: Tensor,
    tables: Tensor,
    constants: Tensor,
    bias: Tensor | None,
    seed: Tensor,
    flags: int,
    ahead: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    work = Work(
        query, key, value, query_magnitude, key_magnitude, tables, constants, bias,
        seed, flags, ahead, dropout,
    )  # fmt: skip
    direction, mean = torch.empty_like(work.query), torch.zeros_like(work.own)
    for slab in work.slabs:
        saved = forward_slab(work, slab)
        multiply_rows(work, slab, direction, saved)
        if saved.radial is not None and saved.projected is not None:
            product = torch.mul(
                saved.radial, saved.projected, out=work.scratch("logits", saved.gap.shape)
            )
            work.rows(slab, mean).copy_(product.sum(-1))
    return (
        direction.flip(2).transpose(0, 1).contiguous(),
        mean.flip(2).transpose(0, 1).contiguous(),
    )


@_polar_forward.register_fake
def _(query, key, value, query_magnitude, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(query, memory_format=torch.contiguous_format), torch.empty_like(
        query_magnitude, memory_format=torch.contiguous_format
    )


@torch.library.custom_op("rt_filter::polar_backward", mutates_args=())
def _polar_backward(
    direction_grad: Tensor,
    magnitude_grad: Tensor,
    direction: Tensor,
    mean: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_magnitude: Tensor,
    key_magnitude: Tensor,
    tables: Tensor,
    constants: Tensor,
    bias: Tensor | None,
    seed: Tensor,
    flags: int,
    ahead: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    work = Work(
        query, key, value, query_magnitude, key_magnitude, tables, constants, bias,
        seed, flags, ahead, dropout,
    )  # fmt: skip
    grads = Gradients(work)
    row_mean = (direction_grad * direction).sum(-1)
    if work.shared and work.radial:
        row_mean = row_mean + magnitude_grad * mean
    upward = Upward(
        *(t.transpose(0, 1).flip(2) for t in (direction_grad, magnitude_grad, row_mean, mean))
    )
    for slab in work.slabs:
        backward_slab(work, slab, grads, upward)
    return (
        grads.query.flip(2).transpose(0, 1).contiguous(),
        grads.key.mT.transpose(0, 1).contiguous(),
        grads.value.mT.transpose(0, 1).contiguous(),
        grads.own.flip(2).transpose(0, 1).contiguous(),
        grads.magnitude.transpose(0, 1).contiguous(),
        grads.tables,
        grads.constants,
    )


@_polar_backward.register_fake
def _(direction_grad, magnitude_grad, direction, mean, *inputs):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs[:7])


def _save_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.flags, ctx.ahead, ctx.dropout = inputs
    ctx.save_for_backward(*output, *tensors)


def _propagate(ctx, direction_grad, magnitude_grad):  # type: ignore[no-untyped-def]
    grads = _polar_backward(
        direction_grad, magnitude_grad, *ctx.saved_tensors, ctx.flags, ctx.ahead, ctx.dropout
    )
    return (*grads, None, None, None, None, None)


_polar_forward.register_autograd(_propagate, setup_context=_save_for_backward)


def kernel_estimate(
    inputs: PolarInputs,
    scalars: FilterScalars,
    settings: PolarSettings,
    *,
    causal: bool,
    ahead: int = 0,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> PolarEstimate:
    """`dense.polar_estimate` for tokens one time unit apart, in memory linear in the tokens.

    Args:
        ahead: how many keys precede query 0 (the cache's length); query i stands at time ahead + i,
            key j at time j.
        bias: additive mask (1 or batch, 1 or heads, 1 or queries, keys), finite (MASKED where
            nothing may pass) and without gradient; or None.

    Raises:
        ValueError: settings.exact, which this path does not compute.
    """
    if settings.exact:
        raise ValueError("the exact directional estimate has no closed-form path here")
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    per_head = scalars.reshaped(1)
    index = torch.arange(queries + keys - 1, device=inputs.query.device)
    lag = (ahead + queries - 1 - index).to(inputs.query.dtype)
    parts = lag_tables(lag, per_head, settings)
    exponential = settings.weights == "exponential"
    scale = per_head.sphere_scale * 2.0 / per_head.nu_tangential
    temperature = scalars.temperature
    exponent = temperature if exponential else temperature * (scalars.nu_tangential + 1.0)
    likelihood = settings.radial_exponent == "likelihood"
    radial_exponent = scalars.nu_radial + 1.0 if likelihood else torch.ones_like(exponent)
    unseen = (lag < 0) if causal else torch.zeros_like(lag, dtype=torch.bool)
    # log k = log κ̃ + log(scale): the added constant drops out of the softmax.
    rows = (
        parts.slope * scale,
        parts.offset * scale,
        (per_head.temperature * parts.log_ratio).masked_fill(unseen, MASKED),
        parts.log_rho.masked_fill(unseen, MASKED),
        parts.rho_tilde / per_head.nu_radial,
        parts.decay,
    )
    shape = (scalars.decay.shape[0], lag.shape[0])
    tables = torch.stack([row.expand(shape) for row in rows])
    constants = torch.stack((temperature, exponent, radial_exponent))
    flags = EXPONENTIAL * exponential + RADIAL * (settings.radial != "off")
    flags += SHARED * (settings.radial == "shared")
    seed = torch.randint(2**31, (), device="cpu") if dropout else torch.zeros((), dtype=torch.long)
    direction, mean = _polar_forward(
        *inputs, tables, constants, bias, seed, flags, ahead if causal else -1, dropout
    )
    return PolarEstimate(direction, inputs.query_magnitude if settings.radial == "off" else mean)
