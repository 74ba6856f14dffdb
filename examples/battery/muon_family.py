"""Muon's relatives: hidden matrices by each one's rule, everything else by AdamW at a rate of its own.

`rest` multiplies AdamW's first guess of a rate. The battery tunes it after the rate itself, so these
peers get two runs more than the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from examples.peers import Float32Muon, hidden_matrices

from .bundle import Bundle

__all__ = ["MUON_FAMILY", "with_adamw"]

# Beside a documented 2e-2 the packages' examples give AdamW 3e-4, far below what these tasks want; an
# eighth was the best ratio on the character GPT before the battery was first run.
REST = 1 / 8


def muon_rms(model: nn.Module, rate: float, decay: float, rest: float = 1.0) -> Bundle:
    """Scaled by 0.2 √max(rows, columns), the recommended one: AdamW's rates and decay for all."""
    hidden, others = split(model)
    groups = []
    for p in hidden:
        rows, columns = len(p), p.numel() / len(p)
        # The rule itself scales by √max(1, rows/columns).
        scale = 0.2 * max(rows, columns) ** 0.5 / max(1.0, rows / columns) ** 0.5
        groups.append({"params": [p], "lr": rate * scale, "weight_decay": decay / scale})
    return with_adamw(Float32Muon(groups, rate), others, rate * rest, decay)


def normuon(model: nn.Module, rate: float, decay: float, rest: float = 1.0) -> Bundle:
    """pytorch_optimizer's, as its official code scales (the norm of the polar factor is kept)."""
    from pytorch_optimizer import NorMuon

    return _in_float32(NorMuon, model, rate, decay, rest)


def adamuon(model: nn.Module, rate: float, decay: float, rest: float = 1.0) -> Bundle:
    """pytorch_optimizer's, at its default scaling (updates of RMS 0.2)."""
    from pytorch_optimizer import AdaMuon

    return _in_float32(AdaMuon, model, rate, decay, rest)


def _in_float32(
    kind: Callable[..., torch.optim.Optimizer],
    model: nn.Module,
    rate: float,
    decay: float,
    rest: float,
) -> Bundle:
    """Newton–Schulz iterations in float32: bfloat16, these packages' default, is slow on CPUs."""
    from pytorch_optimizer.optimizer.muon import adamuon, base, normuon
    from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5

    iterate = partial(zero_power_via_newton_schulz_5, dtype=torch.float32)
    for module in (adamuon, base, normuon):
        module.zero_power_via_newton_schulz_5 = iterate
    hidden, others = split(model)
    # As for Muon, decay is of the rest's size: the rates of matrices are that much larger.
    groups = [{"params": hidden, "use_muon": True, "lr": rate, "weight_decay": decay * REST}]
    return with_adamw(kind(groups), others, rate * REST * rest, decay)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(hidden matrices, all others), of what is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    chosen = {id(p) for p in hidden_matrices(model)}
    hidden = [p for p in trained if id(p) in chosen]
    return hidden, [p for p in trained if id(p) not in chosen]


def with_adamw(
    optimizer: torch.optim.Optimizer, others: list[nn.Parameter], rate: float, decay: float
) -> Bundle:
    """An optimizer, and AdamW for the parameters it does not take."""
    parts = [optimizer]
    if others:
        parts.append(torch.optim.AdamW(others, rate, betas=(0.9, 0.95), weight_decay=decay))
    return Bundle(parts)


# (name, documented default rate, how it takes a model, what the report says)
MUON_FAMILY = [
    ("muon_rms", 1e-3, muon_rms, "Muon scaled to AdamW's RMS, AdamW on the rest at its own rate"),
    ("normuon", 2e-2, normuon, "pytorch_optimizer's NorMuon, AdamW on the rest at its own rate"),
    ("adamuon", 2e-2, adamuon, "pytorch_optimizer's AdaMuon, AdamW on the rest at its own rate"),
]
