"""The update rule over one stack of same-shaped parameters: the page to read first.

    metric       P = L^-1/4 G R^-1/4                 the live request
    transport    m rotated from h₋ to h = P/‖P‖      history in the live frame
    closure      u from m, P and the lag along h
    polar share  u mixed with its polar factor       matrices only
    certificate  ⟨u, G⟩ >= 0
    length       RMS(u) = update_rms · s             default preset only (`length`)

Source: the RPT guide; formulas and constants follow its specification, sections 1-5 and 8.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .length import next_energy, rescale, signal, step_rms
from .polar import Schedule, polar_share
from .roots import Damping, RootBackend
from .scalars import Scalars, as_scalars, as_tensor, choose, write_columns
from .stack import HELD, MEASURED, METRIC
from .transport import carry, certificate, live_frame, norm, store_frame

__all__ = ["Members", "Rule", "Step", "divisor", "next_unit", "take_step", "update_polar_weight"]


# The share of its waiting time after which a small matrix joins another's refresh.
_SOON = 0.7


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule for one parameter group; names as in `ResidualPolarTransport`."""

    beta1: float
    beta2: float
    eps: float
    matrix_ridge: float
    polar_beta: float
    polar_release_beta: float
    polar_schedule: Schedule
    transport_eps: float
    root_drift_threshold: float | None
    max_root_staleness: int
    update_rms: float | None
    signal_length: bool
    transport: bool
    closure: bool
    # Whether a value may be read on the host where its memory is the host's anyway.
    host_reads: bool = True


@dataclass
class Members:
    """Facts about the stack's members that take part in this step.

    Lists of numbers where the host decides; (k,) float64 tensors of the same meaning, and `chosen`,
    where it must not.

    Attributes:
        steps: t of each, this step included.
        metric_steps: how many gradients the metric, or a vector's second moment, has seen.
        root_ages: steps since each one's last refresh; None for a matrix without roots.
        units: what each gradient was divided by.
        positions: running number of each among its like, which spreads refreshes over the steps.
        shapes: true (rows, cols) of matrices padded to the stack's shape, (k, 2), or None.
        limits: largest RMS that each update may have, (k,), or None.
        company: whether one whose roots are due takes along those due soon.
        outgrown: whether its gradients have become much larger than those its roots were made of.
        matrices: how many of them are matrices, which come first; the lists of roots and positions
            are theirs alone.
        shaped: whether any of those may have a polar weight above zero.
        chosen: indices whose roots are to be made anew, int64; None: `due_by_age` says which.
    """

    steps: list[int] | Tensor
    metric_steps: list[int] | Tensor
    units: list[float] | Tensor
    matrices: int
    shaped: bool
    root_ages: list[int | None] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    outgrown: list[bool] = field(default_factory=list)
    shapes: Tensor | None = None
    limits: Tensor | None = None
    company: bool = False
    chosen: Tensor | None = None


@dataclass
class Step:
    """What one step computed for a stack.

    Attributes:
        update: u, (k, rows·cols), to be multiplied by the learning rate.
        coherence: q, (k,).
        compared: where q compares two frames, bool (k,).
        refreshed: indices whose roots were due.
        failed: which of those kept their previous root, bool; None where none was due.
    """

    update: Tensor
    coherence: Tensor
    compared: Tensor
    refreshed: list[int]
    failed: Tensor | None


