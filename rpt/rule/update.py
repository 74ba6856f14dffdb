"""The update rule over one stack of parameters; `rpt.rule.simple` says the same for one of them.

    metric       P = L^-1/4 G R^-1/4                 the live request
    transport    m rotated from h₋ to h = P/‖P‖      history in the live frame
    closure      u from m, P and the lag along h
    polar share  u mixed with its polar factor       matrices only
    certificate  ⟨u, G⟩ >= 0
    length       RMS(u) = update_rms · s             default preset only (`length`)

Source: the RPT guide; formulas and constants follow its specification, sections 1-5, 8 and 8a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..roots import Damping, RootBackend
from .length import next_energy, rescale, signal, step_rms, tempered
from .polar import Schedule, polar_share, working_dtype
from .scalars import Numbers, Scalars
from .transport import carry, certificate, live_frame, norm, store_frame

__all__ = [
    "Facts",
    "Rows",
    "Rule",
    "Step",
    "drift",
    "measure",
    "refresh",
    "take_step",
    "update_polar_weight",
]


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule for one parameter group; names as in `ResidualPolarTransport`."""

    beta1: float
    beta2: float
    eps: float
    matrix_ridge: float
    polar_prior: float
    polar_beta: float
    polar_release_beta: float
    polar_schedule: Schedule
    polar_dtype: str
    transport_eps: float
    root_drift_threshold: float | None
    max_root_staleness: int
    update_rms: float | None
    signal_length: bool
    max_relative_step: float | None
    transport: bool
    closure: bool
    maximize: bool


@dataclass
class Rows:
    """What a step works on and changes in place: k rows of a stack, those of matrices first.

    Attributes:
        momentum, frame: m and h₋, (k, rows·cols).
        metric: the root backend's state, first dimension the matrices.
        values: numbers of each row, (k, 1), those that only matrices or vectors have (matrices, 1)
            and (vectors, 1); names as in `rpt.store.schema`.
        sizes: number of entries behind each row, without padding, (k, 1).
        layout: (rows, cols) of the matrices as they lie in a row, wide or tall.
        matrices: how many of the rows are matrices.
        shapes: true (rows, cols) of matrices padded to the stack's shape, (matrices, 2), or None.
        backend: the metric, or None where there are no matrices.
    """

    momentum: Tensor
    frame: Tensor
    metric: dict[str, Tensor]
    values: dict[str, Scalars]
    sizes: Scalars
    layout: tuple[int, int]
    matrices: int
    shapes: Tensor | None
    backend: RootBackend | None
    numbers: Numbers


@dataclass
class Facts:
    """What of a row's history decides this step.

    Attributes:
        correction1: 1 - β1^t, (k, 1).
        correction2: 1 - β2^t of what the metric, or a vector's second moment, has seen, (k, 1).
        units: what the gradient was divided by, (k, 1); looked at where there is an `eps`.
        due: indices of matrices whose roots are to be made anew, int64, ascending; None for none.
        products: whether roots must come from matrix products: decompositions wait for the host.
        shaped: whether any matrix may have a polar weight above zero.
        limits: largest RMS that each update may have, (k, 1), or None.
    """

    correction1: Scalars
    correction2: Scalars
    units: Scalars
    due: Tensor | None
    products: bool
    shaped: bool
    limits: Scalars | None = None


@dataclass
class Step:
    """What one step computed for a stack.

    Attributes:
        update: u, (k, rows·cols), to be multiplied by the learning rate.
        coherence: q, (k,).
        compared: where q compares two frames, bool (k,).
        failed: which of the roots that were due could not be made, bool; None where none was due.
    """

    update: Tensor
    coherence: Tensor
    compared: Tensor
    failed: Tensor | None


