"""One block of polar attention, queries × keys: forward sums and closed-form gradients.

Plain values, no autograd. With c_ij of `scores.py`, D = arcosh(1 + c), scores −g D² + bias and
weights P, the centroid needs V = Σ_j P sinh(a_j) u_j and F = Σ_j P f_ij,
f_ij = e^−a_j + sinh a_j ½‖û_i − u_j‖², û = V/‖V‖ (Polar-ViT paper, Eq. 6: F = E + S).

c and F are exact to the resolution of float32 points. On a CPU they come from float64 products of
the float32 vectors: products of their entries are exact there, and what cancels leaves 1e-16, not
1e-7, so that they hold as far as float32 points do (a float32 product identity is wrong by tens of
percent at radius 8). Elsewhere, and for float64 points, they come from differences (`cdist`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.distance import half_squared_differences, mean_row
from ..ops.scalar import norm_and_direction
from .scores import ScoreCoordinates

# Below it D/sinh D is 1 to the last bit; it keeps the quotient defined at c = 0.
_TINY = 1e-30


class Values(NamedTuple):
    """The value points as the sums over them need them."""

    sinh: Tensor  # sinh a (…, M)
    falling: Tensor  # e^−a (…, M)
    u: Tensor  # (…, M, n)
    middle: Tensor  # the direction m of their middle, (…, 1, n)
    # What weights are multiplied with: sinh(a) u with u made unit, cosh a, e^−a, 1 in float64 where
    # products are taken; else sinh(a) (u − m), sinh a, 1.
    columns: Tensor

    @classmethod
    def of(cls, a: Tensor, u: Tensor) -> Values:
        """From polar form; a must be within the range of sinh."""
        sinh, falling = torch.sinh(a), torch.exp(-a)
        column, one = sinh.unsqueeze(-1), torch.ones_like(sinh).unsqueeze(-1)
        middle = norm_and_direction((column * u).sum(-2))[1].unsqueeze(-2)
        columns = [column * (u - middle), column, one]
        if _by_product(u):
            column, fall, unit = column.double(), falling.double().unsqueeze(-1), u.double()
            norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
            unit = unit * (column / torch.where(norm > 0, norm, 1.0))
            columns = [unit, column + fall, fall, one.double()]
        return cls(sinh, falling, u, middle, torch.cat(columns, -1))

    def part(self, keys: slice) -> Values:
        """Some of the keys."""
        return Values(
            self.sinh[..., keys],
            self.falling[..., keys],
            self.u[..., keys, :],
            self.middle,
            self.columns[..., keys, :],
        )


class BlockScores(NamedTuple):
    """c, D² and D/sinh D, each (…, N, M)."""

    c: Tensor
    squared: Tensor
    ratio: Tensor


class RowSums(NamedTuple):
    """Per query row, wide: V (…, N, n), F (…, N) and Σ_j P_ij (…, N), which is 1 but for rounding
    (0 where no key is left)."""

    space: Tensor
    deficit: Tensor
    mass: Tensor


class Upstream(NamedTuple):
    """Per query row: ∂V (…, N, n), ∂F (…, N); wide: û (…, N, n) and the mean of ∂P (…, N)."""

    by_sum: Tensor
    by_deficit: Tensor
    direction: Tensor
    mean: Tensor

    @classmethod
    def of(cls, by_sum: Tensor, by_deficit: Tensor, sums: RowSums) -> Upstream:
        """Σ_j P_ij ∂P_ij is ∂V·V + ∂F F, from which ∂P is subtracted: V and F must be as exact."""
        total = (by_sum * sums.space).sum(-1) + by_deficit * sums.deficit
        mean = total / torch.where(sums.mass > 0, sums.mass, 1.0)
        return cls(by_sum, by_deficit, unit_rows(sums.space), mean)


class BlockGradients(NamedTuple):
    """Gradients by the queries' and keys' (level, scale, vector), the values' a, u, and by the
    gain, whose share is (…) per batch entry and head. Those of queries and keys still lack −2g."""

    query: tuple[Tensor, Tensor, Tensor]
    key: tuple[Tensor, Tensor, Tensor]
    a: Tensor
    u: Tensor
    gain: Tensor


def _by_product(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def _wide(x: Tensor) -> Tensor:
    """In float64, where the device has it: û − u of neighbours is less than float32 keeps of û."""
    return x if x.device.type == "mps" else x.double()


def _block_c(query: ScoreCoordinates, key: ScoreCoordinates) -> Tensor:
    if not _by_product(query.vector):
        # 2 sinh²(½δ) is ½(x − 1/x)², x = e^(δ/2): no transcendental function per pair.
        x = torch.exp(0.5 * query.level).unsqueeze(-1) * torch.exp(-0.5 * key.level).unsqueeze(-2)
        half = x.reciprocal().sub_(x)
        c = half_squared_differences(query.vector, key.vector)
        c.mul_(query.scale.unsqueeze(-1)).mul_(key.scale.unsqueeze(-2))
        return c.addcmul_(half, half, value=0.5)
    # One product for α β (½‖p‖² + ½‖q‖² − p·q) + ½ e^δ + ½ e^−δ − 1.
    level, scale, p = (t.double() for t in query)
    rise, scale = torch.exp(level).unsqueeze(-1), scale.unsqueeze(-1)
    half_norm = 0.5 * (p * p).sum(-1, keepdim=True)
    rows = torch.cat(
        [scale * p, scale * half_norm, scale, 0.5 * rise, 0.5 / rise, torch.ones_like(rise)], -1
    )
    level, scale, q = (t.double() for t in key)
    rise, scale = torch.exp(level).unsqueeze(-1), scale.unsqueeze(-1)
    half_norm = 0.5 * (q * q).sum(-1, keepdim=True)
    columns = torch.cat(
        [-scale * q, scale, scale * half_norm, 1.0 / rise, rise, -torch.ones_like(rise)], -1
    )
    return (rows @ columns.mT).float()


def block_scores(query: ScoreCoordinates, key: ScoreCoordinates) -> BlockScores:
    """c, D² and D/sinh D of all pairs."""
    # Shifts may carry points beyond the range of float32; the score is as good as −∞ there.
    c = _block_c(query, key)
    c.clamp_(_TINY, torch.finfo(c.dtype).max / 32.0)
    sinh_d = torch.add(c, 2.0).sqrt_().mul_(c.sqrt())
    d = torch.add(c, sinh_d).log1p_()
    ratio = torch.div(d, sinh_d, out=sinh_d)
    return BlockScores(c, d.mul_(d), ratio)


def unit_rows(x: Tensor) -> Tensor:
    """Directions of rows (…, n), 0 where a row is 0. Plain values."""
    largest = x.abs().amax(-1, keepdim=True)
    scaled = x / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(norm > 0, norm, 1.0)


def _terms(direction: Tensor, value: Values) -> Tensor:
    """f_ij of query directions û (…, N, n) and values (…, N, M), from differences."""
    terms = half_squared_differences(direction, value.u)
    return terms.mul_(value.sinh.unsqueeze(-2)).add_(value.falling.unsqueeze(-2))


def block_sums(p: Tensor, value: Values) -> RowSums:
    """The sums of rows of weights P over all their keys (…, N, M)."""
    sums, n = p.to(value.columns.dtype) @ value.columns, value.u.shape[-1]
    mass = _wide(sums[..., -1])
    if not _by_product(value.u):
        space = _wide(sums[..., n : n + 1]) * _wide(value.middle) + _wide(sums[..., :n])
        terms = _terms(unit_rows(space).to(p.dtype), value)
        return RowSums(space, _wide((p * terms).sum(-1)), mass)
    space = sums[..., :n]
    deficit = sums[..., n] - torch.linalg.vector_norm(space, dim=-1)
    # F is no less than E, a sum without a difference.
    return RowSums(space, torch.maximum(deficit, sums[..., n + 1]), mass)


def _by_weights(upstream: Upstream, value: Values) -> Tensor:
    """∂P_ij = ∂V_i · sinh(a_j) u_j + ∂F_i f_ij of the loss, (…, N, M); float64 as a product."""
    by_deficit = upstream.by_deficit.unsqueeze(-1)
    if not _by_product(value.u):
        along = (upstream.by_sum * value.middle).sum(-1, keepdim=True)
        by_p = torch.cat([upstream.by_sum, along], -1) @ value.columns[..., :-1].mT
        return by_p.addcmul_(_terms(upstream.direction.to(by_p.dtype), value), by_deficit)
    by_deficit = by_deficit.double()
    rows = torch.cat([upstream.by_sum.double() - by_deficit * upstream.direction, by_deficit], -1)
    return rows @ value.columns[..., :-2].mT


def _one_side(
    own: ScoreCoordinates, other: ScoreCoordinates, by_c: Tensor, by_c_c: Tensor, centre: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by (level, scale, vector) of one side; the sums over the other share a product."""
    # Σ_j g β_j (p − q_j) with both centred (Eq. 25); Σ_j g sinh δ_j from Σ_j g e^±σ_j, as exact as
    # the levels are; and α ∂/∂α = Σ_j g (c_ij − (cosh δ_ij − 1)) from the exact c.
    rise = torch.exp(other.level).unsqueeze(-1)
    scale = other.scale.unsqueeze(-1)
    columns = [scale * (other.vector - centre), scale, rise, 1.0 / rise, torch.ones_like(rise)]
    sums = by_c @ torch.cat(columns, -1)
    pull, total, rising, falling, plain = sums.split([own.vector.shape[-1], 1, 1, 1, 1], -1)
    own_scale = own.scale.unsqueeze(-1)
    at_origin = own_scale == 0
    by_vector = ((own.vector - centre) * total - pull) * torch.where(at_origin, 1.0, own_scale)
    own_rise = torch.exp(own.level).unsqueeze(-1)
    up, down = 0.5 * own_rise * falling, 0.5 * rising / own_rise
    angular = by_c_c.unsqueeze(-1) - (up + down - plain)
    by_scale = torch.where(at_origin, 0.0, angular / torch.where(at_origin, 1.0, own_scale))
    return (up - down).squeeze(-1), by_scale.squeeze(-1), by_vector


