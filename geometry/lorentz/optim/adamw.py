"""RiemannianAdamW: torch's AdamW, and its Riemannian rule on parameters that carry a manifold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .riemannian import manifold_of, riemannian_adamw_update


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: what decays, and what does not.

    A module names its scale parameters and rates in `undecayed_parameters`; they get weight decay
    0. The radius parameters of `PolarLinear` are deviations from their initial values, so decaying
    them pulls toward those values, and they stay in the first group.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> groups = lorentz.parameter_groups(lorentz.PolarMultiheadAttention(8, 2), weight_decay=0.1)
        >>> [group["weight_decay"] for group in groups]
        [0.1, 0.0]
    """
    undecayed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name in getattr(module, "undecayed_parameters", ()):
            parameter = getattr(module, name, None)
            if isinstance(parameter, nn.Parameter):
                undecayed[id(parameter)] = parameter
    decayed = [p for p in model.parameters() if id(p) not in undecayed]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": list(undecayed.values()), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class RiemannianAdamW(torch.optim.Optimizer):
    """AdamW on a model of Euclidean and manifold parameters.

    A parameter that carries a `manifold` (see `riemannian.Manifold`) takes `riemannian_adamw_update`:
    moments in the tangent space, manifold decay, exponential map, transported momentum. Every
    other parameter takes exactly `torch.optim.AdamW`, to the bit.

    Args:
        params: parameters or groups; see `parameter_groups`.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        maximize: ascend instead.
        **options: further options of `torch.optim.AdamW` for the Euclidean parameters (`foreach`,
            `fused`, `capturable`). `amsgrad` is refused where there are manifold parameters.

    Raises:
        RuntimeError: a manifold parameter has a sparse gradient.
        ValueError: `amsgrad` with manifold parameters, or what `torch.optim.AdamW` refuses.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> table = lorentz.LorentzEmbedding(10, 3)
        >>> optimizer = lorentz.RiemannianAdamW(table.parameters(), lr=0.1)
        >>> table(torch.arange(10)).a.sum().backward(); optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        params = list(params)
        self._euclidean = torch.optim.AdamW(
            [nn.Parameter(torch.zeros(1))],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            **options,
        )
        super().__init__(params, self._euclidean.defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What a copy or an unpickled optimizer starts from: torch saves groups and state only."""
        super().__setstate__(state)
        self._euclidean = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group.get("amsgrad") and any(manifold_of(p) is not None for p in group["params"]):
            raise ValueError("amsgrad is not defined for manifold parameters; put them elsewhere")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        curved = [
            (group, p)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and manifold_of(p) is not None
        ]
        for _, p in curved:
            if p.grad.is_sparse:
                raise RuntimeError(
                    f"RiemannianAdamW got a sparse gradient for a manifold parameter of shape "
                    f"{tuple(p.shape)}; use sparse=False in the embedding"
                )
        for group, p in curved:
            self._step_on_manifold(group, p, p.grad)
        # The rest is torch's own rule, with the same options and states.
        self._euclidean.param_groups = [
            {**group, "params": [p for p in group["params"] if manifold_of(p) is None]}
            for group in self.param_groups
        ]
        self._euclidean.state = self.state
        self._euclidean.step()
        return loss

    def _step_on_manifold(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> None:
        manifold = manifold_of(p)
        assert manifold is not None
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p.detach())
            state["exp_avg_sq"] = torch.zeros_like(p.detach()[..., 0])
        state["step"] += 1
        point, exp_avg, exp_avg_sq = riemannian_adamw_update(
            manifold,
            p.detach(),
            -gradient if group["maximize"] else gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["step"],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        p.copy_(point)
        state["exp_avg"].copy_(exp_avg)
        state["exp_avg_sq"].copy_(exp_avg_sq)