def measure(rows: Rows, gradient: Tensor, rule: Rule) -> None:
    """Add a gradient to the metric's statistics.

    Args:
        gradient: G divided by its unit, (k, rows·cols), finite, in the working dtype.
    """
    backend = rows.backend
    if backend is None or not rows.matrices:
        return
    matrices = _wide(rows, gradient)
    if rows.shapes is None:
        backend.accumulate(rows.metric, matrices, rule.beta2)
    else:
        backend.accumulate(rows.metric, matrices, rule.beta2, rows.shapes)  # type: ignore[call-arg]


def drift(rows: Rows, correction2: Scalars) -> Tensor:
    """Relative change of each matrix's statistics since its roots were made, (matrices,)."""
    assert rows.backend is not None
    correction = rows.numbers.tensor(correction2[: rows.matrices]).view(-1)
    return rows.backend.drift(rows.metric, _wide_shape(rows), correction)


def take_step(rows: Rows, gradient: Tensor, facts: Facts, rule: Rule) -> Step:
    """One step of k rows, after `measure`; changes them in place.

    Args:
        gradient: as in `measure`.
        facts: of their history.
    """
    numbers, values, count = rows.numbers, rows.values, rows.matrices
    failed = steepness = None
    requests = []
    if rows.backend is not None and count:
        if facts.due is not None:
            failed = refresh(rows, facts, rule)
        request = rows.backend.apply(rows.metric, _wide(rows, gradient))
        tall = rows.layout[0] > rows.layout[1]
        requests.append((request.mT if tall else request).reshape(count, -1))
    if count < len(gradient):
        steepness = numbers.read(norm(gradient))
        requests.append(_vector_request(rows, gradient[count:], steepness[count:], facts, rule))
    request = requests[0] if len(requests) == 1 else torch.cat(requests)

    held = values["held"]
    frame = live_frame(request, rows.frame, held, rule.transport_eps, numbers)
    carried = carry(
        rows.momentum,
        rows.frame,
        request,
        frame,
        beta1=rule.beta1,
        correction=facts.correction1,
        transport_eps=rule.transport_eps,
        numbers=numbers,
        transport=rule.transport,
        closure=rule.closure,
    )
    store_frame(rows.frame, request, frame, numbers)
    update = carried.update
    length = numbers.read(norm(update))
    if count and facts.shaped:
        matrices = _matrices(rows, update)
        polar_share(
            matrices,
            values["polar_weight"][:count],
            rule.polar_schedule,
            rule.transport_eps,
            numbers,
            length[:count, :, None],
            out=matrices,
            dtype=working_dtype(rule.polar_dtype, update),
        )
    update, length, alignment = certificate(update, gradient, numbers, (length, steepness))
    strength, capped, limits = 1.0, 0.0, facts.limits
    if rule.signal_length:
        energy = values["request_energy"]
        energy[:] = next_energy(energy, frame.length, rule.beta1, facts.correction1, numbers)
        size = numbers.read(norm(carried.momentum))
        strength = signal(size, energy, rule.beta1, facts.correction1, numbers)
        limits = limits if limits is None else tempered(limits, strength, numbers)
    if rule.update_rms is not None or limits is not None:
        own = length / rows.sizes**0.5
        target = step_rms(rule.update_rms, strength, own, limits, numbers)
        if rule.update_rms is not None and not rule.signal_length:
            # There is nothing to spread, and a fixed length would leave a scalar's sign alone.
            target = numbers.where(rows.sizes > 1, target, own)
        if limits is not None:
            capped = (target >= limits) & (length > 0)
        update = rescale(update, length, target, rows.sizes, numbers)
    values["frame_confidence"][:] = frame.confidence
    values["frame_coherence"][:] = frame.coherence
    values["axial_closure"][:] = abs(carried.closing * frame.inverse)
    values["gradient_alignment"][:] = alignment
    values["step_signal"][:] = strength
    values["step_capped"][:] = capped
    held |= frame.live
    coherence, compared = frame.coherence[:, 0], frame.compared[:, 0]
    return Step(update, numbers.tensor(coherence), numbers.tensor(compared), failed)