def take_step(
    state: dict[str, Tensor],
    gradient: Tensor,
    sizes: Tensor,
    layout: tuple[int, int],
    backend: RootBackend | None,
    members: Members,
    rule: Rule,
) -> Generator[Tensor, list[float], Step]:
    """One step of `k` parameters, changing `state` in place.

    A generator, so that several stacks can share one host synchronisation: it yields the drift of its
    metrics, (k,), at most once, and is sent the same numbers as a list.

    Args:
        state: the stack's tensors, first dimension k.
        gradient: G divided by its unit, (k, rows·cols), finite, in the working dtype.
        sizes: number of entries of each parameter, (k, 1).
        layout: (rows, cols) of the matrices as the stack holds them, wide or tall.
        backend: the metric, or None for vectors.
        members: step counts and root ages.
        rule: the numbers.
    """
    host_reads = rule.host_reads and gradient.device.type == "cpu"
    matrices = members.matrices
    correction2 = _correction(rule.beta2, members.metric_steps, gradient)
    refreshed: list[int] = []
    failed: Tensor | None = None
    requests = []
    if backend is not None and matrices:
        request, refreshed, failed = yield from _matrix_request(
            state, gradient[:matrices], layout, backend, correction2[:matrices], members, rule
        )
        requests.append(request)
    if matrices < len(gradient):
        requests.append(
            _vector_request(
                state["second_moment"],
                gradient[matrices:],
                sizes[matrices:],
                correction2[matrices:],
                members.units[matrices:],
                rule.eps,
                rule.beta2,
                host_reads,
            )
        )
    request = requests[0] if len(requests) == 1 else torch.cat(requests)

    stored, measured = state["frame"], as_scalars(state[MEASURED], host_reads)
    frame = live_frame(request, stored, measured[:, HELD:] > 0, rule.transport_eps, host_reads)
    correction1 = as_scalars(_correction(rule.beta1, members.steps, gradient)[:, None], host_reads)
    carried = carry(
        state["momentum"],
        stored,
        request,
        frame,
        beta1=rule.beta1,
        correction=correction1,
        transport_eps=rule.transport_eps,
        transport=rule.transport,
        closure=rule.closure,
    )
    store_frame(stored, request, frame)
    update = carried.update
    if matrices and members.shaped:
        shaped = polar_share(
            update[:matrices].view(-1, *layout),
            state["polar_weight"][:matrices],
            rule.polar_schedule,
            rule.transport_eps,
            host_reads,
        ).reshape(matrices, -1)
        if matrices < len(update):
            update[:matrices] = shaped
        else:
            update = shaped
    update, length, alignment = certificate(update, gradient, host_reads)
    closing = abs(carried.closing * frame.inverse)
    held = (measured[:, HELD:] > 0) | frame.live
    strength = capped = frame.confidence * 0.0
    strength = strength + 1.0
    if rule.signal_length:
        energy = as_scalars(state["request_energy"][:, None], host_reads)
        energy[:] = next_energy(energy, frame.length, rule.beta1, correction1)
        size = as_scalars(norm(carried.momentum), host_reads)
        strength = signal(size, energy, rule.beta1, correction1)
    if rule.update_rms is not None or members.limits is not None:
        sizes = as_scalars(sizes, host_reads)
        own = length / sizes**0.5
        limit = None
        if members.limits is not None:
            limit = as_scalars(members.limits[:, None], host_reads)
        target = step_rms(rule.update_rms, strength, own, limit)
        if rule.update_rms is not None and not rule.signal_length:
            # There is nothing to spread, and a fixed length would leave a scalar's sign alone.
            target = choose(sizes > 1, target, own)
        if limit is not None:
            capped = (target >= limit) & (length > 0)
        update = rescale(update, length, target, sizes)
    columns = (frame.confidence, frame.coherence, closing, alignment, strength, capped, held)
    write_columns(state[MEASURED], columns)
    coherence, compared = as_tensor(frame.coherence[:, 0]), as_tensor(frame.compared[:, 0])
    return Step(update, coherence, compared, refreshed, failed)


def _matrix_request(
    state: dict[str, Tensor],
    gradient: Tensor,
    layout: tuple[int, int],
    backend: RootBackend,
    correction: Tensor,
    members: Members,
    rule: Rule,
) -> Generator[Tensor, list[float], tuple[Tensor, list[int], Tensor | None]]:
    """P = L^-1/4 G R^-1/4, (k, rows·cols), with roots made anew where due: which, and which failed."""
    tall = layout[0] > layout[1]
    shape = (layout[1], layout[0]) if tall else layout
    matrices = gradient.view(-1, *layout)
    if tall:
        # A backend sees every matrix wide; the built-in ones read it through its strides.
        matrices = matrices.mT if backend.any_strides else matrices.mT.contiguous()
    metric = {key[len(METRIC) :]: v for key, v in state.items() if key.startswith(METRIC)}
    if members.shapes is None:
        backend.accumulate(metric, matrices, rule.beta2)
    else:
        backend.accumulate(metric, matrices, rule.beta2, members.shapes)  # type: ignore[call-arg]
    index, refreshed = members.chosen, []
    failed: Tensor | None = None
    if index is None:
        due = due_by_age(members, rule)
        if rule.root_drift_threshold is not None and not all(due):
            drift = yield backend.drift(metric, shape, correction)
            due = [d or x >= rule.root_drift_threshold for d, x in zip(due, drift, strict=True)]
        refreshed = [i for i, is_due in enumerate(due) if is_due]
        if 0 < len(refreshed) < len(due):
            index = torch.tensor(refreshed, device=gradient.device)
    if refreshed or index is not None:
        failed = _refresh(state, metric, shape, backend, index, correction, members, rule)
    request = backend.apply(metric, matrices)
    return (request.mT if tall else request).reshape(gradient.shape), refreshed, failed


def next_unit(unit: float, peak: float) -> float:
    """The power of two that a float32 gradient is divided by, fixed at its first non-zero value.

    Covariances are squares of the gradient: in these units float32 holds them for gradients from 1e-30
    to 1e30, and scaling every gradient by a power of two changes no bit of the step.

    Args:
        unit: the unit so far, 0 for none.
        peak: largest absolute entry of the gradient.
    """
    if unit or not peak:
        return unit
    return math.ldexp(1.0, min(max(math.frexp(peak)[1], -126), 126))


def divisor(unit: float, peak: float) -> float:
    """What to divide a gradient by: its unit, or more where its square would still overflow."""
    return max(unit or 1.0, peak * 2.0**-50)


