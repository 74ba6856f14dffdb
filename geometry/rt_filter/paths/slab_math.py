"""Arithmetic of the closed-form path: `slabs.py` says what is computed, here is how, and the chain rule.

Logarithms are most of the time. They are taken to base 2, which is the cheapest to compute, and what
multiplies them holds the factor ln 2.

Source: RT-Filter paper, Algorithm 1 steps 3–6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..visibility import slice_ends
from .slab_tables import LagTables, Numbers, Slab, dot, grid_view

__all__ = ["CAUSAL", "EXPONENTIAL", "MAGNITUDES", "MASKED", "RADIAL", "SHARED", "Work"]

SLAB_ELEMENTS = 2**17
MAX_SLICE = 64
# Below every finite logit, yet finite, so that a fully masked row stays free of NaN.
MASKED = -1e30

EXPONENTIAL, MAGNITUDES, RADIAL, SHARED, CAUSAL = (2**bit for bit in range(5))


class Saved(NamedTuple):
    """What the backward pass reuses from a slab; (group, batch, slice, keys) each.

    gap: S = 1 − cos. inner, penalty: 1 + k S and its log₂, or k S twice with exponential weights; in
    the radial logit of rho y², y = off. log_kappa: log₂(k·ratio). kept: attention after dropout.
    """

    tables: LagTables
    gap: Tensor
    kappa: Tensor
    log_kappa: Tensor
    inner: Tensor
    penalty: Tensor
    attention: Tensor
    kept: Tensor
    dropped: Tensor | None
    moved: Tensor | None = None
    projected: Tensor | None = None
    off: Tensor | None = None
    radial_inner: Tensor | None = None
    radial_penalty: Tensor | None = None
    radial: Tensor | None = None


class Work:
    """One call: head-major views of the inputs, keys latest first, and both passes over its slabs."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_magnitude: Tensor,
        key_magnitude: Tensor,
        numbers: Tensor,
        query_times: Tensor,
        key_times: Tensor,
        bias: Tensor | None,
        seed: Tensor,
        flags: int,
        ahead: int,
        dropout: float,
    ) -> None:
        self.query = query.transpose(0, 1).contiguous()
        self.key, self.value = (t.transpose(0, 1).flip(2) for t in (key, value))
        self.own = query_magnitude.transpose(0, 1).contiguous()
        self.magnitude = key_magnitude.transpose(0, 1).flip(2)
        self.square = self.magnitude * self.magnitude
        self.numbers, self.bias, self.flags = numbers, bias, flags
        self.query_times, self.key_times, self.ahead = query_times, key_times, ahead
        self.exponential = bool(flags & EXPONENTIAL)
        self.own_weights = bool(flags & RADIAL and not flags & SHARED)
        self.dropout = dropout
        self.generator = None
        if dropout:
            self.generator = torch.Generator(device=query.device)
            # The seed is drawn on the host; reading it syncs no device.
            self.generator.manual_seed(int(seed))

    def slabs(self) -> Iterator[Slab]:
        """Cut the work, leaving out keys that no query of a slice can see."""
        heads, batch, queries, _ = self.query.shape
        keys = self.key.shape[2]
        length = max(8, min(MAX_SLICE, queries, SLAB_ELEMENTS // max(1, batch * keys)))
        group = max(1, min(heads, SLAB_ELEMENTS // max(1, batch * keys * length)))
        causal, grid = bool(self.flags & CAUSAL), self.ahead >= 0
        ends, whole = slice_ends(
            (queries, keys, length),
            causal,
            self.ahead if grid else None,
            self.query_times,
            self.key_times,
        )
        for start, end, all_see in zip(range(0, queries, length), ends, whole, strict=True):
            rows = slice(start, min(start + length, queries))
            lag, hidden = self._lags(rows, max(1, end), all_see, causal, grid)
            for head in range(0, heads, group):
                chosen = slice(head, min(head + group, heads))
                yield Slab(chosen, rows, slice(keys - max(1, end), keys), lag, hidden, grid)

    def _lags(
        self, rows: slice, seen: int, whole: int, causal: bool, grid: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The lags of a slice with the earliest `seen` keys, and the mask of all but `whole`."""
        queries = self.query_times[:, rows, None]
        keys = self.key_times[:, None, :seen].flip(2)
        if grid:
            # Down the latest key's column of lags, then along the last query's row.
            last = queries[:, -1:] - keys[..., 1:]
            gap = torch.cat(((queries - keys[..., :1]).mT, last), 2)
        else:
            gap = queries - keys
        hidden = None
        if causal:
            hidden = (gap < 0).to(self.query.dtype).mul_(MASKED)
            hidden = grid_view(hidden, rows.stop - rows.start) if grid else hidden
            hidden = hidden[..., : seen - whole]
        return gap.abs_().to(self.query.dtype), hidden

    def _bias(self, slab: Slab) -> Tensor | None:
        """The additive mask, (group or 1, batch or 1, slice or 1, keys)."""
        if self.bias is None:
            return None
        part = self.bias if self.bias.shape[1] == 1 else self.bias[:, slab.heads]
        part = part if part.shape[2] == 1 else part[:, :, slab.queries]
        return part[..., : slab.keys.stop - slab.keys.start].flip(3).transpose(0, 1)

    def _numbers(self, slab: Slab) -> Numbers:
        return Numbers(*self.numbers[:, slab.heads, None, None, None].unbind())

    def _penalty(self, base: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        if self.exponential:
            distance = base * factor
            return distance, distance
        inner = torch.addcmul(base.new_ones(()), base, factor)
        return inner, torch.log2(inner)

    def _pull(self, score: Tensor, inner: Tensor, exponent: Tensor) -> Tensor:
        """−∂/∂(k S) of the penalty's part in a logit, by its score."""
        return score * exponent if self.exponential else (score / inner).mul_(exponent)

    def _softmax(self, logits: Tensor, slab: Slab) -> Tensor:
        if slab.hidden is not None:
            logits[..., : slab.hidden.shape[-1]].add_(slab.hidden)
        bias = self._bias(slab)
        return torch.softmax(logits if bias is None else logits.add_(bias), -1)

    @property
    def unit(self) -> float:
        """What exponents of penalties are multiplied by."""
        return 1.0 if self.exponential else math.log(2.0)

    def _forward(self, slab: Slab) -> Saved:
        numbers = self._numbers(slab)
        tables = LagTables(numbers, slab, self.own_weights)
        query, key = self.query[slab.heads, :, slab.queries], self.key[slab.heads, :, slab.keys]
        gap = torch.baddbmm(
            query.new_ones(()), query.flatten(0, 1), key.flatten(0, 1).mT, alpha=-1.0
        )
        gap = gap.clamp_(min=0.0).view(*query.shape[:3], -1)
        magnitude = self.magnitude[slab.heads, :, None, slab.keys]
        kappa = tables.offset.expand_as(gap)
        if self.flags & MAGNITUDES:
            square = self.square[slab.heads, :, None, slab.keys]
            kappa = torch.addcmul(tables.offset, square, tables.slope, out=torch.empty_like(gap))
        log_kappa = (kappa * tables.ratio).log2_()
        inner, penalty = self._penalty(kappa, gap)
        logits = log_kappa * (numbers.temperature * math.log(2.0))
        logits.addcmul_(penalty, numbers.exponent * self.unit, value=-1.0)
        attention = self._softmax(logits, slab)
        kept, dropped = attention, None
        if self.generator is not None:
            dropped = torch.empty_like(attention)
            dropped.bernoulli_(1.0 - self.dropout, generator=self.generator)
            kept = attention * dropped.div_(1.0 - self.dropout)
        saved = Saved(tables, gap, kappa, log_kappa, inner, penalty, attention, kept, dropped)
        if not self.flags & RADIAL:
            return saved
        moved = torch.mul(magnitude, tables.decay, out=torch.empty_like(gap))
        projected = torch.addcmul(moved, moved, gap, value=-1.0)
        saved = saved._replace(moved=moved, projected=projected, radial=attention)
        if not self.own_weights:
            return saved
        off = projected - self.own[slab.heads, :, slab.queries, None]
        inner, penalty = self._penalty(off * off, tables.rho)
        exponent = numbers.radial_exponent * self.unit
        logits = torch.empty_like(gap)
        torch.addcmul(tables.log_rho, penalty, exponent, value=-1.0, out=logits)
        radial = self._softmax(logits, slab)
        return saved._replace(off=off, radial_inner=inner, radial_penalty=penalty, radial=radial)

    def forward(self) -> tuple[Tensor, Tensor]:
        direction, mean = torch.empty_like(self.query), torch.zeros_like(self.own)
        for slab in self.slabs():
            saved = self._forward(slab)
            value = self.value[slab.heads, :, slab.keys]
            direction[slab.heads, :, slab.queries] = saved.kept @ value
            if saved.radial is not None and saved.projected is not None:
                mean[slab.heads, :, slab.queries] = (saved.radial * saved.projected).sum(-1)
        return direction.transpose(0, 1).contiguous(), mean.transpose(0, 1).contiguous()

    def backward(
        self, direction_grad: Tensor, magnitude_grad: Tensor, direction: Tensor, mean: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the first six inputs, from those of the outputs, and the outputs."""
        row_mean = (direction_grad * direction).sum(-1)
        if self.flags & SHARED:
            row_mean = row_mean + magnitude_grad * mean
        upward = [t.transpose(0, 1) for t in (direction_grad, magnitude_grad, row_mean, mean)]
        inputs = (self.query, self.key, self.value, self.own, self.magnitude, self.numbers)
        grads = [torch.zeros_like(t) for t in inputs]
        for slab in self.slabs():
            self._backward(slab, grads, upward)
        query, key, value, own, magnitude, numbers = grads
        back = [query, key.flip(2), value.flip(2), own, magnitude.flip(2)]
        return (*(t.transpose(0, 1).contiguous() for t in back), numbers)

    def _backward(self, slab: Slab, grads: list[Tensor], upward: list[Tensor]) -> None:
        heads, queries, keys = slab.heads, slab.queries, slab.keys
        query_grad, key_grad, value_grad, own_grad, magnitude_grad = (
            t[heads, :, part]
            for t, part in zip(grads[:-1], (queries, keys, keys, queries, keys), strict=True)
        )
        direction, mean_grad, row_mean, mean = (t[heads, :, queries] for t in upward)
        mean_grad = mean_grad.unsqueeze(-1)
        saved, numbers = self._forward(slab), self._numbers(slab)
        tables, gap, kappa = saved.tables, saved.gap, saved.kappa

        score = direction @ self.value[heads, :, keys].mT
        value_grad += saved.kept.mT @ direction
        if saved.dropped is not None:
            score.mul_(saved.dropped)
        if saved.projected is not None and not self.own_weights:
            score.addcmul_(saved.projected, mean_grad)
        score.sub_(row_mean.unsqueeze(-1)).mul_(saved.attention)  # ∂/∂L
        pull = self._pull(score, saved.inner, numbers.exponent)
        cosine_grad = pull * kappa
        kappa_grad = (score / kappa).mul_(numbers.temperature).addcmul_(pull, gap, value=-1.0)
        square = self.square[heads, :, None, keys]
        magnitude = self.magnitude[heads, :, None, keys]
        if self.flags & MAGNITUDES:
            by_square = (kappa_grad * tables.slope).sum(2)
            magnitude_grad.addcmul_(by_square, magnitude.squeeze(2), value=2.0)
        else:
            square = torch.zeros_like(square)
        moved_grad, radial = None, None
        if saved.radial is not None:
            assert saved.projected is not None
            assert saved.moved is not None
            projected_grad = saved.radial * mean_grad
            if self.own_weights:
                assert saved.off is not None
                assert saved.radial_inner is not None
                assert saved.radial_penalty is not None
                radial_score = saved.projected.sub_(mean.unsqueeze(-1)).mul_(projected_grad)
                radial_pull = self._pull(radial_score, saved.radial_inner, numbers.radial_exponent)
                radial_pull.mul_(saved.off)
                rho_pull = radial_pull * saved.off  # −∂/∂rho
                off_grad = radial_pull.mul_(tables.rho).mul_(-2.0)
                own_grad.sub_(off_grad.sum(-1))
                projected_grad.add_(off_grad)
                radial = radial_score, rho_pull
            cosine_grad.addcmul_(projected_grad, saved.moved)
            # x = m_j E (1 − S)
            moved_grad = projected_grad.addcmul_(projected_grad, gap, value=-1.0)
            magnitude_grad += (moved_grad * tables.decay).sum(2)
            moved_grad.mul_(magnitude)
        exponents = [
            math.log(2.0) * dot(score, saved.log_kappa),
            -self.unit * dot(score, saved.penalty),
        ]
        if radial is not None and saved.radial_penalty is not None:
            exponents.append(-self.unit * dot(radial[0], saved.radial_penalty))
        found = tables.gradient(score, kappa_grad, square, moved_grad, radial)
        changes = torch.stack(found + exponents)
        grads[5][: len(changes), heads] += changes
        query_grad += cosine_grad @ self.key[heads, :, keys]
        key_grad += cosine_grad.mT @ self.query[heads, :, queries]
