"""What depends on a pair of tokens only through its lag, for one slab of the closed-form path.

A slab is a group of heads times a slice of queries against all keys it can see; its tensors are
(group, batch, slice, keys), keys latest first. Tables come from lags and the numbers of Algorithm 1,
and their gradient is taken by hand. At given times they are made pair by pair; on the grid, where
tokens stand one time unit apart, they are vectors over lags, and a vector read with strides (1, 1) is
the slab's whole table, without a copy.

Source: RT-Filter paper, Algorithm 1 step 3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LagTables", "Numbers", "Slab", "dot"]


class Slab(NamedTuple):
    """Which part of the problem a slab is.

    queries, keys: which rows of queries and of reversed keys.
    lag: |t_i − t_j|, (1 or batch, slice, keys), or on the grid a vector over lags, (1, 1, lags).
    hidden: what to add to the logits of the first, latest keys so that none of them is seen too
        early, (1 or batch, slice, latest), or None.
    """

    heads: slice
    queries: slice
    keys: slice
    lag: Tensor
    hidden: Tensor | None
    grid: bool


class Numbers(NamedTuple):
    """Numbers of Algorithm 1, one per head: variances η²_k, ι², η²_q of both kinds, m²_∞, what
    multiplies κ̃ and what multiplies the logarithms."""

    decay: Tensor
    key: Tensor
    inflation: Tensor
    query: Tensor
    floor: Tensor
    scale: Tensor
    radial_key: Tensor
    radial_inflation: Tensor
    radial_query: Tensor
    radial_nu: Tensor
    temperature: Tensor
    exponent: Tensor
    radial_exponent: Tensor


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Σ left·right per head of a group, (group,)."""
    group = left.shape[0]
    right = right.expand_as(left)
    return torch.bmm(left.reshape(group, 1, -1), right.reshape(group, -1, 1)).flatten()


def grid_view(table: Tensor, rows: int) -> Tensor:
    """A vector over lags (…, 1, lags) as a table (…, rows, keys): strides (1, 1), no copy."""
    *leading, _, lags = table.shape
    shape, strides = (*leading, rows, lags - rows + 1), (*table.stride()[:-2], 1, 1)
    return table.as_strided(shape, strides, table.storage_offset())


def grid_sum(values: Tensor) -> Tensor:
    """Adjoint of `grid_view`: (group, batch, rows, keys) summed over the batch and equal lags."""
    group, _, rows, keys = values.shape
    lags = keys + rows - 1
    # Row r is shifted by r. In a band of a zero matrix one longer per row, equal lags are a column.
    band = values.new_zeros(group, rows * (lags + 1))
    strides = (rows * (lags + 1), lags + 1, 1)
    torch.sum(values, dim=1, out=band.as_strided((group, rows, keys), strides))
    return band[:, : rows * lags].view(group, rows, lags).sum(1)[:, None, None]


class LagTables:
    """Tables of one slab, broadcastable to its shape.

    k = slope·m² + offset is κ̃ times its scale, k·ratio is κ times it; log_rho and rho enter the
    radial logit; decay is E.
    """

    def __init__(self, numbers: Numbers, slab: Slab, radial: bool) -> None:
        n = self.numbers = numbers
        self.slab = slab
        # E² must not become subnormal, where arithmetic is ten times slower.
        least = 0.49 * math.log(torch.finfo(slab.lag.dtype).tiny)
        self.carried = (-n.decay * slab.lag).clamp_(min=least).exp_()
        self.squared = self.carried * self.carried
        # Not addcmul, which is several times slower with two operands broadcast.
        self.variance = (self.squared * n.key).add_(n.inflation)
        residual = self.variance + n.query
        self.inverse = n.scale / residual
        self.decay = self._view(self.carried)
        self.ratio = self._view(residual.div_(self.variance))
        self.slope = self._view(self.squared * self.inverse)
        self.offset = self._view(self.inverse * n.floor)
        if radial:
            self.radial_variance = (self.squared * n.radial_key).add_(n.radial_inflation)
            self.log_rho = self._view(self.radial_variance.log2().mul_(-math.log(2.0)))
            residual = self.radial_variance + n.radial_query
            self.radial_inverse = residual.mul_(n.radial_nu).reciprocal_()
            self.rho = self._view(self.radial_inverse)

    def _view(self, table: Tensor) -> Tensor:
        queries = self.slab.queries
        return grid_view(table, queries.stop - queries.start) if self.slab.grid else table

    def _sum(self, values: Tensor) -> Tensor:
        """Values (group, batch, slice, keys) summed over pairs of one lag: a table's gradient."""
        if self.slab.grid:
            return grid_sum(values)
        return values.sum(1, keepdim=True) if self.squared.shape[1] == 1 else values

    def gradient(
        self,
        score: Tensor,
        kappa_grad: Tensor,
        square: Tensor,
        decay_grad: Tensor | None,
        radial: tuple[Tensor, Tensor] | None,
    ) -> list[Tensor]:
        """Gradients of the first ten numbers, (group,) each, from those of a slab.

        Args:
            score: ∂/∂L. kappa_grad: ∂/∂k. square: m². decay_grad: ∂/∂E of transported magnitudes.
            radial: ∂/∂L_R and −∂/∂rho.
        """
        n = self.numbers
        by_square = self._sum(kappa_grad * square).mul_(self.inverse)
        by_floor = self._sum(kappa_grad) * self.inverse
        by_log_k = (self.squared * by_square).add_(by_floor * n.floor)
        weight = self._sum(score) * n.temperature
        by_residual = (weight - by_log_k).mul_(self.inverse).div_(n.scale)
        by_variance = by_residual - weight.div_(self.variance)
        by_square.addcmul_(by_variance, n.key)
        sums = [by_variance, by_residual, by_floor, by_log_k.div_(n.scale)]
        key = dot(by_variance, self.squared)
        radial_key = torch.zeros_like(key)
        radial_sums = [torch.zeros_like(n.decay)] * 3
        if radial is not None:
            radial_score, rho_pull = radial
            by_nu = self._sum(rho_pull).mul_(self.radial_inverse)
            by_query = (by_nu * self.radial_inverse).mul_(n.radial_nu)
            by_variance = by_query - self._sum(radial_score) / self.radial_variance
            by_square.addcmul_(by_variance, n.radial_key)
            radial_key = dot(by_variance, self.squared)
            radial_sums = [by_variance, by_query, by_nu.div_(n.radial_nu)]
        by_log_decay = by_square.mul_(self.squared).mul_(2.0)
        if decay_grad is not None:
            by_log_decay.add_(self._sum(decay_grad).mul_(self.carried))
        decay = -dot(by_log_decay, self.slab.lag)
        found, radial_found = ([t.sum((1, 2, 3)) for t in part] for part in (sums, radial_sums))
        return [decay, key, *found, radial_key, *radial_found]
