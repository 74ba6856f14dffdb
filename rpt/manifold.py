"""Parameters that live on a manifold, as the optimizer sees them: they carry the object that moves them.

The optimizer knows no geometry. A parameter with an attribute `manifold` is handed to that object, which
returns the new point and its moments; `rpt.geometry.lorentz` provides one for Lorentz points.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor


class CarriesAdamW(Protocol):
    """What a parameter's `manifold` must offer: AdamW in its own geometry."""

    def adamw_update(
        self,
        point: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: int,
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The new point and moments; pure. Points lie along the last dimension.

        Args:
            point, gradient: (…, d), the gradient as autograd left it.
            exp_avg: (…, d), first moment, a tangent vector at the point.
            exp_avg_sq: (…), second moment, one number per point.
            step: 1, 2, …
            lr, betas, eps, weight_decay: as AdamW's; eps above zero, the decay decoupled.
        """
        ...


def manifold_of(parameter: Tensor) -> CarriesAdamW | None:
    """The object that a parameter carries, or None for a Euclidean parameter."""
    return getattr(parameter, "manifold", None)


def step_on_manifold(
    parameter: Tensor, gradient: Tensor, record: MutableMapping[str, Any], group: Mapping[str, Any]
) -> None:
    """Update one manifold parameter and its state in place, with the options of its group.

    Of a sharded parameter (DTensor) every rank steps the points that it holds: a point's step depends on
    no other point.

    Args:
        parameter: the points.
        gradient: what autograd left, finite; of a sharded parameter the local part.
        record: its state; an empty one is filled.
        group: `lr`, `betas`, `eps`, `weight_decay` and perhaps `maximize`.
    """
    manifold = manifold_of(parameter)
    assert manifold is not None
    if "exp_avg" not in record:
        record["step"] = record.get("step", 0)
        record["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        record["exp_avg_sq"] = torch.zeros_like(parameter.select(-1, 0))
    held = (parameter, record["exp_avg"], record["exp_avg_sq"])
    points, means, squares = (t.to_local() if hasattr(t, "to_local") else t for t in held)
    updated = manifold.adamw_update(
        points,
        -gradient if group.get("maximize") else gradient,
        means,
        squares,
        record["step"] + 1,
        lr=group["lr"],
        betas=group["betas"],
        # A second moment of zero must not divide: where the rule has no floor, AdamW's default serves.
        eps=group["eps"] or 1e-8,
        weight_decay=group["weight_decay"],
    )
    for old, new in zip((points, means, squares), updated, strict=True):
        old.copy_(new)
    record["step"] += 1
