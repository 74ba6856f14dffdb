"""Other packages' matrix optimizers, each as its own documentation says.

`pip install -e '.[bench]'` brings them; below Python 3.12, emerging-optimizers by
`pip install --no-deps --ignore-requires-python emerging-optimizers==0.3.0`.
Where one is missing or fails, its runs are records with an error, and the report lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .bundle import Bundle
from .muon_family import with_adamw

__all__ = ["PACKAGES"]


def soap_decay(model: nn.Module, rate: float, decay: float) -> Bundle:
    """A weight decay of 0.1 in place of the task's; β 0.95 throughout is the default."""
    from pytorch_optimizer import SOAP

    return Bundle([SOAP(model.parameters(), lr=rate, betas=(0.95, 0.95), weight_decay=0.1)])


def kron(model: nn.Module, rate: float, decay: float) -> Bundle:
    from pytorch_optimizer import Kron

    return Bundle([Kron(model.parameters(), lr=rate, weight_decay=decay)])


def conda(model: nn.Module, rate: float, decay: float) -> Bundle:
    """A new basis every 20 steps: the default, 2000, is never in these runs."""
    from pytorch_optimizer import Conda

    return Bundle([Conda(model.parameters(), lr=rate, weight_decay=decay, update_proj_gap=20)])


def mars(model: nn.Module, rate: float, decay: float) -> Bundle:
    """Vectors at the same rate, as by default."""
    from pytorch_optimizer import MARS

    return Bundle(
        [MARS(model.parameters(), lr=rate, lr_1d=rate, weight_decay=decay, weight_decay_1d=decay)]
    )


def emerging_soap(model: nn.Module, rate: float, decay: float) -> Bundle:
    return _emerging(model, rate, decay, use_kl_shampoo=False)


def emerging_kl(model: nn.Module, rate: float, decay: float) -> Bundle:
    return _emerging(model, rate, decay, use_kl_shampoo=True)


def _emerging(model: nn.Module, rate: float, decay: float, **options: Any) -> Bundle:
    """Takes matrices only; the rest by AdamW at the same rate and betas."""
    import typing

    import typing_extensions

    # All that release 0.3 needs Python 3.12 for: with it the package runs on 3.10 too.
    typing.override = typing_extensions.override  # type: ignore[attr-defined,assignment]
    from emerging_optimizers.soap import SOAP

    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2]
    others = [p for p in trained if p.ndim != 2]
    optimizer = SOAP(matrices, rate, weight_decay=decay, **options)
    return with_adamw(optimizer, others, rate, decay)


def heavyball_soap(model: nn.Module, rate: float, decay: float) -> Bundle:
    return _heavyball("SOAP", model, rate, decay)


def heavyball_kl_shampoo(model: nn.Module, rate: float, decay: float) -> Bundle:
    return _heavyball("KLShampoo", model, rate, decay)


def heavyball_psgd(model: nn.Module, rate: float, decay: float) -> Bundle:
    return _heavyball("PSGDPRO", model, rate, decay)


def _heavyball(name: str, model: nn.Module, rate: float, decay: float) -> Bundle:
    """Not compiled: compiling every shape takes longer than these runs."""
    import heavyball

    heavyball.utils.compile_mode = None
    trained = [p for p in model.parameters() if p.requires_grad]
    return Bundle([getattr(heavyball, name)(trained, lr=rate, weight_decay=decay)])


# (name, documented default rate, how it takes a model, what the report says)
PACKAGES: list[tuple[str, float, Callable[..., Bundle], str]] = [
    ("soap_decay", 3e-3, soap_decay, "pytorch_optimizer's SOAP, weight decay 0.1"),
    ("kron", 1e-3, kron, "pytorch_optimizer's Kron (PSGD)"),
    ("conda", 1e-3, conda, "pytorch_optimizer's Conda"),
    ("mars", 3e-3, mars, "pytorch_optimizer's MARS"),
    ("emerging_soap", 1e-3, emerging_soap, "emerging-optimizers' SOAP, AdamW on vectors"),
    ("emerging_kl", 1e-3, emerging_kl, "emerging-optimizers' KL-Shampoo in SOAP, AdamW on vectors"),
    ("heavyball_soap", 3e-3, heavyball_soap, "heavyball's SOAP"),
    ("heavyball_kl", 3e-3, heavyball_kl_shampoo, "heavyball's KL-Shampoo"),
    ("heavyball_psgd", 1e-3, heavyball_psgd, "heavyball's PSGD-PRO"),
]
