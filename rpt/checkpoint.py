"""What loading a state adds to torch's own: checks before anything changes, and every tensor's dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["check_loadable", "restore_dtypes"]


def _pairs(optimizer: Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """(saved parameter id, parameter), matched by order as torch matches them."""
    saved_ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    mine = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return zip(saved_ids, mine, strict=False)


def check_loadable(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse a state that is not this optimizer's, before anything changes.

    Raises:
        ValueError: the state of another optimizer, or of parameters of other shapes.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise ValueError("this is no optimizer state: it lacks 'state' or 'param_groups'")
    for key, parameter in _pairs(optimizer, saved):
        record = saved["state"].get(key, {})
        momentum = record.get("momentum")
        if "exp_avg" in record and momentum is None and not hasattr(parameter, "manifold"):
            raise ValueError(
                "this is the state of an Adam-like optimizer: RPT cannot continue from its moments. "
                "Start RPT afresh on the loaded model weights instead"
            )
        if isinstance(momentum, Tensor) and momentum.shape != parameter.shape:
            raise ValueError(
                f"the saved state of parameter {key} has shape {tuple(momentum.shape)}, the parameter "
                f"{tuple(parameter.shape)}: parameters must come in the order they were saved in"
            )


def restore_dtypes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo torch's cast of floating state to the parameter's dtype, on the parameter's device."""
    for key, parameter in _pairs(optimizer, saved):
        record = optimizer.state.get(parameter)
        if record is None:
            continue
        for name, value in saved["state"].get(key, {}).items():
            if isinstance(value, Tensor):
                record[name] = value.detach().to(parameter.device)
    for group in optimizer.param_groups:
        gain = group.get("gain", 1.0)
        # A plain number goes to the host, whatever the default device.
        device = gain.device if isinstance(gain, Tensor) else "cpu"
        group["gain"] = torch.as_tensor(gain, dtype=torch.float64, device=device)