def block_gradients(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: Values,
    scores: BlockScores,
    p: Tensor,
    upstream: Upstream,
) -> BlockGradients:
    """One block's share of all gradients, given its weights P."""
    # û counts as constant in F, which is exact: F is stationary in it.
    n = value.u.shape[-1]
    by_p = _by_weights(upstream, value)
    centre = _wide(mean_row(value.u))
    off = (upstream.direction - centre).to(by_p.dtype)
    by_sum, by_deficit = upstream.by_sum, upstream.by_deficit.unsqueeze(-1)
    both = torch.cat([by_sum.to(by_p.dtype), by_deficit * off, by_deficit.to(by_p.dtype)], -1)
    pull_sum, pull_direction, pull = (p.to(by_p.dtype).mT @ both).split([n, n, 1], -1)
    zero = value.sinh == 0
    safe_sinh = torch.where(zero, 1.0, value.sinh)
    across = pull_sum + (value.u - centre).to(by_p.dtype) * pull - pull_direction
    by_u = across.to(p.dtype) * safe_sinh.unsqueeze(-1)
    pull = pull.to(p.dtype)

    weighted = by_p.to(p.dtype) * p
    relative = by_p.sub_(upstream.mean.unsqueeze(-1)).to(p.dtype)
    # ∂a_j = coth a_j (Σ_i P_ij ∂P_ij − e^−a_j Σ_i P_ij ∂F_i) − e^−a_j Σ_i P_ij ∂F_i
    fall = value.falling * pull.squeeze(-1)
    coth = (value.sinh + value.falling) / safe_sinh
    by_a = torch.where(zero, 0.0, coth * (weighted.sum(-2) - fall) - fall)

    by_score = relative.mul_(p)
    by_gain = -(by_score * scores.squared).sum((-2, -1))
    by_c = by_score.mul_(scores.ratio)
    by_c_c = by_c * scores.c
    key_centre = mean_row(key.vector)
    return BlockGradients(
        _one_side(query, key, by_c, by_c_c.sum(-1), key_centre),
        _one_side(key, query, by_c.mT, by_c_c.sum(-2), key_centre),
        by_a,
        by_u,
        by_gain,
    )


