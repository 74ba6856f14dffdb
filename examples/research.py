"""A small optimizer for trying out what an observation could be good for.

    from examples.research import Arm, ResearchTransport
    optimizer = ResearchTransport(model, lr=3e-3, arm=Arm(sides="R"))

The default preset's rule (length from the signal, thin matrices as vectors, no step above 7 % of a matrix)
from the library's own pure functions, one parameter at a time: no stacks, no checkpoints, one device, and so
few lines that any of them can be changed in a minute. What an observer sees, each layer's activations X (rows
of n) and the cotangents Δ of its outputs (rows of m), is kept for the step as it is, and an `Arm` says where
it goes. `Arm()` observes nothing and trains like `rpt.ResidualPolarTransport`
(the battery's gpt_char at 1e-2, one seed: 1.924, the library 1.920).
What came of it: docs/observation.md; the comparison itself: examples/bench/observation_arms.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from rpt.observers.patches import Convolution, sampled_cotangents, sampled_patches
from rpt.observers.rank import entropy_rank
from torch import Tensor, nn

from rpt.roots.eigh import inverse_root
from rpt.rule.length import (
    next_energy,
    noise_ratio,
    relative_limit,
    rescale,
    signal,
    step_rms,
    tempered,
)
from rpt.rule.polar import polar_schedule, polar_share
from rpt.rule.scalars import numbers_of
from rpt.rule.transport import carry, certificate, live_frame, store_frame

__all__ = ["Arm", "ResearchTransport"]

BETA1, BETA2, TAU, KAPPA, CAP, RIDGE = 0.9, 0.95, 1e-7, 1.2, 0.07, 1e-4
STALENESS = 10  # roots are made anew every 10 steps, earlier ones sooner
LONGEST = 320  # a longer side gets a diagonal, as in the library's "auto" roots
SCHEDULE = polar_schedule("tight", 3)
NUMBERS = numbers_of(torch.float32, True)


@dataclass(frozen=True)
class Arm:
    """Where the statistics go.

    Attributes:
        sides: which sides of the metric are observed: "R" (XᵀX), "L" (ΔᵀΔ), "RL"; "" for none.
        power: exponent of the observed sides; the gradient's own keep -1/4.
        beta2, ridge, rows: of the observed sides; sampled rows per layer and step.
        back: sides whose root, to the power `back_power`, is applied once more after the polar factor.
        back_power: see `back`: -1/2 on both would be steepest descent in that metric's operator norm.
        back_where: "all" matrices, or the "seen" ones (linear and convolutional layers), or the
            "unseen" (tables).
        length: s from "time" (section 8a), the step's own "noise", "both" (geometric mean), or "shrunk":
            the time's, times the root of the signal's share in this gradient.
        polar: weight "one"; "head": 0 at the last layer of the graph; "rank": 1 - rank, as published;
            "beyond": 1 - rank only where it lies a tenth below that of re-paired rows; "wiener": per
            singular direction, σ²/(σ² + noise).
        cap: no step changes a matrix's "weights", or its "outputs" on the sampled rows, by more than 7 %.
        trim: rows count at most this many times the median |x||δ| in the gradient; 0 for no bound.
    """

    sides: str = ""
    power: float = -0.25
    beta2: float = BETA2
    ridge: float = RIDGE
    rows: int = 256
    back: str = ""
    back_power: float = -0.25
    back_where: str = "all"
    length: str = "time"
    polar: str = "one"
    cap: str = "weights"
    trim: float = 0.0

    @property
    def observes(self) -> bool:
        return self != replace(Arm(), back=self.back, back_power=self.back_power)


class Seen(NamedTuple):
    """Sampled rows of one layer: X (b, n), B·Δ (b, m), and 1/B·(what a sum over them stands for)."""

    x: Tensor
    delta: Tensor
    total: int
    noise: Tensor  # Σ |x|²|δ|² over all rows: what ‖G‖² would be if rows were independent noise


class Watch:
    """Keeps the sampled rows of every linear and convolutional layer until the step has used them."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.seen: dict[Tensor, Seen] = {}
        self.raw: dict[Tensor, Tensor] = {}  # ‖G‖ before anything clips it
        self.order: list[Tensor] = []
        self.rows, self.generator = rows, torch.Generator().manual_seed(0)
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_hook(self._forward)
                module.weight.register_post_accumulate_grad_hook(self._length)

    def _length(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.raw[weight] = weight.grad.norm()

    def _forward(self, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        weight = module.weight
        self.order = [p for p in self.order if p is not weight] + [weight]
        output.register_hook(lambda delta: self._backward(module, inputs[0].detach(), delta))

    def _backward(self, module: Any, x: Tensor, delta: Tensor) -> None:
        total = delta.numel() // module.weight.shape[0]
        if isinstance(module, nn.Conv2d):
            x, delta = (
                sampled_patches(Convolution.of(module), x, delta.shape),
                sampled_cotangents(delta, 2),
            )
        x, delta = x.flatten(0, -2), delta.detach().flatten(0, -2)
        noise = (x.square().sum(1) @ delta.square().sum(1)) * (total / len(x))
        if len(x) > self.rows:
            chosen = torch.randint(len(x), (self.rows,), generator=self.generator)
            x, delta = x[chosen], delta[chosen]
        self.seen[module.weight] = Seen(x, delta * total, total, noise)


class ResearchTransport(torch.optim.Optimizer):
    """Residual Polar Transport in its default preset, and the uses of an observation that `arm` names."""

    def __init__(self, model: nn.Module, lr: float, arm: Arm, weight_decay: float = 0.01) -> None:
        super().__init__(model.parameters(), {"lr": lr, "weight_decay": weight_decay})
        self.arm = arm
        self.watch = Watch(model, arm.rows) if arm.observes else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group["lr"], group["weight_decay"])
        if self.watch is not None:
            self.watch.seen.clear()

    def _step(self, p: Tensor, rate: float, decay: float) -> None:
        assert p.grad is not None
        arm, watch, state = self.arm, self.watch, self.state[p]
        gradient = p.grad.reshape(p.shape[0], -1) if p.ndim > 1 else p.grad.reshape(1, -1)
        is_matrix = min(gradient.shape) > 1
        seen = watch.seen.get(p) if watch is not None and is_matrix else None
        if not state:
            flat = gradient.reshape(1, -1)
            state.update(t=0, last=-STALENESS, energy=np.zeros((1, 1), np.float32), alpha=1.0)
            state.update(momentum=torch.zeros_like(flat), frame=torch.zeros_like(flat), v=0.0)
        state["t"] = t = state["t"] + 1
        scale = 1.0
        if seen is not None and watch is not None:
            scale = float(gradient.norm() / watch.raw[p].clamp_min(1e-30))  # what clipping did
            if arm.trim:
                gradient = trimmed(gradient, seen, arm.trim, scale)
        if is_matrix:
            request = self._request(state, gradient, seen)
        else:
            state["v"] += (1 - BETA2) * (gradient.square().mean() - state["v"])
            request = gradient / (state["v"] / (1 - BETA2**t)).sqrt().clamp_min(1e-30)
        request = request.reshape(1, -1)
        held = np.full((1, 1), t > 1)
        frame = live_frame(request, state["frame"], held, TAU, NUMBERS)
        correction = np.full((1, 1), 1 - BETA1**t, np.float32)
        options: dict[str, Any] = {"beta1": BETA1, "correction": correction, "transport_eps": TAU}
        options["numbers"] = NUMBERS
        carried = carry(state["momentum"], state["frame"], request, frame, **options)
        store_frame(state["frame"], request, frame, NUMBERS)
        update = carried.update
        if is_matrix:
            update = self._shape(p, update.view_as(gradient), seen, scale).reshape(1, -1)
        update, size, _ = certificate(update, gradient.reshape(1, -1), NUMBERS)
        state["energy"] = next_energy(state["energy"], frame.length, BETA1, correction, NUMBERS)
        momentum = carried.momentum.norm().reshape(1, 1).numpy()
        s = signal(momentum, state["energy"], BETA1, correction, NUMBERS)
        if seen is not None and watch is not None and arm.length != "time":
            share = float((1 - seen.noise / watch.raw[p].square()).clamp(0, 1))
            own = (1 + share * (noise_ratio(BETA1, correction) ** -2 - 1)) ** 0.5
            state["share"] = share
            s = {"noise": own, "both": (s * own) ** 0.5, "shrunk": s * max(share, 0.01) ** 0.5}[
                arm.length
            ]
        limit = None
        if is_matrix and rate:
            norms, entries, fan_in = (
                np.full((1, 1), float(x), np.float32)
                for x in (p.norm(), p.numel(), p.numel() // len(p))
            )
            limit = relative_limit(norms, entries, fan_in, CAP, rate, NUMBERS)
            if seen is not None and arm.cap == "outputs":
                weights, length = p.reshape(gradient.shape), update.norm().clamp_min(1e-30)
                own_rms = (seen.x @ weights.mT).square().mean().sqrt()
                floor = 0.5 * seen.x.square().mean().sqrt()
                moved = (seen.x @ update.view_as(gradient).mT).square().mean().sqrt()
                per_rms = moved / (length * p.numel() ** -0.5)
                limit[:] = float(CAP * torch.maximum(own_rms, floor) / (rate * per_rms))
            limit = tempered(limit, s, NUMBERS)
        target = step_rms(KAPPA, s, size / p.numel() ** 0.5, limit, NUMBERS)
        update = rescale(update, size, target, np.full((1, 1), float(p.numel())), NUMBERS)
        p.mul_(1 - rate * decay).sub_(update.view_as(p), alpha=rate)

    def _request(self, state: dict[str, Any], gradient: Tensor, seen: Seen | None) -> Tensor:
        """P = L^a G R^b, each side's covariance the gradient's own or the observed one."""
        t, arm = state["t"], self.arm
        due = t - state["last"] >= min(STALENESS, max(1, t // 3))
        request = gradient
        for name, rows in (("L", gradient), ("R", gradient.mT)):
            observed = name in arm.sides and seen is not None
            power, beta2, ridge = -0.25, BETA2, RIDGE
            if observed:
                assert seen is not None
                rows = seen.delta.mT if name == "L" else seen.x.mT
                power, beta2, ridge = arm.power, arm.beta2, arm.ridge
            dense = len(rows) <= LONGEST
            new = (rows @ rows.mT if dense else rows.square().sum(1)) / rows.shape[1]
            old = state.setdefault(name, torch.zeros_like(new))
            old.lerp_(new, 1 - beta2)
            if due:
                root, failed = side_root(old / (1 - beta2**t), power, ridge)
                if not failed:
                    state[name + "root"] = state[name + "back"] = root
                if name in arm.back and power != arm.back_power:
                    root, failed = side_root(old / (1 - beta2**t), arm.back_power, ridge)
                    if not failed:
                        state[name + "back"] = root
            request = apply_side(state[name + "root"], request, name)
        if due:
            state["last"] = t
        return request

    def _shape(self, p: Tensor, update: Tensor, seen: Seen | None, scale: float) -> Tensor:
        """The polar share, with the weight that the arm asks for; then the sides of `back`."""
        arm, state, watch = self.arm, self.state[p], self.watch
        if arm.polar == "wiener" and seen is not None:
            shaped = self._wiener(state, update, seen, scale)
        else:
            if watch is not None and arm.polar == "head" and watch.order[-1] is p:
                state["alpha"] = 0.0
            elif seen is not None and arm.polar in ("rank", "beyond") and state["t"] % 4 == 1:
                rank, target = float(entropy_rank(seen.x, seen.delta)), 1.0
                if arm.polar == "rank" or rank < 0.9 * float(
                    entropy_rank(seen.x, seen.delta[torch.randperm(len(seen.delta))])
                ):
                    target = 1.0 - rank
                state["alpha"] = 0.9 * state["alpha"] + 0.1 * target
            weight = np.full((1, 1), state["alpha"], np.float32)
            shaped = polar_share(update[None], weight, SCHEDULE, TAU, NUMBERS)[0]
        where = {"all": True, "seen": seen is not None, "unseen": seen is None}[arm.back_where]
        for name in arm.back if where else "":
            shaped = apply_side(state[name + "back"], shaped, name)
        return shaped

    def _wiener(self, state: dict[str, Any], update: Tensor, seen: Seen, scale: float) -> Tensor:
        """U diag(σ²/(σ² + noise)) Vᵀ: noise is that of the momentum along each singular direction."""
        u, sigma, vt = torch.linalg.svd(update, full_matrices=False)
        left = apply_side(state["Lroot"], seen.delta.mT, "L").mT @ u  # (b, k)
        right = apply_side(state["Rroot"], seen.x, "R") @ vt.mT
        # A row's gradient along direction k is left·right; G is the mean of `total` of them.
        noise = (left * right).square().mean(0) / seen.total * scale**2
        noise = noise * (1 - BETA1) / (1 + BETA1)
        weight = sigma.square() / (sigma.square() + noise).clamp_min(1e-30)
        return (u * (weight * update.norm() / weight.norm().clamp_min(1e-30))) @ vt


def side_root(covariance: Tensor, power: float, ridge: float) -> tuple[Tensor, bool]:
    """(n, n) to a matrix power, or the diagonal (n,) to an entrywise one; and whether that failed."""
    if covariance.ndim == 1:
        floor = (ridge * covariance.mean()).clamp_min(1e-37)
        return torch.maximum(covariance, floor).pow(power), False
    found = inverse_root(covariance, power, ridge=ridge)
    return found.root, bool(found.failed)


def apply_side(root: Tensor, matrix: Tensor, name: str) -> Tensor:
    """Left ("L") or right product with a side's root, dense or diagonal."""
    if name == "L":
        return root @ matrix if root.ndim == 2 else root[:, None] * matrix
    return matrix @ root if root.ndim == 2 else matrix * root


def trimmed(gradient: Tensor, seen: Seen, bound: float, scale: float) -> Tensor:
    """The gradient without the excess of rows longer than `bound` medians (of the sampled rows)."""
    length = seen.x.norm(dim=1) * seen.delta.norm(dim=1)
    excess = (1 - bound * length.median() / length.clamp_min(1e-30)).clamp_min(0)
    return gradient - scale * (seen.delta * excess[:, None]).mT @ seen.x / len(seen.x)
