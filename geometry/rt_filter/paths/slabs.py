"""The memory-linear path with gradients in closed form.

What depends on a pair of tokens only through its lag comes from tables (`slab_tables`): on the
regular grid vectors over lags, made here by plain differentiable code (`logits.lag_tables`), at given
times made slab by slab. This path knows only how they enter:

    k = slope·m_j² + offset                      κ̃_ij times its scale
    L = β log k + log_ratio − c log(1 + k S)     S = 1 − cos, or − c k S with exponential weights
    x = m_j E (1 − S),  y = x − m_i              radial residual
    L_R = log_rho − c_r log(1 + rho y²)          or − rho y²
    v̄ = softmax(L) v,   m̄ = Σ_j softmax(L_R) x   (softmax(L) where the radial weights are shared)

Both passes walk over slices of queries and groups of heads in scratch buffers of a fixed size; the
backward pass recomputes a slice, then applies the chain rule to the lines above (`slab_math`). The
two passes are custom operators: opaque to torch.compile, and without double backward (the dense path
has it).

Source: RT-Filter paper, Algorithm 1 steps 3–6 (the cost claimed in appendix C.2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...masks import additive_mask
from ...softmax import SECOND_DERIVATIVES
from ..logits import PolarSettings, lag_tables
from ..parameters import FilterScalars
from ..visibility import Visibility, rows_that_see
from .dense import PolarEstimate, PolarInputs
from .slab_math import (
    EXPONENTIAL,
    RADIAL,
    SHARED,
    Gradients,
    Sources,
    Upward,
    Work,
    backward_slab,
    forward_slab,
)
from .slab_tables import MASKED

__all__ = ["slab_estimate", "tables_at_times"]

INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor query_magnitude, Tensor key_magnitude,"
    " Tensor tables, Tensor constants, Tensor? bias, Tensor? query_times, Tensor? key_times,"
    " Tensor seed, int flags, int ahead, float dropout"
)


@torch.library.custom_op(
    "rt_filter::polar_forward", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)"
)
def _polar_forward(*inputs):  # type: ignore[no-untyped-def]
    work = Work(Sources(*inputs))
    direction, mean = torch.empty_like(work.query), torch.zeros_like(work.own)
    for slab in work.slabs:
        saved = forward_slab(work, slab)
        work.rows(slab, direction).copy_(saved.kept @ work.value[slab.heads, :, : slab.keys])
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


@torch.library.custom_op(
    "rt_filter::polar_backward",
    mutates_args=(),
    schema=(
        "(Tensor direction_grad, Tensor magnitude_grad, Tensor direction, Tensor mean,"
        f" {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _polar_backward(direction_grad, magnitude_grad, direction, mean, *inputs):  # type: ignore[no-untyped-def]
    work = Work(Sources(*inputs))
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
        work.tables.finished(),
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
    return (*grads, *(None for _ in range(len(Sources._fields) - 7)))


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
    """`dense.polar_estimate` in memory linear in the tokens, for chordal settings.

    Args:
        view: its mask, and its times where they are given, have no gradient.
        ahead: how many keys precede query 0 (the cache's length) where query i stands at time
            ahead + i, key j at time j; None at other times, for settings of `tables_at_times`.
    """
    exponential = settings.weights == "exponential"
    temperature = scalars.temperature
    exponent = temperature if exponential else temperature * (scalars.nu_tangential + 1.0)
    likelihood = settings.radial_exponent == "likelihood"
    radial_exponent = scalars.nu_radial + 1.0 if likelihood else torch.ones_like(exponent)
    constants = torch.stack((temperature, exponent, radial_exponent))
    times: tuple[Tensor | None, ...] = (None, None)
    if ahead is None:
        tables, times = _numbers(scalars, settings), (view.query_times, view.key_times)
    else:
        lengths = inputs.query.shape[2], inputs.key.shape[2]
        tables = _grid_tables(*lengths, ahead, view.causal, scalars, settings)
    flags = EXPONENTIAL * exponential + RADIAL * (settings.radial != "off")
    flags += SHARED * (settings.radial == "shared")
    seed = torch.randint(2**31, (), device="cpu") if dropout else torch.zeros((), dtype=torch.long)
    bias, first = _bias(view, inputs.query.dtype), (ahead or 0) if view.causal else -1
    direction, mean = _polar_forward(
        *inputs, tables, constants, bias, *times, seed, flags, first, dropout
    )
    own = inputs.query_magnitude
    mean = own if settings.radial == "off" else mean
    if bias is not None or ahead is None:
        batch, _, keys, _ = inputs.key.shape
        everything = torch.ones(batch, keys, dtype=torch.bool, device=own.device)
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


def tables_at_times(settings: PolarSettings) -> bool:
    """Whether the tables of these settings can be made slab by slab."""
    return settings.magnitude_precision and not (settings.decay and settings.process)


def _grid_tables(
    queries: int,
    keys: int,
    ahead: int,
    causal: bool,
    scalars: FilterScalars,
    settings: PolarSettings,
) -> Tensor:
    """What `GridTables` holds, (6, heads, lags): the largest lag first."""
    per_head = scalars.reshaped(1)
    index = torch.arange(queries + keys - 1, device=scalars.decay.device)
    lag = (ahead + queries - 1 - index).to(scalars.decay.dtype)
    parts = lag_tables(lag, per_head, settings)
    # log k = log κ̃ + log(scale): the added constant drops out of the softmax.
    scale = per_head.sphere_scale * 2.0 / per_head.nu_tangential * torch.exp(parts.log_tilde)
    log_ratio = per_head.temperature * (parts.log_kappa - parts.log_tilde)
    unseen = (lag < 0) if causal else torch.zeros_like(lag, dtype=torch.bool)
    rows = (
        parts.slope * scale,
        parts.offset * scale,
        log_ratio.masked_fill(unseen, MASKED),
        parts.log_rho.masked_fill(unseen, MASKED),
        parts.rho_tilde / per_head.nu_radial,
        parts.decay,
    )
    shape = (scalars.decay.shape[0], lag.shape[0])
    return torch.stack([row.expand(shape) for row in rows])


def _numbers(scalars: FilterScalars, settings: PolarSettings) -> Tensor:
    """What `TimeTables` holds, (10, heads)."""
    return torch.stack(
        (
            scalars.decay if settings.decay else torch.zeros_like(scalars.decay),
            scalars.key_tangential,
            scalars.inflation_tangential,
            scalars.query_tangential,
            scalars.magnitude_floor,
            scalars.sphere_scale * 2.0 / scalars.nu_tangential,
            scalars.key_radial,
            scalars.inflation_radial,
            scalars.query_radial,
            scalars.nu_radial,
        )
    )
