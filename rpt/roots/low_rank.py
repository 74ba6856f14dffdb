"""A low-rank side: the leading eigenpairs of the covariance plus an isotropic tail.

State is two (size, rank) arrays, never size². Between refreshes the covariance L is seen only through
a fixed orthonormal basis Q as the sketch Y = L Q; at a refresh the Nyström approximation Y (QᵀY)⁻¹ Yᵀ
is decomposed, and its eigenvectors become the next basis: warm-started subspace iteration, one step
per refresh. The trace beyond the leading eigenvalues is spread evenly over the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .base import Damping, Refresh, State
from .eigh import decompose, eigenvalue_floor, eigh_shapes
from .factors import keep_where


@dataclass(frozen=True)
class LowRankSide:
    """The `rank` leading eigenpairs of the covariance and an isotropic tail.

    Attributes:
        rank: number of eigenpairs; at rank >= size the side equals the full factor.
    """

    rank: int

    def pads(self, size: int) -> bool:
        return False

    def create(self, name: str, batch: int, size: int, other: int, like: Tensor) -> State:
        rank = min(self.rank, size)
        basis = _starting_basis(size, rank, like)
        return {
            f"{name}_basis": basis.expand(batch, size, rank).clone(),
            f"{name}_sketch": like.new_zeros(batch, size, rank),
            f"{name}_trace": like.new_zeros(batch),
            f"{name}_eigenvalues": like.new_zeros(batch, rank),
            f"{name}_gains": like.new_ones(batch, rank),
            f"{name}_tail_gain": like.new_ones(batch),
        }

    def accumulate(
        self, state: State, name: str, gradient: Tensor, beta2: float, weight: float | Tensor
    ) -> None:
        seen = gradient.mT @ state[f"{name}_basis"] * weight
        state[f"{name}_sketch"].baddbmm_(gradient, seen, beta=beta2)
        square = torch.linalg.vector_norm(gradient, dim=(-2, -1)).square()
        state[f"{name}_trace"].mul_(beta2).add_(square * weight)

    def drift(self, state: State, name: str, correction: Tensor) -> Tensor:
        core = state[f"{name}_basis"].mT @ state[f"{name}_sketch"] / correction.view(-1, 1, 1)
        return _relative_change(core, torch.diag_embed(state[f"{name}_eigenvalues"]))

    def refresh(self, state: State, name: str, correction: Tensor, damping: Damping) -> Refresh:
        basis, sketch = state[f"{name}_basis"], state[f"{name}_sketch"]
        size, rank = basis.shape[-2:]
        vectors, values, failed = _nystrom(basis, sketch)
        trace = state[f"{name}_trace"]
        tail = (trace - values.sum(-1)).clamp_min(0) / max(size - rank, 1)
        tail = tail if size > rank else torch.zeros_like(tail)

        # Seen from the new basis, the old covariance is the diagonal just computed.
        kept = ~failed.view(-1, 1, 1)
        basis.copy_(torch.where(kept, vectors, basis))
        sketch.copy_(torch.where(kept, vectors * values.unsqueeze(-2), sketch))

        scale = 1.0 / correction
        eigenvalues, tail = values * scale[:, None], tail * scale
        mean = (eigenvalues.sum(-1) + (size - rank) * tail) / size
        floor = eigenvalue_floor(mean, damping.ridge, damping.absolute)
        floored = torch.maximum(eigenvalues, floor[:, None])
        floored_tail = torch.maximum(tail, floor)
        for key, new in (
            ("eigenvalues", eigenvalues),
            ("gains", floored.pow(-0.25)),
            ("tail_gain", floored_tail.pow(-0.25)),
        ):
            value = state[f"{name}_{key}"]
            value.copy_(keep_where(failed, value, new))
        low = torch.minimum(floored.amin(-1), floored_tail) if size > rank else floored.amin(-1)
        return Refresh(floored.amax(-1) / low, failed)

    def apply(self, state: State, name: str, gradient: Tensor, right: bool = False) -> Tensor:
        if right:
            return self.apply(state, name, gradient.mT).mT
        basis, tail = state[f"{name}_basis"], state[f"{name}_tail_gain"].view(-1, 1, 1)
        # V (Λ^-¼ - t) Vᵀ G + t G: two thin products.
        gains = state[f"{name}_gains"].unsqueeze(-1) - tail
        return torch.baddbmm(gradient * tail, basis, gains * (basis.mT @ gradient))


def _relative_change(now: Tensor, reference: Tensor) -> Tensor:
    """‖now - reference‖_F / ‖reference‖_F over all but the batch dimension; 0/0 is 0."""
    change = torch.linalg.vector_norm((now - reference).flatten(1), dim=1)
    length = torch.linalg.vector_norm(reference.flatten(1), dim=1)
    return torch.where(change > 0, change / length, 0.0)


def _starting_basis(size: int, rank: int, like: Tensor) -> Tensor:
    """Fixed orthonormal columns, the same on every rank and machine with the same torch."""
    if like.device.type == "meta":
        return like.new_zeros(size, rank)
    generator = torch.Generator().manual_seed(size * 1_000_003 + rank)
    columns = torch.randn(size, rank, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(columns).Q.to(like)


def _nystrom(basis: Tensor, sketch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenpairs of Y (QᵀY)⁻¹ Yᵀ, in float64 and shifted for stability (Tropp et al. 2017).

    Returns:
        orthonormal vectors (b, size, rank), values (b, rank) descending and >= 0, failed (b,).
    """
    q, y = basis.double(), sketch.double()
    core = q.mT @ y
    core = 0.5 * (core + core.mT)
    # float32 accumulation leaves the core indefinite by about eps·trace: shift past that.
    trace = core.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)
    shift = (torch.finfo(basis.dtype).eps * trace).clamp_min(torch.finfo(torch.float64).tiny)
    y = y + shift[:, None, None] * q
    core = core + torch.diag_embed(shift[:, None].expand(core.shape[:-1]))
    (values, vectors), failed = decompose(torch.linalg.eigh, core, eigh_shapes(core))
    # Where the basis has found no variance so far, the sketch is rounding: those directions stay.
    found = values > 16 * shift[:, None]
    along = vectors * torch.where(found, values, 1.0).rsqrt().unsqueeze(-2)
    kept = q @ (vectors * shift.sqrt()[:, None, None])
    halves = torch.where(found.unsqueeze(-2), y @ along, kept)
    size, rank = halves.shape[-2:]
    (u, s, _), lost = decompose(
        partial(torch.linalg.svd, full_matrices=False),
        halves,
        [(size, rank), (rank,), (rank, rank)],
    )
    eigenvalues = (s.square() - shift[:, None]).clamp_min(0)
    # A covariance that is still zero keeps its basis; zero eigenvalues are then the right answer.
    empty = trace <= 0
    u = torch.where(empty[:, None, None], q, u)
    eigenvalues = torch.where(empty[:, None], 0.0, eigenvalues)
    return u.to(basis), eigenvalues.to(basis), failed | lost
