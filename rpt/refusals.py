"""What no step can do, and how a step that broke off is told: messages with their remedies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from torch import Tensor

from .manifold import manifold_of
from .ownership import Agreement, Live, Ownership, unreadable

Name = Callable[[Tensor], str]


def refuse_sparse(parameter: Tensor, name: Name) -> None:
    """Raises for a gradient that is no ordinary tensor."""
    raise RuntimeError(
        f"{name(parameter)} has a sparse gradient, which RPT cannot use: build its layer with "
        "sparse=False, or give it to torch.optim.SparseAdam"
    )


def refuse_parameter(parameter: Tensor, name: Name) -> None:
    """Raises for a parameter that no step of ours can update."""
    if parameter.is_complex():
        raise RuntimeError(
            f"{name(parameter)} is complex, which RPT cannot update: store torch.view_as_real of it "
            "as the parameter"
        )
    # What wraps other tensors: DTensor is known, anything else may mean anything by an entry.
    if hasattr(parameter, "__tensor_flatten__") and not (
        hasattr(parameter, "full_tensor") or unreadable(parameter)
    ):
        raise RuntimeError(
            f"{name(parameter)} is a {type(parameter.data).__name__}, a tensor subclass that wraps "
            "other tensors: RPT needs the whole matrix as one plain tensor; give it to "
            "torch.optim.AdamW"
        )


def refuse_in_a_graph(
    live: Sequence[Live], groups: Sequence[dict[str, Any]], ranks: Ownership, attached: bool
) -> None:
    """Raises for what `capturable=True` cannot do; `attached` to a model while a graph is recorded, too."""
    if type(ranks) is not Ownership:
        raise RuntimeError(
            "capturable=True works in a single process: ranks that share the work agree on the host. "
            'Leave capturable out, or pass ownership="local" if every rank trains on its own'
        )
    for g, parameter, _ in live:
        if manifold_of(parameter) is not None:
            raise RuntimeError(
                "capturable=True cannot update parameters on a manifold: give them to an optimizer "
                "of their own"
            )
        rate, device = groups[g]["lr"], parameter.device
        if isinstance(rate, Tensor) and rate.device != device:
            raise RuntimeError(
                f"capturable=True needs lr on the parameters' device: it is on {rate.device}, they are "
                f"on {device}; pass lr=torch.tensor(lr, device={str(device)!r})"
            )
    if attached:
        raise RuntimeError(
            "an attached model measures ranks by decomposition, which a CUDA graph cannot record: call "
            "remove_observers() before recording; polar weights keep their values"
        )


def warn_of_a_flat_parameter(optimizer: Any) -> None:
    """Say so, once, where one long vector is all there is."""
    every = [p for p in optimizer._all() if p.numel()]
    if len(every) == 1 and every[0].ndim == 1 and every[0].numel() >= 1024:
        optimizer._warn_once(
            "flat",
            f"the only parameter is flat, {optimizer._name(every[0])}: RPT works on matrices, and steps "
            "it as one vector. If a wrapper flattened a model, keep its parameters "
            "(use_orig_params=True in FSDP1, or fully_shard)",
        )


def without_nonfinite(optimizer: Any, agreed: Agreement) -> Agreement:
    """Leave out parameters whose gradient is not finite, or raise, as their group says."""
    finite = [math.isfinite(peak) for peak in agreed.peaks]
    bad = [p for (_, p, _), good in zip(agreed.live, finite, strict=True) if not good]
    if not bad:  # only the sum of the peaks is infinite
        return agreed
    groups = {g for (g, *_), good in zip(agreed.live, finite, strict=True) if not good}
    if any(optimizer.param_groups[g]["nonfinite"] == "raise" for g in groups):
        raise RuntimeError(
            f"non-finite gradient in {_listed(optimizer, bad)}; nothing was updated. Lower the "
            'learning rate, clip gradients, use a GradScaler with float16, or pass nonfinite="skip"'
        )
    for parameter in bad:
        record = optimizer.state[parameter]
        record["skipped"] = record.get("skipped", 0)
        record["skipped"] += 1  # in place where it is part of a stack
    warn_of_nonfinite(optimizer, bad)
    return agreed._replace(
        live=list(compress(agreed.live, finite)), peaks=list(compress(agreed.peaks, finite))
    )


def warn_of_nonfinite(optimizer: Any, bad: Sequence[Tensor]) -> None:
    """Say, once, which parameters were left out."""
    optimizer._warn_once(
        "nonfinite",
        f"skipped non-finite gradients in {_listed(optimizer, bad)}; telemetry() counts them from here on",
    )


def _listed(optimizer: Any, bad: Sequence[Tensor]) -> str:
    return ", ".join(map(optimizer._name, bad[:3])) + (", …" if len(bad) > 3 else "")


def warn_of_failed_roots(optimizer: Any, tried: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Say so, once, of (parameter, whether its root failed)."""
    # Decompositions wait for the device anyway: whether one failed is known on the host by now.
    failed = None if "roots" in optimizer._warned else next((p for p, bad in tried if bad), None)
    if failed is not None:
        optimizer._warn_once(
            "roots",
            f"no root could be computed for {optimizer._name(failed)}, also in float64: it keeps "
            "its previous root; telemetry() counts such failures from here on",
        )


def interrupted(
    error: Exception, broken: Sequence[Tensor], done: Sequence[Tensor], name: Name
) -> RuntimeError:
    """What a step that failed midway says."""
    failed, updated = (", ".join(map(name, each)) or "none" for each in (broken, done))
    return RuntimeError(
        f"step() failed in the stack of {failed}: {type(error).__name__}: {error}. Already updated: "
        f"{updated}. Of the failed stack no weight was changed, but its moments may already hold this "
        "gradient; every other parameter and its state are as before"
    )
