"""The update rule over one stack of same-shaped parameters: the page to read first.

    metric       P = L^-1/4 G R^-1/4                 the live request
    transport    m rotated from h₋ to h = P/‖P‖      history in the live frame
    closure      u from m, P and the lag along h
    polar share  u mixed with its polar factor       matrices only
    certificate  ⟨u, G⟩ >= 0
    length       u · update_rms / RMS(u)             default preset only

Source: the RPT guide; formulas and constants follow its specification, sections 1-5 and 8.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from .polar import QUINTIC, polar_share
from .roots import Damping, RootBackend
from .stack import METRIC
from .transport import axial_closure, certificate, live_frame, rescale_to_rms, transport

__all__ = ["Members", "Rule", "Step", "take_step", "update_polar_weight"]


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule for one parameter group; names as in `ResidualPolarTransport`."""

    beta1: float
    beta2: float
    eps: float
    matrix_ridge: float
    polar_beta: float
    polar_release_beta: float
    polar_steps: int
    transport_eps: float
    root_drift_threshold: float
    max_root_staleness: int
    update_rms: float | None
    transport: bool
    closure: bool


@dataclass
class Members:
    """Host-side facts about the stack's members that take part in this step.

    Attributes:
        steps: t of each, this step included.
        root_ages: steps since each one's last refresh; None for a matrix without roots.
        shaped: whether any of them may have a polar weight above zero.
    """

    steps: list[int]
    root_ages: list[int | None]
    shaped: bool


@dataclass
class Step:
    """What one step computed for a stack.

    Attributes:
        update: u, (k, rows·cols), to be multiplied by the learning rate.
        coherence: q, (k,).
        compared: where q compares two frames, bool (k,).
        refreshed: indices whose roots were recomputed.
    """

    update: Tensor
    coherence: Tensor
    compared: Tensor
    refreshed: list[int]


def take_step(
    state: dict[str, Tensor],
    gradient: Tensor,
    sizes: Tensor,
    shape: tuple[int, int],
    backend: RootBackend | None,
    members: Members,
    rule: Rule,
) -> Generator[Tensor, list[float], Step]:
    """One step of `k` parameters, changing `state` in place.

    A generator, so that several stacks can share one host synchronisation: it yields the drift of its
    metrics, (k,), at most once, and is sent the same numbers as a list.

    Args:
        state: the stack's tensors, first dimension k.
        gradient: G, (k, rows·cols), finite, in the working dtype.
        sizes: number of entries of each parameter, (k, 1).
        shape: (rows, cols), wide.
        backend: the metric, or None for vectors.
        members: step counts and root ages.
        rule: the numbers.
    """
    gradient = in_units(gradient, state["unit"])
    correction2 = _correction(rule.beta2, members.steps, gradient)
    refreshed: list[int] = []
    if backend is None:
        request = vector_request(state, gradient, sizes, correction2, rule)
    else:
        matrices = gradient.view(-1, *shape)
        metric = {key[len(METRIC) :]: v for key, v in state.items() if key.startswith(METRIC)}
        backend.accumulate(metric, matrices, rule.beta2)
        due = [age is None or age >= rule.max_root_staleness for age in members.root_ages]
        if not all(due):
            drift = yield backend.drift(metric, shape, correction2)
            due = [d or x >= rule.root_drift_threshold for d, x in zip(due, drift, strict=True)]
        refreshed = [i for i, is_due in enumerate(due) if is_due]
        _refresh(state, metric, shape, backend, refreshed, correction2, rule)
        request = backend.apply(metric, matrices).reshape(gradient.shape)

    stored, momentum = state["frame"], state["momentum"]
    frame = live_frame(request, stored, rule.transport_eps)
    if rule.transport:
        momentum = transport(momentum, stored, frame, rule.transport_eps)
    momentum = torch.lerp(momentum, request, 1.0 - rule.beta1)
    correction1 = _correction(rule.beta1, members.steps, gradient)[:, None]
    if rule.closure:
        update, closing = axial_closure(momentum, request, frame, rule.beta1, correction1)
    else:
        update, closing = momentum / correction1, torch.zeros_like(frame.length)
    state["momentum"].copy_(momentum)
    state["frame"].copy_(frame.direction)
    state["frame_confidence"].copy_(frame.confidence[:, 0])
    state["frame_coherence"].copy_(frame.coherence[:, 0])
    relative = closing / frame.length.clamp_min(rule.transport_eps)
    state["axial_closure"].copy_(relative[:, 0].abs())

    if backend is not None and members.shaped:
        update = polar_share(
            update.view(-1, *shape),
            state["polar_weight"],
            (QUINTIC,) * rule.polar_steps,
            rule.transport_eps,
        ).reshape(gradient.shape)
    update, alignment = certificate(update, gradient)
    state["gradient_alignment"].copy_(alignment[:, 0])
    if rule.update_rms is not None:
        update = rescale_to_rms(update, rule.update_rms, sizes)
    return Step(update, frame.coherence[:, 0], frame.compared[:, 0], refreshed)


