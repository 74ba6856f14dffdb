"""Telemetry as flat numbers, from whatever a trainer has wrapped the optimizer in."""

from __future__ import annotations

from typing import Any

import torch

from rpt.optimizer import ResidualPolarTransport
from rpt.telemetry import Telemetry

# What is drawn over all matrices, each a value per matrix of the table.
_HISTOGRAMS = ("polar_weight", "residual_entropy_rank", "root_age")


def transport_of(optimizer: Any) -> ResidualPolarTransport:
    """The `ResidualPolarTransport` inside a trainer's wrappers.

    A wrapper keeps it as `.optimizer`, as accelerate's, Lightning's and the Trainer's do.

    Raises:
        TypeError: there is none inside.

    Example:
        >>> import torch, rpt, rpt.integrations
        >>> optimizer = rpt.RPT([torch.nn.Parameter(torch.ones(4, 3))])
        >>> rpt.integrations.transport_of(optimizer) is optimizer
        True
    """
    inner = optimizer
    while not isinstance(inner, ResidualPolarTransport):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise TypeError(
                f"{type(optimizer).__name__} is no ResidualPolarTransport and wraps none: pass the "
                "optimizer that trains the model"
            )
    return inner


def refuse_unused(options: dict[str, Any], attach: bool) -> None:
    """Refuse a callback's options for attaching where it is not to attach."""
    if options and not attach:
        raise TypeError(f"{', '.join(options)}: options of attach_model, which need attach=True")


def telemetry_scalars(
    optimizer: Any, prefix: str = "rpt/", *, parameters: bool = False
) -> dict[str, float]:
    """Telemetry as {prefix + name: number}, which every logger takes.

    `wandb.log(telemetry_scalars(optimizer), step=step)`; the same for MLflow, a CSV file, or a print.
    Reading it waits for the device: call it as often as you log. Any rank may call it alone.

    Args:
        optimizer: the optimizer, or a trainer's wrapper of it.
        prefix: put in front of every name.
        parameters: also each parameter's own numbers, `prefix + "layer.weight/polar_weight"`; else only those
            of all together, `prefix + "polar_weight"`.

    Raises:
        TypeError: no `ResidualPolarTransport` inside.

    Example:
        >>> import torch, rpt, rpt.integrations
        >>> weight = torch.nn.Parameter(torch.ones(4, 3))
        >>> weight.grad, optimizer = torch.randn(4, 3), rpt.RPT([weight])
        >>> optimizer.step()
        >>> numbers = rpt.integrations.telemetry_scalars(optimizer)
        >>> numbers["rpt/parameters"], "rpt/polar_weight" in numbers
        (1.0, True)
    """
    return _flat(transport_of(optimizer).telemetry(), prefix, parameters)


def write_tensorboard(
    writer: Any, optimizer: Any, step: int, prefix: str = "rpt/", *, parameters: bool = False
) -> None:
    """One point of every scalar, and histograms over the matrices of weight, rank and age of roots.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or what has its `add_scalar` and `add_histogram`.
        optimizer: the optimizer, or a trainer's wrapper of it.
        step: the abscissa.
        prefix, parameters: as in `telemetry_scalars`.

    Raises:
        TypeError: no `ResidualPolarTransport` inside.

    Example:
        >>> import torch, rpt, rpt.integrations
        >>> class Printer:  # a SummaryWriter's place
        ...     def add_scalar(self, name, value, step):
        ...         if name == "rpt/parameters": print(name, value, step)
        >>> optimizer = rpt.RPT([torch.nn.Parameter(torch.ones(4, 3))])
        >>> rpt.integrations.write_tensorboard(Printer(), optimizer, step=100)
        rpt/parameters 0.0 100
    """
    telemetry = transport_of(optimizer).telemetry()
    for name, value in _flat(telemetry, prefix, parameters).items():
        writer.add_scalar(name, value, step)
    entries = telemetry["parameters"].values()
    for name in _HISTOGRAMS:
        values = [float(entry[name]) for entry in entries if name in entry]
        if values:
            writer.add_histogram(f"{prefix}matrices/{name}", torch.tensor(values), step)


def _flat(telemetry: Telemetry, prefix: str, parameters: bool) -> dict[str, float]:
    flat = telemetry.scalars()
    names = [name for name in flat if parameters or name.startswith("total/")]
    return {prefix + name.removeprefix("total/"): flat[name] for name in names}