def update_polar_weight(weight: Scalars, rank: Scalars, rule: Rule, numbers: Numbers) -> Scalars:
    """α <- βα + (1-β)(1-r), β = polar_beta while α rises, polar_release_beta while it falls.

    Args:
        weight: α, (k, 1).
        rank: r in [0, 1], NaN where there was no observation: α then stays, (k, 1).
    """
    target = 1.0 - rank
    rising, falling = (
        beta * weight + (1.0 - beta) * target for beta in (rule.polar_beta, rule.polar_release_beta)
    )
    # A NaN is below nothing, and what becomes of it is not used.
    moved = numbers.where(target < weight, falling, rising)
    return numbers.cast(numbers.where(rank == rank, moved, weight), numbers.dtype)


def _matrices(rows: Rows, stacked: Tensor) -> Tensor:
    """The matrices among a stack's rows as they lie there, (matrices, rows, cols)."""
    first = stacked if rows.matrices == len(stacked) else stacked[: rows.matrices]
    return first.view(-1, *rows.layout)


def _wide(rows: Rows, gradient: Tensor) -> Tensor:
    """The matrices among a stack's rows as the backend sees them, wide: (matrices, rows, cols)."""
    matrices = _matrices(rows, gradient)
    if rows.layout[0] <= rows.layout[1]:
        return matrices
    # The built-in backends read it through its strides.
    assert rows.backend is not None
    return matrices.mT if rows.backend.any_strides else matrices.mT.contiguous()


def _wide_shape(rows: Rows) -> tuple[int, int]:
    return min(rows.layout), max(rows.layout)


def _vector_request(
    rows: Rows, gradient: Tensor, lengths: Scalars, facts: Facts, rule: Rule
) -> Tensor:
    """P = G / (√v̂ + ε) with v the running mean of G²: one scalar, so no coordinate is privileged."""
    numbers, first = rows.numbers, rows.matrices
    mean = rows.values["second_moment"]
    # Not mean + (new - mean)(1-β2): at β2 = 0 rounding leaves nothing of a new value far below the old.
    mean *= rule.beta2
    mean += lengths * lengths / rows.sizes[first:] * (1.0 - rule.beta2)
    scale = (mean / facts.correction2[first:]) ** 0.5
    if rule.eps:
        scale = scale + _floor(facts.units[first:], rule.eps, numbers)
    return gradient / numbers.tensor(numbers.where(scale == 0, 1.0, scale))


def refresh(rows: Rows, facts: Facts, rule: Rule) -> Tensor:
    """Make the roots anew of the matrices that are due; which of them failed, in that order."""
    assert rows.backend is not None
    assert facts.due is not None
    numbers, due = rows.numbers, facts.due
    first = slice(None, rows.matrices)
    correction = numbers.tensor(facts.correction2[first]).view(-1)
    floor = torch.zeros_like(correction)
    if rule.eps:
        floor = numbers.tensor(_floor(facts.units[first], rule.eps, numbers)).square().view(-1)
    whole = len(due) == rows.matrices
    metric, shapes = rows.metric, rows.shapes
    if not whole:
        metric = {key: value[due] for key, value in metric.items()}
        shapes = None if shapes is None else shapes[due]
        floor, correction = floor[due], correction[due]
    damping = Damping(rule.matrix_ridge, floor, shapes, facts.products)
    done = rows.backend.refresh(metric, _wide_shape(rows), correction, damping)
    if not whole:
        for key, value in metric.items():
            rows.metric[key][due] = value
    index = numbers.read(due)
    failed = numbers.read(done.failed)[:, None]
    conditions, failures = rows.values["root_condition"], rows.values["root_failures"]
    new = numbers.cast(numbers.read(done.condition)[:, None], numbers.dtype)
    conditions[index] = numbers.where(failed, conditions[index], new)
    failures[index] += failed
    return done.failed


def _floor(units: Scalars, eps: float, numbers: Numbers) -> Scalars:
    """ε in the units that gradients were divided by; its square must stay in float32's range."""
    return numbers.cast(
        numbers.at_most(eps / numbers.where(units > 0, units, 1.0), 1e15), numbers.dtype
    )