def in_units(gradient: Tensor, unit: Tensor) -> Tensor:
    """Divide by each parameter's unit, a power of two fixed at its first non-zero gradient.

    Covariances are fourth-order quantities of the gradient on their way through the metric; in these
    units float32 holds them for gradients from 1e-30 to 1e30, and scaling every gradient by a power of
    two changes no bit of the step. A unit of one (float64) leaves the gradient as it is.
    """
    peak = gradient.abs().amax(dim=-1)
    _, exponent = torch.frexp(peak)
    power = torch.ldexp(torch.ones_like(peak), exponent.clamp(-126, 127))
    fresh = torch.where(peak > 0, power, 0.0)
    unit.copy_(torch.where(unit > 0, unit, fresh))
    scale = torch.where(unit > 0, unit, 1.0)
    # A gradient 2^50 times the first would overflow its own square: it is shortened to that.
    scale = torch.maximum(scale, peak * 2.0**-50)
    return gradient / scale[:, None]


def vector_request(
    state: dict[str, Tensor], gradient: Tensor, sizes: Tensor, correction: Tensor, rule: Rule
) -> Tensor:
    """P = G / (√v̂ + ε) with v the running mean of G²: one scalar, so no coordinate is privileged."""
    square = gradient.square().sum(-1) / sizes[:, 0]
    moment = state["second_moment"].lerp_(square, 1.0 - rule.beta2)
    scale = (moment / correction).sqrt() + _absolute(rule.eps, state["unit"])
    return gradient / torch.where(scale > 0, scale, 1.0)[:, None]


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
    due: list[int],
    correction: Tensor,
    rule: Rule,
) -> None:
    if not due:
        return
    absolute = _absolute(rule.eps, state["unit"]).square()
    if len(due) == len(correction):
        refresh = backend.refresh(metric, shape, correction, Damping(rule.matrix_ridge, absolute))
        condition, failures = state["root_condition"], state["root_failures"]
        condition.copy_(torch.where(refresh.failed, condition, refresh.condition))
        failures += refresh.failed
        return
    index = torch.tensor(due, device=correction.device)
    part = {key: value[index] for key, value in metric.items()}
    refresh = backend.refresh(
        part, shape, correction[index], Damping(rule.matrix_ridge, absolute[index])
    )
    for key, value in part.items():
        metric[key][index] = value
    old = state["root_condition"][index]
    state["root_condition"][index] = torch.where(refresh.failed, old, refresh.condition)
    state["root_failures"][index] += refresh.failed.to(torch.int64)


def _absolute(eps: float, unit: Tensor) -> Tensor:
    """ε in the units that the gradient was divided by; its square must stay in float32's range."""
    return (eps / torch.where(unit > 0, unit, 1.0)).clamp_max(1e15)


def _correction(beta: float, steps: list[int], like: Tensor) -> Tensor:
    """1 - β^t, (k,): a fill where all steps agree, so that no host memory is copied."""
    if len(set(steps)) == 1:
        return like.new_full((len(steps),), 1.0 - beta ** steps[0])
    return torch.tensor([1.0 - beta**t for t in steps], dtype=like.dtype, device=like.device)
