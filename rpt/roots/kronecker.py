"""The built-in backends: L^-1/4 G R^-1/4 with a choice of how each side is represented."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

from .base import Damping, Refresh, RootBackend, State
from .factors import BlockSide, DiagonalSide, Drift, Side
from .low_rank import LowRankSide
from .packed import packed_length


class KroneckerRoots(RootBackend):
    """A metric made of two sides; subclasses say which kind of side a length gets.

    Padding is promised by a class for itself (`class Mine(KroneckerRoots, padding=True)`) and not
    handed down: a subclass that overrides a method may count on the shapes it is shown.

    Example:
        >>> import rpt
        >>> backend = rpt.roots.resolve_roots("blocked")
        >>> isinstance(backend, rpt.roots.KroneckerRoots), backend.describe()
        (True, "blocked(block_size=128, drift_from='exact')")
    """

    any_strides = True
    capturable = True
    _padding = False

    def __init_subclass__(cls, *, padding: bool = False, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._padding = padding

    def side(self, size: int, other: int) -> Side:
        """The representation of a side of `size` entries facing one of `other`."""
        raise NotImplementedError

    def create(
        self, batch: int, rows: int, cols: int, *, dtype: torch.dtype, device: torch.device
    ) -> State:
        like = torch.empty(0, dtype=dtype, device=device)
        left = self.side(rows, cols).create("left", batch, rows, cols, like)
        return left | self.side(cols, rows).create("right", batch, cols, rows, like)

    def accumulate(
        self, state: State, gradient: Tensor, beta2: float, shapes: Tensor | None = None
    ) -> None:
        rows, cols = gradient.shape[-2:]
        # Each side divides by the other's true length.
        by_rows: float | Tensor = (1.0 - beta2) / rows
        by_cols: float | Tensor = (1.0 - beta2) / cols
        if shapes is not None:
            by_rows, by_cols = ((1.0 - beta2) / shapes).view(-1, 2, 1, 1).unbind(1)
        self.side(rows, cols).accumulate(state, "left", gradient, beta2, by_cols)
        self.side(cols, rows).accumulate(state, "right", gradient.mT, beta2, by_rows)

    def drift(self, state: State, shape: tuple[int, int], correction: Tensor) -> Tensor:
        rows, cols = shape
        return torch.maximum(
            self.side(rows, cols).drift(state, "left", correction),
            self.side(cols, rows).drift(state, "right", correction),
        )

    def refresh(
        self, state: State, shape: tuple[int, int], correction: Tensor, damping: Damping
    ) -> Refresh:
        rows, cols = shape
        mirrored = damping
        if damping.shapes is not None:
            mirrored = damping._replace(shapes=damping.shapes.flip(1))
        left = self.side(rows, cols).refresh(state, "left", correction, damping)
        right = self.side(cols, rows).refresh(state, "right", correction, mirrored)
        # The condition of a Kronecker product's square root is the geometric mean of its sides'.
        condition = (left.condition * right.condition).sqrt()
        return Refresh(condition, left.failed | right.failed)

    def apply(self, state: State, gradient: Tensor) -> Tensor:
        rows, cols = gradient.shape[-2:]
        # The result keeps the gradient's memory layout: no later operation then has to copy it.
        flipped = not gradient.is_contiguous()
        request = gradient.mT if flipped else gradient
        request = self.side(rows, cols).apply(state, "left", request, flipped)
        request = self.side(cols, rows).apply(state, "right", request, not flipped)
        return request.mT if flipped else request

    def pads(self, rows: int, cols: int) -> bool:
        left, right = self.side(rows, cols), self.side(cols, rows)
        return self._padding and left.pads(rows) and right.pads(cols)

    def crop(self, key: str, value: Tensor, rows: int, cols: int) -> Tensor:
        size = rows if key.startswith("left") else cols
        if key.endswith("_root"):
            return value[..., :size, :size]
        return value[..., : packed_length(size)]

    def without_drift(self) -> RootBackend:
        if any(f.name == "drift_from" for f in fields(self)):  # type: ignore[arg-type]
            return replace(self, drift_from="age")  # type: ignore[type-var]
        return self

    def describe(self) -> str:
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))  # type: ignore[arg-type]
        return f"{_NAMES[type(self)]}({options})" if type(self) in _NAMES else super().describe()


@dataclass(frozen=True)
class FullRoots(KroneckerRoots, padding=True):
    """A dense factor for both sides: the metric of the RPT guide.

    Attributes:
        drift_from: what drift is measured from where a threshold asks for it: "exact" (a copy of
            each factor at the last refresh) or "age" (never).

    Example:
        >>> import torch, rpt
        >>> weight = torch.nn.Parameter(torch.ones(4, 3))
        >>> optimizer = rpt.RPT([weight], roots=rpt.roots.FullRoots())
    """

    drift_from: Drift = "exact"

    def side(self, size: int, other: int) -> Side:
        return _block_side(None, self.drift_from)


@dataclass(frozen=True)
class BlockedRoots(KroneckerRoots, padding=True):
    """Block-diagonal factors: blocks of at most `block_size` rows, ragged at the edge.

    Attributes:
        block_size: one block covers a side no longer than this, and then equals `FullRoots`.
        drift_from: as in `FullRoots`.

    Example:
        >>> import rpt
        >>> full, blocked = rpt.roots.FullRoots(), rpt.roots.BlockedRoots(block_size=64)
        >>> full.state_bytes(256, 1024) // blocked.state_bytes(256, 1024)
        13
    """

    block_size: int = 128
    drift_from: Drift = "exact"

    def __post_init__(self) -> None:
        _require_positive("block_size", self.block_size)

    def side(self, size: int, other: int) -> Side:
        return _block_side(self.block_size, self.drift_from)


@dataclass(frozen=True)
class LowRankRoots(KroneckerRoots):
    """`rank` eigenpairs per side and an isotropic tail; state O((rows + cols)·rank).

    Attributes:
        rank: number of eigenpairs; a side no longer than this is represented exactly.

    Example:
        >>> import rpt
        >>> rpt.roots.LowRankRoots(rank=8).state_bytes(256, 1024)
        82064
    """

    # Its Nyström step is a decomposition.
    capturable = False

    rank: int = 32

    def __post_init__(self) -> None:
        _require_positive("rank", self.rank)

    def side(self, size: int, other: int) -> Side:
        return LowRankSide(self.rank)


@dataclass(frozen=True)
class AutoRoots(KroneckerRoots, padding=True):
    """Full for small sides, blocked above, one-sided for very long ones.

    Attributes:
        full_side: sides up to this length get one dense factor.
        block_size: longer sides get blocks of at most this.
        long_side: sides longer than this (a vocabulary) get no matrix factor at all, a diagonal only.

    Example:
        >>> import rpt
        >>> rpt.roots.AutoRoots(full_side=256, long_side=4096).state_bytes(256, 50_000)
        925312
    """

    full_side: int = 128
    block_size: int = 128
    long_side: int = 8192
    drift_from: Drift = "exact"

    def __post_init__(self) -> None:
        for name in ("full_side", "block_size", "long_side"):
            _require_positive(name, getattr(self, name))

    def side(self, size: int, other: int) -> Side:
        if size > self.long_side:
            return DiagonalSide()
        block = None if size <= self.full_side else self.block_size
        return _block_side(block, self.drift_from)


@dataclass(frozen=True)
class NoRoots(KroneckerRoots):
    """No metric: only the request's scale is normalised (an ablation).

    Example:
        >>> import rpt
        >>> rpt.roots.NoRoots().state_bytes(256, 1024)
        16
    """

    def side(self, size: int, other: int) -> Side:
        return DiagonalSide(shared=True)


# Sides are settings only: one object serves every step.
_block_side = cache(BlockSide)

_NAMES: dict[type, str] = {
    FullRoots: "full",
    BlockedRoots: "blocked",
    LowRankRoots: "low_rank",
    AutoRoots: "auto",
    NoRoots: "none",
}


def resolve_roots(spec: str | RootBackend) -> RootBackend:
    """The backend that a `roots=` option names.

    Args:
        spec: an instance, a name ("full", "blocked", "low_rank", "auto", "none"), or a name with
            options as `describe()` writes them, such as "low_rank(rank=64)".

    Raises:
        TypeError: neither text nor a `RootBackend`.
        ValueError: a name or option that no built-in backend has.

    Example:
        >>> import rpt
        >>> rpt.roots.resolve_roots("low_rank(rank=64)")
        LowRankRoots(rank=64)
    """
    if isinstance(spec, RootBackend):
        return spec
    if isinstance(spec, str):
        return _resolve_text(spec)
    raise TypeError(
        f"roots={spec!r} is a {type(spec).__name__}: give a name ({', '.join(_NAMES.values())}) "
        "or an instance of a RootBackend subclass"
    )


@cache
def _resolve_text(spec: str) -> RootBackend:
    by_name = {name: backend for backend, name in _NAMES.items()}
    name, _, _ = spec.partition("(")
    if name not in by_name:
        raise ValueError(f"roots={spec!r} is unknown: choose one of {', '.join(by_name)}")
    try:
        call = ast.parse(spec if "(" in spec else f"{spec}()", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        try:
            options = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        except ValueError as error:
            raise SyntaxError("not a literal") from error
        return by_name[name](**options)
    except (SyntaxError, AssertionError, TypeError) as error:
        known = ", ".join(f.name for f in fields(by_name[name]))  # type: ignore[arg-type]
        raise ValueError(
            f"roots={spec!r} cannot be read: {name} takes the options {known or 'none'}"
        ) from error


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive whole number")
