"""One block of polar attention, queries × keys: forward sums and closed-form gradients.

Plain values, no autograd. With c_ij of `score.py`, D = arcosh(1 + c), scores −g D² + bias and
weights P, the centroid needs V = Σ_j P sinh(a_j) u_j and F = Σ_j P (e^−a_j + sinh a_j H_ij),
H_ij = ½‖û_i − u_j‖², û = V/‖V‖ (Polar-ViT paper, Eq. 6: F = E + S).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chord import half_squared_differences
from .score import ScoreCoordinates

__all__ = [
    "BlockGradients",
    "BlockScores",
    "Upstream",
    "Values",
    "block_deficit",
    "block_gradients",
    "block_scores",
]

_TINY = 1e-30


class Values(NamedTuple):
    """sinh a (…, M), e^−a (…, M), u (…, M, n) and sinh(a) u (…, M, n) of the value points."""

    sinh: Tensor
    falling: Tensor
    u: Tensor
    space: Tensor

    @classmethod
    def of(cls, a: Tensor, u: Tensor) -> Values:
        """From polar form; a must be within the range of sinh."""
        sinh = torch.sinh(a)
        return cls(sinh, torch.exp(-a), u, sinh.unsqueeze(-1) * u)

    def part(self, start: int, stop: int) -> Values:
        """The keys from `start` to `stop`."""
        return Values(
            self.sinh[..., start:stop],
            self.falling[..., start:stop],
            self.u[..., start:stop, :],
            self.space[..., start:stop, :],
        )


class BlockScores(NamedTuple):
    """−g D², its derivative by c, and the half squared chords, each (…, N, M)."""

    score: Tensor
    slope: Tensor
    chord: Tensor


class Upstream(NamedTuple):
    """Per query row: ∂V (…, N, n), ∂F (…, N), Σ_j P_ij ∂P_ij (…, N) and û (…, N, n)."""

    by_sum: Tensor
    by_deficit: Tensor
    row_mean: Tensor
    direction: Tensor


class BlockGradients(NamedTuple):
    """Gradients by the queries' and keys' (level, scale, vector), the values' a, u, and g."""

    query: tuple[Tensor, Tensor, Tensor]
    key: tuple[Tensor, Tensor, Tensor]
    a: Tensor
    u: Tensor
    gain: Tensor


def block_scores(query: ScoreCoordinates, key: ScoreCoordinates, gain: Tensor) -> BlockScores:
    """Scores of a block without their bias. 2 sinh²(½δ) is ½(x − 1/x)², x = e^(δ/2): an outer
    product, with no transcendental function per pair."""
    chord = half_squared_differences(query.vector, key.vector)
    x = torch.exp(0.5 * query.level).unsqueeze(-1) * torch.exp(-0.5 * key.level).unsqueeze(-2)
    half = x.reciprocal().sub_(x)
    c = chord * query.scale.unsqueeze(-1)
    c.mul_(key.scale.unsqueeze(-2)).addcmul_(half, half, value=0.5)
    # Shifts may carry points beyond the range of float32; the score is as good as −∞ there.
    c.clamp_(max=torch.finfo(c.dtype).max / 32.0)
    sinh_d = torch.add(c, 2.0).sqrt_().mul_(c.sqrt())
    d = c.add_(sinh_d).log1p_()
    slope = (d + _TINY).div_(sinh_d.add_(_TINY)).mul_(-2.0 * gain)
    return BlockScores(d.square_().mul_(-gain), slope, chord)


def block_deficit(p: Tensor, spread: Tensor, value: Values) -> Tensor:
    """F of one block (…, N), from P and H (…, N, M)."""
    falling = p @ value.falling.unsqueeze(-1)
    return torch.add(falling, (p * spread) @ value.sinh.unsqueeze(-1)).squeeze(-1)


def _one_side(
    own: ScoreCoordinates, other: ScoreCoordinates, by_c: Tensor, by_product: Tensor, centre: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by (level, scale, vector) of one side; the sums over the other share a product.

    Σ_j g β_j (p − q_j) with both centred (Eq. 25), and Σ_j g sinh(ρ − σ_j) as
    ½(e^ρ Σ_j g e^−σ_j − e^−ρ Σ_j g e^σ_j): the difference is as exact as the levels are.
    """
    rise = torch.exp(other.level).unsqueeze(-1)
    scale = other.scale.unsqueeze(-1)
    columns = torch.cat([scale * (other.vector - centre), scale, rise, rise.reciprocal()], -1)
    pull, total, rising, falling = (by_c @ columns).split([own.vector.shape[-1], 1, 1, 1], -1)
    factor = torch.where(own.scale == 0, 1.0, own.scale).unsqueeze(-1)
    by_vector = ((own.vector - centre) * total - pull) * factor
    own_rise = torch.exp(own.level).unsqueeze(-1)
    by_level = 0.5 * (own_rise * falling - rising / own_rise)
    return by_level.squeeze(-1), (by_product @ scale).squeeze(-1), by_vector


def block_gradients(
    query: ScoreCoordinates,
    key: ScoreCoordinates,
    value: Values,
    scores: BlockScores,
    p: Tensor,
    spread: Tensor,
    upstream: Upstream,
) -> BlockGradients:
    """One block's share of all gradients, given its P and H. `gain` still lacks the factor 1/g.

    û counts as constant in F, which is exact: F is stationary in it.
    """
    by_deficit = upstream.by_deficit.unsqueeze(-1)
    centre = value.u.mean(-2, keepdim=True)
    both = torch.cat(
        [
            upstream.by_sum,
            by_deficit * (upstream.direction - centre),
            by_deficit,
        ],
        -1,
    )
    n = value.u.shape[-1]
    pull_sum, pull_direction, pull = (p.mT @ both).split([n, n, 1], -1)
    at_origin = torch.where(value.sinh == 0, 1.0, value.sinh).unsqueeze(-1)
    by_u = (pull_sum + (value.u - centre) * pull - pull_direction) * at_origin
    spread_pull = ((p * spread).mT @ by_deficit).squeeze(-1)
    by_sinh = (value.u * pull_sum).sum(-1) + spread_pull
    cosh = value.sinh + value.falling
    by_a = cosh * by_sinh - value.falling * pull.squeeze(-1)

    by_p = (spread * value.sinh.unsqueeze(-2)).add_(value.falling.unsqueeze(-2)).mul_(by_deficit)
    by_p += upstream.by_sum @ value.space.mT
    by_score = by_p.sub_(upstream.row_mean.unsqueeze(-1)).mul_(p)
    by_gain = (by_score * scores.score).sum((-2, -1))
    by_c = by_score.mul_(scores.slope)
    by_product = by_c * scores.chord
    key_centre = key.vector.mean(-2, keepdim=True)
    return BlockGradients(
        _one_side(query, key, by_c, by_product, key_centre),
        _one_side(key, query, by_c.mT, by_product.mT, key_centre),
        by_a,
        by_u,
        by_gain,
    )
