"""Peers that a comparison needs and no package has in the form that a CPU needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Float32Muon", "hidden_matrices"]


class Float32Muon(torch.optim.Optimizer):
    """`torch.optim.Muon`'s rule without its cast to bfloat16, which is slow and coarse on CPUs.

    Nesterov momentum, five quintic Newton–Schulz steps, rate scaled by √max(1, rows/cols), decoupled
    decay. Tensors of more than two dimensions are taken as (first, all others) matrices.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                request = p.grad.lerp(buffer, group["momentum"]).flatten(1)
                rows, cols = request.shape
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = max(1.0, rows / cols) ** 0.5
                p.add_(orthogonalised(request).view_as(p), alpha=-group["lr"] * scale)
        return loss


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon's authors give to Muon: all but vectors, embeddings and the output head.

    A model with nothing else has all of its matrices returned.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    excluded = tables | ({id(linear[-1].weight)} if linear else set())
    named = [(n, p) for n, p in model.named_parameters() if p.ndim >= 2]
    hidden = [p for n, p in named if id(p) not in excluded and "position" not in n]
    return hidden or [p for _, p in named]


def orthogonalised(matrix: Tensor) -> Tensor:
    """Muon's approximate polar factor: (rows, cols) → (rows, cols), singular values near 1."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, polynomial, x, beta=3.4445)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x
