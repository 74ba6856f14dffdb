"""The optimizers of the step benchmark, each built the way its authors say."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import rpt
from examples.peers import Float32Muon, hidden_matrices

__all__ = ["ARMS", "Factory", "state_bytes"]

LR, BETAS = 1e-3, (0.9, 0.95)

Factory = Callable[[nn.Module], list[torch.optim.Optimizer]]


def others(model: nn.Module, matrices: list[nn.Parameter]) -> list[nn.Parameter]:
    """What is left of a model's parameters."""
    chosen = {id(p) for p in matrices}
    return [p for p in model.parameters() if id(p) not in chosen]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, foreach=True)]


def muon(kind: type[torch.optim.Optimizer]) -> Factory:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = hidden_matrices(model)
        rest = others(model, matrices)
        found: list[torch.optim.Optimizer] = [kind(matrices, lr=LR)]  # type: ignore[call-arg]
        if rest:
            found.append(torch.optim.AdamW(rest, lr=LR, betas=BETAS, foreach=True))
        return found

    return build


def torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch.optim.Muon takes matrices only: AdamW gets convolutions too."""
    matrices = [p for p in hidden_matrices(model) if p.ndim == 2]
    rest = others(model, matrices)
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
