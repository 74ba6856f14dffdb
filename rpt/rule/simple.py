"""The whole rule for one matrix or vector: the page to read first, and what the tests hold the stacks to.

No stacks, no units, no padding, no decision that a device could take; full roots. `rpt.rule.update`
computes the same for many parameters at once. Source: the specification, sections 1-8 and 8a.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .scalars import numbers_of
from .schedule import OUTGROWN, share_of_age
from .update import Rule


def simple_step(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    rule: Rule,
    lr: float,
    decay: float,
    rank: float | None = None,
) -> Tensor:
    """The weight after one step.

    Args:
        weight: W, (rows, cols), or a vector of any length.
        gradient: G, of the same shape, finite.
        state: what is kept from step to step; empty at first.
        rule: the numbers of the group.
        lr, decay: learning rate and weight decay.
        rank: the entropy rank observed since the last step, if any.
    """
    g = -gradient if rule.maximize else gradient
    t = state["t"] = state.get("t", 0) + 1
    c1, c2, tau = 1 - rule.beta1**t, 1 - rule.beta2**t, rule.transport_eps
    m, old = state.get("m", torch.zeros_like(g)), state.get("h")

    # Metric: the live request P.
    p = _whitened(g, state, rule, c2) if g.ndim == 2 else _normalised(g, state, rule, c2)
    n = p.norm()

    # Transport: the momentum rotated from the stored frame h₋ to h.
    rho, h = (n > tau).to(n), p / n.clamp_min(tau)
    if old is not None and n > tau:
        q = torch.sum(old * h).clamp(-1, 1)
        rho = q.clamp_min(0)
        if rule.transport and 1 + q > tau:
            a = torch.sum(m * old)
            z = m - a * old
            turned = a * h + z - torch.sum(z * h) / (1 + q) * (old + h)
            along = torch.sum(turned * h) * h
            m = (1 - rho) * m + rho * (along + rho * (turned - along))
    state["h"] = h if n > tau else old

    # Closure: the axial lag of the averaged momentum.
    m = state["m"] = rule.beta1 * m + (1 - rule.beta1) * p
    mean = m / c1
    u = mean
    if rule.closure:
        lag = n - torch.sum(mean * h) if n > tau else 0.0
        u = rule.beta1 * mean + (1 - rule.beta1) * p + rho * rule.beta1 * lag * h

    # Polar share: a step spread over singular directions, as long as before.
    alpha = state.get("polar_weight", rule.polar_prior)
    if rank is not None:
        beta = rule.polar_beta if 1 - rank >= alpha else rule.polar_release_beta
        alpha = beta * alpha + (1 - beta) * (1 - rank)
    state["polar_weight"] = alpha
    if g.ndim == 2 and alpha > 0 and u.norm() > tau:
        o = _polar_factor(u, rule)
        b = (1 - alpha) * u + alpha * o * (u.norm() / o.norm())
        u = b * (u.norm() / b.norm())

    # Certificate: never against the gradient.
    wide, against = u.double(), g.double() / g.abs().max().clamp_min(torch.finfo(g.dtype).tiny)
    if torch.sum(wide * against) < 0:
        u = (wide - torch.sum(wide * against) / against.square().sum() * against).to(u.dtype)

    # Length: AdamW's law, and never more than a share of the matrix.
    own = u.norm() / math.sqrt(u.numel())
    target, s = own, 1.0
    if rule.signal_length:
        e = state["e"] = rule.beta1 * state.get("e", 0.0) + (1 - rule.beta1) * n**2
    if rule.update_rms is not None and rule.signal_length:
        noise = math.sqrt((1 - rule.beta1) / (1 + rule.beta1) * (2 - c1) / c1)
        ratio = mean.norm() / (e / c1).sqrt() if e > 0 else torch.ones_like(own)
        s = float((ratio / noise).clamp(0.02, 4.0))
        target = torch.full_like(own, rule.update_rms * s)
    elif rule.update_rms is not None and u.numel() > 1:
        target = torch.full_like(own, rule.update_rms)
    if rule.max_relative_step is not None and g.ndim == 2 and lr > 0:
        size = max(weight.norm() / math.sqrt(weight.numel()), 0.5 / math.sqrt(weight.shape[1]))
        target = torch.minimum(
            target, torch.as_tensor(min(s, 1.0) * rule.max_relative_step * size / lr)
        )
    if own > 0:
        u = u * (target / own)
    return (1 - lr * decay) * weight - lr * u


def _normalised(g: Tensor, state: dict[str, Any], rule: Rule, c2: float) -> Tensor:
    """A vector's request: one scalar for all of it, so that no coordinate is privileged."""
    v = rule.beta2 * state.get("v", 0.0) + (1 - rule.beta2) * g.square().mean()
    state["v"] = v
    scale = (v / c2).sqrt() + rule.eps
    return g / scale if scale > 0 else g


def _whitened(g: Tensor, state: dict[str, Any], rule: Rule, c2: float) -> Tensor:
    """A matrix's request L^-1/4 G R^-1/4, its roots made anew when they are due."""
    rows, cols = g.shape
    sides = state.setdefault("sides", [torch.zeros(n, n).to(g) for n in (rows, cols)])
    for i, new in enumerate((g @ g.mT / cols, g.mT @ g / rows)):
        sides[i] = rule.beta2 * sides[i] + (1 - rule.beta2) * new
    peak = max(float(g.abs().max()), state.get("peak", 0.0) * math.sqrt(rule.beta2))
    state["peak"] = peak
    if _due(state, rule, c2, (rows, cols)):
        state["references"] = [side / c2 for side in sides]
        state["roots"] = [_root(side / c2, rule) for side in sides]
        state["last"], state["root_peak"] = state["t"] if peak else 0, peak
    left, right = state["roots"]
    return left @ g @ right  # type: ignore[no-any-return]


def _due(state: dict[str, Any], rule: Rule, c2: float, shape: tuple[int, int]) -> bool:
    if not state.get("last"):
        return True
    age = state["t"] - state["last"]
    if rule.root_drift_threshold is None:
        share = float(share_of_age(torch.tensor([shape]), numbers_of(torch.float64, False)))
        limit = math.ceil(min(rule.max_root_staleness, 1 + state["t"] / 3) * share)
        return bool(age >= limit or state["peak"] > OUTGROWN * state["root_peak"])
    drifts = [
        (side / c2 - was).norm() / was.norm().clamp_min(1e-300)
        for side, was in zip(state["sides"], state["references"], strict=True)
    ]
    return bool(age >= rule.max_root_staleness or max(drifts) >= rule.root_drift_threshold)


def _root(a: Tensor, rule: Rule) -> Tensor:
    values, vectors = torch.linalg.eigh(0.5 * (a + a.mT))
    ridge = max(rule.matrix_ridge, torch.finfo(a.dtype).eps)
    floor = ridge * values.clamp_min(0).mean() + rule.eps**2
    return vectors * values.clamp_min(floor if floor > 0 else 1.0).pow(-0.25) @ vectors.mT  # type: ignore[no-any-return]


def _polar_factor(u: Tensor, rule: Rule) -> Tensor:
    """Newton–Schulz: X <- a X + (b A + c A²) X, A = X Xᵀ."""
    gram = u @ u.mT
    bound = (gram @ gram).norm() ** 0.25 if rule.polar_schedule.tight else u.norm().clamp_min(1e-7)
    x = u / bound
    for a, b, c in rule.polar_schedule.steps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
