"""Deriving observation sites from a model's own operations, for its author to read and decide.

The RPT guide's rule ("Derive sites from the graph, not from layer names"), applied to one traced
run: mark operations whose Jacobian depends on the example, follow each branch to its first
trainable matrix, keep parallel readers apart, discard matrices with a side of one, and name those
that hide in a fused or functional call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .selection import matrix_parameter, smaller_side, unobservable
from .trace import Read, record_reads

__all__ = ["DerivedSite", "DerivedSites", "derive_sites"]


@dataclass(frozen=True)
class DerivedSite:
    """What the rule says of one trainable matrix.

    Attributes:
        path: Dotted path of the layer, or of the parameter where no layer of its own holds it.
        boundary: The operation whose representation it reads first; "" where it reads none.
        verdict: "observe"; "expose" for a boundary that no hook can see; or "skip".
        reason: Why, and for "expose" what to do about it.
        shape: The weight's shape.

    Example:
        >>> from rpt.observers import DerivedSite
        >>> DerivedSite("down", "relu", "observe", "first reads it", (4, 8)).observed
        True
    """

    path: str
    boundary: str
    verdict: str
    reason: str
    shape: tuple[int, ...]

    @property
    def observed(self) -> bool:
        """Whether `attach_model(sites=…)` takes it."""
        return self.verdict == "observe"


class DerivedSites(list[DerivedSite]):
    """A list that prints as a table; hand it to `attach_model(sites=…)` as it is.

    Example:
        >>> from rpt.observers import DerivedSite, DerivedSites
        >>> DerivedSites([DerivedSite("down", "relu", "observe", "first reads it", (4, 8))]).paths
        ['down']
    """

    @property
    def paths(self) -> list[str]:
        """The layers to observe."""
        return [site.path for site in self if site.observed]

    def __str__(self) -> str:
        rows = [("layer", "weight", "verdict", "boundary", "reason")]
        rows += [
            (s.path, "×".join(map(str, s.shape)), s.verdict, s.boundary or "-", s.reason)
            for s in self
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]])
            for row in rows
        ]
        counts = [sum(s.verdict == v for s in self) for v in ("observe", "expose", "skip")]
        lines.insert(1, "-" * max(map(len, lines)))
        lines.append("{} to observe, {} to expose, {} skipped".format(*counts))
        return "\n".join(line.rstrip() for line in lines)


def derive_sites(model: nn.Module, *example_inputs: Any, **example_keywords: Any) -> DerivedSites:
    """Apply the four-step rule to one real run of `model(*example_inputs, **example_keywords)`.

    The run is eager and watched below all modules, so it does not matter how layers are named or
    composed. It never attaches anything. Where the guide leaves room:

    * Normalising each row by its own size (LayerNorm, RMSNorm, L2) is no boundary of its own: it
      changes no direction, and the guide's transformer does not observe its readers either.
      Statistics over a batch or over positions (BatchNorm in training mode, GroupNorm) are one.
    * A matrix is judged by its first reading, so one that rereads its own input's neighbourhood, or
      a recurrent step, is not taken for a new boundary.
    * Norms, energies and means over the features are summaries, and their readers no sites.
    * Frozen and constant matrices are passed through.

    Args:
        model: Any module, in the mode it is to be judged in (`train()` for live batch statistics).
            Buffers and the random state are put back afterwards.
        *example_inputs: One example batch: floating tensors carry representations; integer tensors
            are taken for tokens, positions and masks.
        **example_keywords: Likewise.

    Returns:
        One entry per trainable matrix, in the order of its first reading; unread ones last.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from rpt.observers import derive_sites
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> derive_sites(model, torch.randn(5, 4)).paths
        ['2']
    """
    first: dict[int, Read] = {}
    for read in record_reads(model, example_inputs, example_keywords):
        first.setdefault(id(read.parameter), read)
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    sites = [_judge(model, read, names[id(read.parameter)]) for read in first.values()]
    sites += list(_unread(model, first, names))
    return DerivedSites(sites)


def _judge(model: nn.Module, read: Read, name: str) -> DerivedSite:
    boundary = ", ".join(dict.fromkeys(read.boundary))
    layer = model.get_submodule(read.path)
    whole = read.called and matrix_parameter(layer) is read.parameter
    path = read.path if whole else name
    shape = tuple(read.parameter.shape)
    if not read.boundary:
        return DerivedSite(path, "", "skip", "reads no new nonlinear representation", shape)
    if read.summary:
        reason = "reads summary statistics of a representation, not the representation"
        return DerivedSite(path, boundary, "skip", reason, shape)
    if smaller_side(read.parameter) < 2:
        return DerivedSite(path, boundary, "skip", "a side of 1 has rank 1 by definition", shape)
    fused = isinstance(layer, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase))
    obstacle = unobservable(layer) if whole or fused else None
    if whole and obstacle is None:
        return DerivedSite(path, boundary, "observe", "first reads this representation", shape)
    if obstacle is None:
        holder = read.path or type(model).__name__
        how = f"inside the fused {read.operation}" if read.operation else "functionally"
        obstacle = (
            f"used {how} in {holder}: give it a layer of its own that is called, "
            "or call observe_residual"
        )
    return DerivedSite(path, boundary, "expose", obstacle, shape)


def _unread(
    model: nn.Module, first: dict[int, Read], names: dict[int, str]
) -> Iterable[DerivedSite]:
    tables = {
        id(m.weight): m
        for m in model.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and isinstance(m.weight, Tensor)
    }
    layers: dict[int, str] = {}
    for path, module in model.named_modules():
        matrix = matrix_parameter(module)
        if isinstance(matrix, torch.nn.Parameter):
            layers.setdefault(id(matrix), path)
    for parameter in model.parameters():
        if parameter.ndim < 2 or id(parameter) in first:
            continue
        reason = "contracts no representation in this run"
        if not parameter.requires_grad:
            reason = "frozen"
        elif id(parameter) in tables:
            reason = "an embedding is looked up, never observed"
        path = layers.get(id(parameter), names[id(parameter)])
        yield DerivedSite(path, "", "skip", reason, tuple(parameter.shape))