class Bias(NamedTuple):
    """What is added to the scores: a tensor that broadcasts to (…, N, M), and causality."""

    tensor: Tensor | None
    causal_offset: int | None

    def add_to(self, score: Tensor, first: int = 0) -> Tensor:
        """Scores of some rows, from `first` on, and of the keys from 0 on, with their bias."""
        rows, keys = score.shape[-2:]
        if self.tensor is not None:
            part = self.tensor
            if part.shape[-2] > 1:
                part = part[..., first : first + rows, :]
            if part.shape[-1] > 1:
                part = part[..., :keys]
            score = score + part
        if self.causal_offset is not None and keys - 1 > first + self.causal_offset:
            score = score + causal_bias(rows, keys, score, first + self.causal_offset)
        return score

    def keys_of(self, stop: int, keys: int) -> int:
        """How many of the keys some query before row `stop` may see: the others are skipped."""
        if self.causal_offset is None:
            return keys
        return min(keys, max(0, stop + self.causal_offset))


def causal_bias(rows: int, columns: int, like: Tensor, offset: int) -> Tensor:
    """(rows, columns): −inf where key j > query i + offset, else 0."""
    later = torch.ones(rows, columns, dtype=torch.bool, device=like.device).triu(offset + 1)
    return torch.zeros(rows, columns, dtype=like.dtype, device=like.device).masked_fill_(
        later, -torch.inf
    )