def due_by_age(members: Members, rule: Rule) -> list[bool]:
    """Which matrices need new roots whatever their drift.

    With a drift threshold: those without roots or `max_root_staleness` steps old, exactly as
    published. Without one, age decides alone: often while the covariance is young, later after between
    half of `max_root_staleness` and all of it, so that a stack's matrices do not all fall due at once;
    and at once where the gradient has outgrown its roots, which would pass it on at a length that
    drowns the momentum for hundreds of steps. Small matrices go in company: one call for several costs
    little more than for one, so that one due takes along those due soon.
    """
    assert isinstance(members.steps, list)
    due, soon = [], []
    steps = members.steps[: members.matrices]
    for step, age, position, outgrown in zip(
        steps, members.root_ages, members.positions, members.outgrown, strict=True
    ):
        limit = rule.max_root_staleness
        if rule.root_drift_threshold is None:
            limit = 0 if outgrown else max(1, int(min(limit, step / 3) * spread(position)))
        due.append(age is None or age >= limit)
        soon.append(age is None or age >= _SOON * limit)
    together = members.company and rule.root_drift_threshold is None and any(due)
    return soon if together else due


def spread(position: int) -> float:
    """From half to one: the share of the longest age that the roots of matrix `position` may reach."""
    # Multiples of the golden ratio are spread evenly in [0, 1).
    return 0.5 + 0.5 * (position * 0.6180339887498949 % 1.0)


def _vector_request(
    moment: Tensor,
    gradient: Tensor,
    sizes: Tensor,
    correction: Tensor,
    units: list[float] | Tensor,
    eps: float,
    beta2: float,
    host_reads: bool,
) -> Tensor:
    """P = G / (√v̂ + ε) with v the running mean of G²: one scalar, so no coordinate is privileged."""
    lengths = as_scalars(torch.linalg.vector_norm(gradient, dim=-1), host_reads)
    mean = as_scalars(moment, host_reads)
    mean += (lengths * lengths / as_scalars(sizes[:, 0], host_reads) - mean) * (1.0 - beta2)
    scale: Scalars = (mean / as_scalars(correction, host_reads)) ** 0.5
    if eps:
        scale = scale + as_scalars(_absolute(eps, units, moment), host_reads)
    return gradient / as_tensor(choose(scale == 0, 1.0, scale))[:, None]


def update_polar_weight(
    weight: Tensor, rank: Tensor, *, polar_beta: float, polar_release_beta: float
) -> Tensor:
    """α <- βα + (1-β)(1-r), β = polar_beta while α rises, polar_release_beta while it falls.

    Args:
        weight: α, (k,).
        rank: r in [0, 1], NaN where there was no observation: α then stays, (k,).
    """
    target = 1.0 - rank
    beta = torch.full_like(weight, polar_beta).masked_fill(target < weight, polar_release_beta)
    return torch.where(rank.isnan(), weight, beta * weight + (1.0 - beta) * target)


def _refresh(
    state: dict[str, Tensor],
    metric: dict[str, Tensor],
    shape: tuple[int, int],
    backend: RootBackend,
    index: Tensor | None,
    correction: Tensor,
    members: Members,
    rule: Rule,
) -> Tensor:
    """Recompute the roots of the rows `index`, or of all; which of them failed, in that order."""
    units = members.units[: members.matrices]
    absolute = _absolute(rule.eps, units, correction).square_()
    products = not rule.host_reads
    if index is None:
        damping = Damping(rule.matrix_ridge, absolute, members.shapes, products)
        refresh = backend.refresh(metric, shape, correction, damping)
        condition, failures = state["root_condition"], state["root_failures"]
        condition.copy_(torch.where(refresh.failed, condition, refresh.condition))
        failures += refresh.failed
        return refresh.failed
    part = {key: value[index] for key, value in metric.items()}
    shapes = None if members.shapes is None else members.shapes[index]
    damping = Damping(rule.matrix_ridge, absolute[index], shapes, products)
    refresh = backend.refresh(part, shape, correction[index], damping)
    for key, value in part.items():
        metric[key][index] = value
    old = state["root_condition"][index]
    state["root_condition"][index] = torch.where(refresh.failed, old, refresh.condition)
    state["root_failures"][index] += refresh.failed.to(torch.int64)
    return refresh.failed


def _absolute(eps: float, units: list[float] | Tensor, like: Tensor) -> Tensor:
    """ε in the units that gradients were divided by; its square must stay in float32's range."""
    if isinstance(units, Tensor):
        return (eps / torch.where(units > 0, units, 1.0)).clamp_max(1e15).to(like.dtype)
    values = [min(eps / (unit or 1.0), 1e15) for unit in units]
    if len(set(values)) == 1:
        return like.new_full((len(values),), values[0])
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def _correction(beta: float, steps: list[int] | Tensor, like: Tensor) -> Tensor:
    """1 - β^t, (k,): a fill where all steps agree, so that no host memory is copied."""
    if isinstance(steps, Tensor):
        return (1.0 - torch.pow(beta, steps)).to(like.dtype)
    if len(set(steps)) == 1:
        return like.new_full((len(steps),), 1.0 - beta ** steps[0])
    return torch.tensor([1.0 - beta**t for t in steps], dtype=like.dtype, device=like.device)
