"""Every optimizer of the battery: its documented default rate, and how it takes a model.

All get the task's decoupled weight decay where they have one; everything else is the default that
the optimizer's own package documents, unless the name says otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from examples.peers import Float32Muon, hidden_matrices
from rpt.options import preset_options

from .bundle import Averaged, Bundle
from .muon_family import MUON_FAMILY
from .packages import PACKAGES
from .residual import RPT_VARIANTS

__all__ = ["PEERS", "Peer"]

Factory = Callable[..., Bundle]


@dataclass(frozen=True)
class Peer:
    """An optimizer under test.

    Attributes:
        name: as in the results.
        rate: the documented default learning rate, in the middle of its grid.
        make: (model, rate, weight decay) → bundle; also a fourth argument where `rest`.
        says: one line for the report.
        family: "peer" or "rpt".
        options: what the version of a result depends on beside the rate.
        rest: whether the rate of what AdamW trains beside it is tuned too.
    """

    name: str
    rate: float
    make: Factory
    says: str
    family: str = "peer"
    options: str = ""
    rest: bool = False

    @cached_property
    def version(self) -> str:
        """Changes when the optimizer's configuration does."""
        code = self.options or inspect.getsource(self.make)
        return hashlib.sha256(code.encode()).hexdigest()[:8]


def adamw(model: nn.Module, rate: float, decay: float) -> Bundle:
    return Bundle([torch.optim.AdamW(model.parameters(), rate, weight_decay=decay)])


def adamw_095(model: nn.Module, rate: float, decay: float) -> Bundle:
    return Bundle(
        [torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=decay)]
    )


def adamw_average_098(model: nn.Module, rate: float, decay: float) -> Bundle:
    average = Averaged(model, 0.98)
    return Bundle(
        [torch.optim.AdamW(model.parameters(), rate, weight_decay=decay)],
        evaluation=average.swapped_in,
        after_step=average.update,
    )


def nadam(model: nn.Module, rate: float, decay: float) -> Bundle:
    return Bundle(
        [
            torch.optim.NAdam(
                model.parameters(), rate, weight_decay=decay, decoupled_weight_decay=True
            )
        ]
    )


def sgd(model: nn.Module, rate: float, decay: float) -> Bundle:
    return Bundle([torch.optim.SGD(model.parameters(), rate, momentum=0.9, nesterov=True)])


def muon(model: nn.Module, rate: float, decay: float) -> Bundle:
    """Hidden matrices at `rate`, the rest with AdamW at an eighth of it.

    One number moves both. 8 was the best ratio on the character GPT before this battery was run.
    """
    hidden = hidden_matrices(model)
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    parts: list[torch.optim.Optimizer] = [Float32Muon(hidden, rate, weight_decay=decay / 8)]
    if rest:
        parts.append(torch.optim.AdamW(rest, rate / 8, betas=(0.9, 0.95), weight_decay=decay))
    return Bundle(parts)


def soap(model: nn.Module, rate: float, decay: float) -> Bundle:
    from pytorch_optimizer import SOAP

    return Bundle([SOAP(model.parameters(), lr=rate, weight_decay=decay)])


def scalable_shampoo(model: nn.Module, rate: float, decay: float) -> Bundle:
    """Its preconditioners are computed every 20 steps: the default, 1000, is never in these runs."""
    from pytorch_optimizer import ScalableShampoo

    return Bundle(
        [
            ScalableShampoo(
                model.parameters(), lr=rate, weight_decay=decay, decoupled_weight_decay=True,
                preconditioning_compute_steps=20,
            )
        ]
    )  # fmt: skip


def torch_optimizer_shampoo(model: nn.Module, rate: float, decay: float) -> Bundle:
    from torch_optimizer import Shampoo

    return Bundle([Shampoo(model.parameters(), lr=rate, update_freq=10)])


def adabelief(model: nn.Module, rate: float, decay: float) -> Bundle:
    from torch_optimizer import AdaBelief

    return Bundle(
        [AdaBelief(model.parameters(), lr=rate, weight_decay=decay, weight_decouple=True)]
    )


def schedule_free(model: nn.Module, rate: float, decay: float) -> Bundle:
    """Measured at its averaged weights; the task's warm-up, but no decay of the rate."""
    from pytorch_optimizer import ScheduleFreeAdamW

    optimizer = ScheduleFreeAdamW(model.parameters(), lr=rate, weight_decay=decay)
    optimizer.train()

    @contextlib.contextmanager
    def averaged() -> Iterator[None]:
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()

    return Bundle([optimizer], scheduled=False, evaluation=averaged)


_OTHERS = [
    Peer("adamw", 1e-3, adamw, "torch.optim.AdamW"),
    Peer("muon", 2e-2, muon, "Muon in float32 on hidden matrices, AdamW on the rest"),
    Peer("soap", 3e-3, soap, "pytorch_optimizer's SOAP"),
    Peer("adamw_095", 1e-3, adamw_095, "AdamW with β2 = 0.95"),
    Peer("adamw_average_098", 1e-3, adamw_average_098, "AdamW, iterates averaged, decay 0.98"),
    Peer("nadam", 2e-3, nadam, "torch.optim.NAdam, decoupled decay"),
    Peer("sgd", 1e-1, sgd, "SGD, Nesterov momentum 0.9"),
    Peer("schedule_free", 2.5e-3, schedule_free, "pytorch_optimizer's Schedule-Free AdamW"),
    Peer("adabelief", 1e-3, adabelief, "torch-optimizer's AdaBelief"),
    Peer("shampoo", 1e-1, torch_optimizer_shampoo, "torch-optimizer's Shampoo (not the reference)"),
    Peer("scalable_shampoo", 1e-3, scalable_shampoo, "pytorch_optimizer's ScalableShampoo"),
]


def _all() -> dict[str, Peer]:
    found = {peer.name: peer for peer in _OTHERS}
    found |= {entry[0]: Peer(*entry, rest=True) for entry in MUON_FAMILY}
    found |= {entry[0]: Peer(*entry) for entry in PACKAGES}
    for name, variant in RPT_VARIANTS.items():
        preset = preset_options(variant.preset)
        preset.pop("capturable")  # chooses how a step is computed, not which
        found[name] = Peer(
            name, preset["lr"], variant.build, variant.says, "rpt", f"{preset}{variant}"
        )
    return found


PEERS = _all()
