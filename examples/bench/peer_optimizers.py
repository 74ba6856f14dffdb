"""The optimizers of the step benchmark, each built the way its authors say."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import rpt

__all__ = ["ARMS", "Factory", "Float32Muon", "state_bytes"]

LR, BETAS = 1e-3, (0.9, 0.95)

Factory = Callable[[nn.Module], list[torch.optim.Optimizer]]


class Float32Muon(torch.optim.Optimizer):
    """Momentum, then five quintic Newton–Schulz steps, in float32."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"]).flatten(1)
                tall = x.shape[0] > x.shape[1]
                x = x.mT if tall else x
                x = x / x.norm().clamp_min(1e-7)
                for _ in range(5):
                    a = x @ x.mT
                    x = torch.addmm(
                        x, torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445
                    )
                scale = max(1.0, p.shape[0] / p[0].numel()) ** 0.5
                update = (x.mT if tall else x).view_as(p)
                p.add_(update, alpha=-group["lr"] * scale)


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden matrices, and the embeddings, heads and vectors that Muon's authors leave to AdamW."""
    matrices = [
        p
        for name, p in model.named_parameters()
        if p.ndim >= 2 and not any(part in name for part in ("embed", "head", "position"))
    ]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, foreach=True)]


def muon(kind: type[torch.optim.Optimizer]) -> Factory:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = split(model)
        found: list[torch.optim.Optimizer] = [kind(matrices, lr=LR)]  # type: ignore[call-arg]
        if rest:
            found.append(torch.optim.AdamW(rest, lr=LR, betas=BETAS, foreach=True))
        return found

    return build


def torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch.optim.Muon takes matrices only: AdamW gets convolutions too."""
    matrices = [p for p in split(model)[0] if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    found: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=LR)]
    return found + ([torch.optim.AdamW(rest, lr=LR, betas=BETAS, foreach=True)] if rest else [])


def soap(model: nn.Module) -> list[torch.optim.Optimizer]:
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=LR, betas=BETAS)]


def scalable_shampoo(model: nn.Module) -> list[torch.optim.Optimizer]:
    from pytorch_optimizer import ScalableShampoo

    return [ScalableShampoo(model.parameters(), lr=LR)]


def shampoo(model: nn.Module) -> list[torch.optim.Optimizer]:
    from torch_optimizer import Shampoo

    return [Shampoo(model.parameters(), lr=LR)]


def heavyball_soap(model: nn.Module) -> list[torch.optim.Optimizer]:
    from heavyball import SOAP

    return [SOAP(model.parameters(), lr=LR)]


def transport(observe: bool = False, **options: object) -> Factory:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        optimizer = rpt.ResidualPolarTransport(model.parameters(), lr=LR, **options)
        if observe:
            optimizer.attach_model(model)
        return [optimizer]

    return build


ARMS: dict[str, Factory] = {
    "AdamW": adamw,
    "torch Muon": torch_muon,
    "float32 Muon": muon(Float32Muon),
    "SOAP": soap,
    "ScalableShampoo": scalable_shampoo,
    "Shampoo": shampoo,
    "heavyball SOAP": heavyball_soap,
    "RPT": transport(),
    "RPT, full": transport(roots="full"),
    "RPT, blocked": transport(roots="blocked"),
    "RPT, low rank": transport(roots="low_rank"),
    "RPT, paper preset": transport(preset="paper"),
}


def state_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    """Bytes of all tensors in the optimizers' states, lists of them included."""

    def size(value: object) -> int:
        if isinstance(value, Tensor):
            return value.numel() * value.element_size()
        if isinstance(value, dict):
            return sum(size(v) for v in value.values())
        if isinstance(value, (list, tuple)):
            return sum(size(v) for v in value)
        return 0

    return sum(size(state) for o in optimizers for state in o.state.values())
