"""What depends on a pair of tokens only through its lag, for one slab of the closed-form path.

`GridTables`: tokens stand one time unit apart, so a function of the lag is a vector over lags; read
with strides (1, 1) it is the slab's whole table, without a copy. `TimeTables`: any times; tables are
made slab by slab from the per-head numbers of Algorithm 1, and their gradient is taken by hand.

Source: RT-Filter paper, Algorithm 1 step 3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MASKED", "GridTables", "LagValues", "Scratch", "Slab", "TimeTables"]

# Below every finite logit, yet finite, so that a fully masked row stays free of NaN.
MASKED = -1e30

SLOPE, OFFSET, LOG_RATIO, LOG_RHO, RHO, DECAY = range(6)
MU, KEY_T, ADD_T, QUERY_T, FLOOR, SCALE, KEY_R, ADD_R, QUERY_R, NU_R = range(10)


class Slab(NamedTuple):
    """One group of heads and one slice of queries, all sizes (group, batch, slice, keys).

    whole: how many of the first keys every one of the queries can see.
    """

    heads: slice
    queries: slice
    keys: int
    table_offset: int
    whole: int


class LagValues(NamedTuple):
    """Tables of one slab, each broadcastable to (group, batch, slice, keys).

    k = slope·m² + offset; the directional logit has β log(k·ratio), on the grid as β log k +
    log_ratio; log_rho and rho enter the radial one. hidden: pairs to mask among the last keys, where the
    tables do not.
    """

    slope: Tensor
    offset: Tensor
    log_rho: Tensor
    rho: Tensor
    decay: Tensor
    log_ratio: Tensor | None = None
    ratio: Tensor | None = None
    hidden: Tensor | None = None


class Scratch:
    """Buffers of one size, made when first asked for and used again for every slab."""

    def __init__(self, like: Tensor, size: int) -> None:
        self.like, self.size = like, size
        self.memory: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.memory:
            self.memory[name] = self.like.new_empty(self.size)
        return self.memory[name][: math.prod(shape)].view(shape)


class GridTables:
    """Tables over lags, (6, heads, lags), and their gradient."""

    def __init__(self, tables: Tensor) -> None:
        self.tables = tables.contiguous()
        self.gradient = torch.zeros_like(self.tables)

    def open(self, slab: Slab) -> LagValues:
        slope, offset, log_ratio, log_rho, rho, decay = (
            self._table(which, slab) for which in range(6)
        )
        return LagValues(slope, offset, log_rho, rho, decay, log_ratio)

    def _table(self, which: int, slab: Slab) -> Tensor:
        """A vector over lags as a (group, 1, slice, keys) table: strides (1, 1), no copy."""
        width = self.tables.shape[2]
        heads, length = slab.heads, slab.queries.stop - slab.queries.start
        return torch.as_strided(
            self.tables,
            (heads.stop - heads.start, 1, length, slab.keys),
            (width, 0, 1, 1),
            (which * self.tables.shape[1] + heads.start) * width + slab.table_offset,
        )

    def _add(self, which: int, slab: Slab, values: Tensor) -> None:
        """Sum (group, batch, slice, keys) over batch and over equal lags into a table's gradient.

        Row r of a slice is shifted by r. Written into a band of a zero matrix one longer per row,
        equal lags stand in one column.
        """
        group, _, length, keys = values.shape
        width = keys + length - 1
        band = values.new_zeros(group, length * (width + 1))
        torch.sum(
            values,
            dim=1,
            out=band.as_strided((group, length, keys), (length * (width + 1), width + 1, 1)),
        )
        columns = band[:, : length * width].view(group, length, width).sum(1)
        self.gradient[which, slab.heads, slab.table_offset : slab.table_offset + width] += columns

    def add_precision(
        self, slab: Slab, score: Tensor, kappa_grad: Tensor, product: Tensor, kappa: Tensor
    ) -> None:
        """Gradients of the directional logit: score (∂/∂L), ∂/∂k, and m² ∂/∂k (may be spoiled)."""
        self._add(LOG_RATIO, slab, score)
        self._add(OFFSET, slab, kappa_grad)
        self._add(SLOPE, slab, product)

    def add_radial(self, slab: Slab, score: Tensor, rho_grad: Tensor) -> None:
        """Gradients of the radial logit: ∂/∂L_R and ∂/∂rho (may be spoiled)."""
        self._add(LOG_RHO, slab, score)
        self._add(RHO, slab, rho_grad)

    def add_decay(self, slab: Slab, decay_grad: Tensor | None) -> None:
        """∂/∂E of the transported magnitude (may be spoiled); the last call for a slab."""
        if decay_grad is not None:
            self._add(DECAY, slab, decay_grad)

    def finished(self) -> Tensor:
        return self.gradient


class TimeTables:
    """Tables at given times from per-head numbers (10, heads), and the gradient of those numbers.

    Args:
        query_times, key_times: (1 or batch, tokens), float64; queries in reverse order.
        causal: whether keys later than a query are hidden.
    """

    def __init__(
        self,
        numbers: Tensor,
        query_times: Tensor,
        key_times: Tensor,
        causal: bool,
        radial: bool,
        temperature: Tensor,
        scratch: Scratch,
    ) -> None:
        self.numbers, self.causal, self.radial = numbers, causal, radial
        self.temperature = temperature
        self.query_times, self.key_times = query_times, key_times
        self.gradient = torch.zeros_like(numbers)
        self.scratch = scratch
        self.measured: slice | None = None

    def _number(self, which: int, slab: Slab) -> Tensor:
        return self.numbers[which, slab.heads].reshape(-1, 1, 1, 1)

    def _measure(self, slab: Slab) -> None:
        """Lags, (1 or batch, slice, keys), and hidden pairs; the same for all heads of a slice."""
        total = self.query_times.shape[1]
        rows = slice(total - slab.queries.stop, total - slab.queries.start)
        gap = self.query_times[:, rows, None] - self.key_times[:, None, : slab.keys]
        self.hidden = gap[..., slab.whole :] < 0 if self.causal else None
        self.lag = (gap.clamp_(min=0.0) if self.causal else gap.abs_()).to(self.numbers.dtype)
        self.measured = slab.queries

    def open(self, slab: Slab) -> LagValues:
        if self.measured != slab.queries:
            self._measure(slab)
        lag, hidden = self.lag, self.hidden
        shape = (slab.heads.stop - slab.heads.start, *lag.shape)
        names = ("decay", "squared", "tangential", "inverse", "slope", "offset", "ratio",
                 "variance", "log_rho", "rho")  # fmt: skip
        decay, squared, tangential, inverse, slope, offset, ratio, radial, log_rho, rho = (
            self.scratch(f"table {name}", shape) for name in names
        )
        key, added, query, floor, scale = (
            self._number(which, slab) for which in (KEY_T, ADD_T, QUERY_T, FLOOR, SCALE)
        )
        torch.mul(lag, -self._number(MU, slab), out=decay).exp_()
        torch.mul(decay, decay, out=squared)
        # Not addcmul, which is several times slower with two operands broadcast.
        torch.mul(squared, key, out=tangential).add_(added)
        residual = torch.add(tangential, query, out=ratio)
        torch.div(scale, residual, out=inverse)
        ratio = residual.div_(tangential)
        torch.mul(squared, inverse, out=slope)
        torch.mul(inverse, floor, out=offset)
        if self.radial:
            nu = self._number(NU_R, slab)
            torch.mul(squared, self._number(KEY_R, slab), out=radial)
            radial.add_(self._number(ADD_R, slab))
            torch.log2(radial, out=log_rho).mul_(-math.log(2.0))
            torch.add(radial, self._number(QUERY_R, slab), out=rho).mul_(nu).reciprocal_()
            if hidden is not None:
                log_rho[..., slab.whole :].masked_fill_(hidden, MASKED)
        self.decay, self.squared, self.tangential = decay, squared, tangential
        self.inverse, self.variance, self.rho = inverse, radial, rho
        return LagValues(slope, offset, log_rho, rho, decay, None, ratio, hidden)

    def _pairs(self, name: str, values: Tensor) -> Tensor:
        """Values (group, batch, slice, keys) summed over the batch where one clock serves it all."""
        if values.shape == self.decay.shape:
            return values
        out = self.scratch(f"pairs {name}", tuple(self.decay.shape))
        return torch.sum(values, dim=1, keepdim=True, out=out)

    def _sum(self, which: int, slab: Slab, values: Tensor, other: Tensor | None = None) -> None:
        """Add Σ values·other per head to the gradient of a number."""
        if other is None:
            total = values.sum((1, 2, 3))
        else:
            other = other.expand_as(values).reshape(len(values), -1, 1)
            total = torch.bmm(values.reshape(len(values), 1, -1), other).flatten()
        self.gradient[which, slab.heads] += total

    def add_precision(
        self, slab: Slab, score: Tensor, kappa_grad: Tensor, product: Tensor, kappa: Tensor
    ) -> None:
        """As `GridTables.add_precision`. With t, r the variances without and with the query's,
        ∂/∂log r = β score − k ∂/∂k and ∂/∂log t = −β score."""
        scale = self._number(SCALE, slab)
        beta = self.temperature[slab.heads].reshape(-1, 1, 1, 1)
        pull = self.scratch("pull", tuple(kappa.shape))
        pull = self._pairs("pull", torch.mul(kappa_grad, kappa, out=pull))
        self._sum(SCALE, slab, pull)
        score = self._pairs("score", score)
        pull.addcmul_(score, beta, value=-1.0).mul_(self.inverse)  # −scale ∂/∂r
        self._sum(QUERY_T, slab, pull)
        self._sum(FLOOR, slab, self._pairs("kappa_grad", kappa_grad), self.inverse)
        squared_grad = self.squared_grad = self.scratch("squared_grad", tuple(pull.shape))
        torch.mul(self._pairs("product", product), self.inverse, out=squared_grad)
        # −∂/∂t by both ways
        variance_grad = torch.div(score, self.tangential, out=self.tangential).mul_(beta)
        variance_grad.addcmul_(pull, 1.0 / scale)
        self._sum(ADD_T, slab, variance_grad)
        self._sum(KEY_T, slab, variance_grad, self.squared)
        squared_grad.addcmul_(variance_grad, self._number(KEY_T, slab), value=-1.0)

    def add_radial(self, slab: Slab, score: Tensor, rho_grad: Tensor) -> None:
        """As `GridTables.add_radial`, with rho = 1/(ν (σ² + η²_q))."""
        moved = self._pairs("rho_grad", rho_grad).mul_(self.rho)
        self._sum(NU_R, slab, moved)
        moved.mul_(self.rho)
        self._sum(QUERY_R, slab, moved)
        variance_grad = torch.div(self._pairs("score", score), self.variance, out=self.variance)
        variance_grad.addcmul_(moved, self._number(NU_R, slab))  # −∂/∂σ²
        self._sum(ADD_R, slab, variance_grad)
        self._sum(KEY_R, slab, variance_grad, self.squared)
        self.squared_grad.addcmul_(variance_grad, self._number(KEY_R, slab), value=-1.0)

    def add_decay(self, slab: Slab, decay_grad: Tensor | None) -> None:
        """As `GridTables.add_decay`: ∂/∂log E = E ∂/∂E + 2E² ∂/∂E²."""
        total = self.squared_grad.mul_(self.squared).mul_(2.0)
        if decay_grad is not None:
            total.addcmul_(self._pairs("decay", decay_grad), self.decay)
        self._sum(MU, slab, total, self.lag)

    def finished(self) -> Tensor:
        """The gradient of the numbers, from the bare sums."""
        scale, nu = self.numbers[SCALE], self.numbers[NU_R]
        sums = self.gradient
        sums[MU] *= -1.0
        sums[ADD_T] *= -1.0
        sums[KEY_T] *= -1.0
        sums[QUERY_T] *= -1.0 / scale
        sums[SCALE] /= scale
        sums[ADD_R] *= -1.0
        sums[KEY_R] *= -1.0
        sums[QUERY_R] *= -nu
        sums[NU_R] *= -1.0 / nu
        return sums
