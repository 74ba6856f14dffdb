"""One side of a Kronecker metric: the covariance of the rows of a (b, size, other) gradient.

`BlockSide` keeps dense blocks on the diagonal (one block is the full factor), `DiagonalSide` one number
per row, or one for all; `LowRankSide` of `low_rank` is the third kind. Each is a frozen settings object;
state lives in a flat dict with keys prefixed by the side's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .base import Damping, Refresh, State
from .eigh import eigenvalue_floor, inverse_root
from .newton import newton_inverse_root
from .packed import PLACES, lower, packed_length, relative_change_packed, unpack

Drift = Literal["exact", "age"]


class Side(Protocol):
    """What a side does; all tensors carry the batch first.

    `accumulate` does A <- β2 A + weight · G Gᵀ with a number, or a (b, 1, 1) tensor where zeros pad G.
    `apply` multiplies the rows of a gradient (b, size, other), or, `right`, the columns of one
    (b, other, size).
    """

    def create(self, name: str, batch: int, size: int, other: int, like: Tensor) -> State: ...

    def pads(self, size: int) -> bool: ...

    def accumulate(
        self, state: State, name: str, gradient: Tensor, beta2: float, weight: float | Tensor
    ) -> None: ...

    def drift(self, state: State, name: str, correction: Tensor) -> Tensor: ...

    def refresh(self, state: State, name: str, correction: Tensor, damping: Damping) -> Refresh: ...

    def apply(self, state: State, name: str, gradient: Tensor, right: bool = False) -> Tensor: ...


def keep_where(failed: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """The new value, but the old one for matrices that failed."""
    return torch.where(failed.view(-1, *[1] * (new.ndim - 1)), old, new)


@dataclass(frozen=True)
class BlockSide:
    """Dense covariance blocks of at most `block` rows on the diagonal.

    Blocks are as equal as they can be: `size` rows make ceil(size/block) blocks of one size, and a
    ragged last one where the division leaves a remainder. All blocks of one size, over all matrices of
    the batch, are decomposed in one call.

    A factor is stored as its lower triangle; only its root, which every step applies, is whole.

    Attributes:
        block: largest block; None means one block, the full factor.
        drift_from: "exact" keeps a copy of the factor at the last refresh, "age" none: drift is then
            reported as zero.
    """

    block: int | None = None
    drift_from: Drift = "exact"

    def pieces(self, size: int) -> list[tuple[str, int, int, int]]:
        """(suffix, first row, number of blocks, rows per block) of the equal blocks and the rest."""
        if self.block is None or size <= self.block:
            return [("", 0, 1, size)]
        count = -(-size // self.block)
        rows = -(-size // count)
        whole = size // rows
        pieces = [("", 0, whole, rows)]
        if size % rows:
            pieces.append(("_rest", whole * rows, 1, size - whole * rows))
        return pieces

    def pads(self, size: int) -> bool:
        return len(self.pieces(size)) == 1 and self.pieces(size)[0][2] == 1

    def create(self, name: str, batch: int, size: int, other: int, like: Tensor) -> State:
        state: State = {}
        for suffix, _, count, rows in self.pieces(size):
            triangle = (batch, count, packed_length(rows))
            state[name + suffix] = like.new_zeros(triangle)
            identity = torch.eye(rows, dtype=like.dtype, device=like.device)
            state[f"{name}{suffix}_root"] = identity.expand(batch, count, rows, rows).clone()
            if self.drift_from != "age":
                state[f"{name}{suffix}_reference"] = like.new_zeros(triangle)
        return state

    def accumulate(
        self, state: State, name: str, gradient: Tensor, beta2: float, weight: float | Tensor
    ) -> None:
        size = gradient.shape[-2]
        for suffix, first, blocks, rows in self.pieces(size):
            below = state.get(PLACES % rows)
            if below is None:
                below, _ = lower(rows, gradient.device, getattr(gradient, "fake_mode", None))
            for k in range(blocks):
                factor, part = state[name + suffix], gradient
                if rows < size:
                    factor, part = factor[:, k : k + 1], part.narrow(1, first + k * rows, rows)
                # The lower triangle. Along any later dimension `index_select` takes ten times as long.
                square = torch.bmm(part, part.mT).flatten(1).index_select(1, below).view_as(factor)
                if isinstance(weight, Tensor):
                    factor.mul_(beta2).addcmul_(square, weight)
                else:
                    factor.mul_(beta2).add_(square, alpha=weight)

    def drift(self, state: State, name: str, correction: Tensor) -> Tensor:
        if self.drift_from == "age":
            return torch.zeros_like(correction)
        worst = torch.zeros_like(correction)
        for suffix in ("", "_rest"):
            if name + suffix in state:
                now = state[name + suffix] / correction.view(-1, 1, 1)
                rows = state[f"{name}{suffix}_root"].shape[-1]
                change = relative_change_packed(now, state[f"{name}{suffix}_reference"], rows)
                worst = torch.maximum(worst, change)
        return worst

    def refresh(self, state: State, name: str, correction: Tensor, damping: Damping) -> Refresh:
        conditions, failures = [], []
        for suffix in ("", "_rest"):
            if name + suffix not in state:
                continue
            root = state[f"{name}{suffix}_root"]
            batch, count, rows, _ = root.shape
            packed = state[name + suffix] / correction.view(-1, 1, 1)
            factor = unpack(packed.flatten(0, 1), rows)
            solve = newton_inverse_root if damping.products else inverse_root
            result = solve(
                factor,
                ridge=damping.ridge,
                absolute=damping.absolute.repeat_interleave(count),
                sizes=None if damping.shapes is None else damping.shapes[:, 0],
            )
            root.copy_(
                keep_where(result.failed, root.view(-1, rows, rows), result.root).view_as(root)
            )
            if self.drift_from != "age":
                state[f"{name}{suffix}_reference"].copy_(packed)
            conditions.append(result.condition.view(batch, count).amax(1))
            failures.append(result.failed.view(batch, count).any(1))
        return Refresh(torch.stack(conditions).amax(0), torch.stack(failures).any(0))

    def apply(self, state: State, name: str, gradient: Tensor, right: bool = False) -> Tensor:
        side = -1 if right else -2
        pieces = self.pieces(gradient.shape[side])
        if len(pieces) == 1 and pieces[0][2] == 1:
            root = state[f"{name}_root"][:, 0]
            return torch.bmm(gradient, root) if right else torch.bmm(root, gradient)
        out = torch.empty_like(gradient)
        for suffix, first, count, rows in pieces:
            root = state[f"{name}{suffix}_root"]
            for k in range(count):
                part = gradient.narrow(side, first + k * rows, rows)
                factors = (part, root[:, k]) if right else (root[:, k], part)
                out.narrow(side, first + k * rows, rows).baddbmm_(*factors, beta=0.0)
        return out


@dataclass(frozen=True)
class DiagonalSide:
    """The diagonal of the covariance only: one number per row.

    Attributes:
        shared: one number for all rows, their mean. That keeps the request's scale and prefers no
            direction.
    """

    shared: bool = False

    def pads(self, size: int) -> bool:
        return False

    def create(self, name: str, batch: int, size: int, other: int, like: Tensor) -> State:
        width = 1 if self.shared else size
        return {
            f"{name}_diagonal": like.new_zeros(batch, width),
            f"{name}_diagonal_root": like.new_ones(batch, width),
        }

    def accumulate(
        self, state: State, name: str, gradient: Tensor, beta2: float, weight: float | Tensor
    ) -> None:
        # Sums of squares along the rows, without a squared copy of the gradient.
        diagonal = torch.linalg.vector_norm(gradient, dim=-1).square()
        if self.shared:
            diagonal = diagonal.mean(-1, keepdim=True)
        state[f"{name}_diagonal"].mul_(beta2).add_(diagonal * weight)

    def drift(self, state: State, name: str, correction: Tensor) -> Tensor:
        # A diagonal is cheap to track by age; the other side's drift decides.
        return torch.zeros_like(correction)

    def refresh(self, state: State, name: str, correction: Tensor, damping: Damping) -> Refresh:
        values = state[f"{name}_diagonal"] / correction.view(-1, 1)
        floor = eigenvalue_floor(values.mean(-1), damping.ridge, damping.absolute)
        floored = torch.maximum(values, floor[:, None])
        failed = ~floored.isfinite().all(-1)
        root = state[f"{name}_diagonal_root"]
        root.copy_(keep_where(failed, root, floored.pow(-0.25)))
        return Refresh(floored.amax(-1) / floored.amin(-1), failed)

    def apply(self, state: State, name: str, gradient: Tensor, right: bool = False) -> Tensor:
        return gradient * state[f"{name}_diagonal_root"].unsqueeze(-2 if right else -1)
