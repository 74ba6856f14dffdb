"""Parameters that live on a manifold: what they carry, and the one place for Riemannian AdamW.

A manifold parameter is an `nn.Parameter` that carries an attribute `manifold`: a small object with
the methods of `Manifold`. An optimizer that finds the attribute keeps three states, `exp_avg` (the
point's shape), `exp_avg_sq` (one number per point) and `step`, and calls
`riemannian_adamw_update`; it needs to know nothing of the geometry. This module depends on torch
only.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Manifold(Protocol):
    """What an optimizer asks of a manifold. All arguments and results are plain tensors.

    A point is a vector along the last dimension; a tangent vector has the shape of its point.
    """

    def riemannian_gradient(self, point: Tensor, gradient: Tensor) -> Tensor:
        """Turn the gradient that autograd left on `point` into a tangent vector there."""
        ...

    def retract(self, point: Tensor, tangent: Tensor) -> Tensor:
        """Move from `point` along `tangent`, which already has its sign and length."""
        ...

    def transport(self, point: Tensor, tangent: Tensor, new_point: Tensor) -> Tensor:
        """Carry a tangent vector from `point` to `new_point`."""
        ...

    def squared_norm(self, point: Tensor, tangent: Tensor) -> Tensor:
        """Return the squared Riemannian norm, one number per point: `point.shape[:-1]`."""
        ...

    def decay(self, point: Tensor, amount: float | Tensor) -> Tensor:
        """Pull `point` toward the manifold's origin; `amount` is learning rate × weight decay."""
        ...


class RiemannianAdamWState(NamedTuple):
    """The result of one `riemannian_adamw_update`: the new point and its new moments."""

    point: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def manifold_of(parameter: Tensor) -> Manifold | None:
    """Return the manifold that `parameter` lives on, or None for a Euclidean parameter."""
    return getattr(parameter, "manifold", None)


def riemannian_adamw_update(
    manifold: Manifold,
    point: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int | float | Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> RiemannianAdamWState:
    """Compute one step of AdamW on a manifold. Pure: no argument is changed.

    AdamW's order is kept: moments of the gradient at the old point, decay, then the step. The
    second moment is one number per point (the squared Riemannian norm), so that the step does not
    depend on the frame; its length is at most about `lr`. Momentum is transported after every
    move, the decay included.

    Args:
        point, gradient: (…, d), and what autograd left in `.grad`.
        exp_avg, exp_avg_sq: moments, a tangent vector (…, d) at `point` and (…); zeros at first.
        step: how many steps this one makes: 1, 2, …
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.

    Source: Riemannian AdamW (Bdeir et al. 2025) in the polar frame, the Polar-ViT paper, App. B.
    """
    beta1, beta2 = betas
    tangent = manifold.riemannian_gradient(point, gradient)
    exp_avg = torch.lerp(exp_avg, tangent, 1.0 - beta1)
    exp_avg_sq = torch.lerp(exp_avg_sq, manifold.squared_norm(point, tangent), 1.0 - beta2)
    if weight_decay != 0:
        decayed = manifold.decay(point, lr * weight_decay)
        exp_avg = manifold.transport(point, exp_avg, decayed)
        point = decayed
    mean = exp_avg / (1.0 - beta1**step)
    scale = (exp_avg_sq / (1.0 - beta2**step)).sqrt() + eps
    new_point = manifold.retract(point, mean * (-lr / scale).unsqueeze(-1))
    return RiemannianAdamWState(
        new_point, manifold.transport(point, exp_avg, new_point), exp_avg_sq
    )
