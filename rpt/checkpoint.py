"""What loading a state adds to torch's own: checks before anything changes, and every tensor's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rpt.observers.caller import warn

from .groups import fill
from .roots import AutoRoots
from .store.layout import compute_dtype
from .store.schema import counted, holds_state

# Up to here "auto" kept sides in one piece before its `full_side` was lowered.
_OLDER_FULL_SIDE = 256
_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def load(
    optimizer: Any, saved: dict[str, Any], torch_load: Callable[[dict[str, Any]], None]
) -> None:
    """Load a state into a `ResidualPolarTransport`, by torch's own `load_state_dict`."""
    saved = matched_by_name(optimizer, saved)
    check_loadable(optimizer, saved)
    for group in saved["param_groups"]:
        optimizer._groups.backend(group.get("roots", "auto"))
    seen: dict[str, Any] = {}
    # Registered last, so that it sees what the user's own hooks made of the state.
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, final: seen.update(final))
    try:
        torch_load(saved)
    finally:
        handle.remove()
    restore_dtypes(optimizer, seen)
    warn_of_older_blocks(optimizer)
    for group in optimizer.param_groups:
        fill(group, optimizer.defaults)
    if optimizer.state:
        optimizer._ranks().adopt_state(optimizer.state)
    for parameter, record in optimizer.state.items():
        if holds_state(record):
            record |= counted(record, compute_dtype(parameter))


def canonical_name(name: str) -> str:
    """A parameter's name without what torch.compile, DDP and other wrappers put into it."""
    *path, last = name.split(".")
    return ".".join([part for part in path if part not in _WRAPPERS] + [last])


def matched_by_name(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The state with its parameters in this optimizer's order, where both sides name all of theirs.

    Names that differ leave the order as it is, with a warning. This optimizer's names stay.
    """
    groups = saved.get("param_groups", ()) if isinstance(saved, Mapping) else ()
    mine, theirs = _named(optimizer.param_groups), _named(groups)
    sizes = [[len(g["params"]) for g in side] for side in (optimizer.param_groups, groups)]
    if not mine or not theirs or sizes[0] != sizes[1]:
        return saved
    if mine.keys() == theirs.keys():
        ids = iter([theirs[key] for key in mine])
    else:
        key = next(key for key in theirs if key not in mine)
        warn(
            f"the saved state names parameters that this optimizer does not have, such as {key[-1]!r}: "
            "matched by order, not by name"
        )
        ids = iter(theirs.values())
    renamed = [
        {**group, "params": [next(ids) for _ in own["params"]], "param_names": own["param_names"]}
        for own, group in zip(optimizer.param_groups, groups, strict=True)
    ]
    return {**saved, "param_groups": renamed}


def _named(groups: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], Any]:
    """Parameters by name, or by group and name where groups share one; {} where that is not unique."""
    named = [
        (g, canonical_name(name), parameter)
        for g, group in enumerate(groups)
        for name, parameter in zip(
            group.get("param_names") or [""] * len(group["params"]), group["params"], strict=False
        )
    ]
    if not all(name for _, name, _ in named):
        return {}
    unique = len({name for _, name, _ in named}) == len(named)
    found = {(name,) if unique else (g, name): parameter for g, name, parameter in named}
    return found if len(found) == len(named) else {}


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


def warn_of_older_blocks(optimizer: Optimizer) -> None:
    """Say where "auto" made one root of a side, when it was saved, that it cuts into blocks by now."""
    whole = AutoRoots.full_side
    for group in optimizer.param_groups:
        if group.get("roots", "auto") != "auto":
            continue
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if not key.endswith("_root") or value.ndim < 3:
                    continue
                if whole < value.shape[-1] <= _OLDER_FULL_SIDE:
                    warn(
                        f"the saved state has a root of a side of {value.shape[-1]} in one piece, which "
                        'roots="auto" now cuts into blocks: the metric starts anew. To continue as '
                        f'before, set roots="auto(full_side={_OLDER_FULL_SIDE})" in every group after loading'
                    )
                    return


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
