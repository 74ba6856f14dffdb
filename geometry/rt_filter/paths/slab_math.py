"""Forward and backward arithmetic of the closed-form path, one slab at a time.

A slab is a group of heads times a slice of queries against all keys it can see, in scratch buffers
of a fixed size. `slabs.py` says what is computed; here is how, in place, and the chain rule for it.

Logarithms are most of the time. They are taken to base 2, which is the cheapest to compute, and the
exponents that multiply them hold the factor ln 2.

Source: RT-Filter paper, Algorithm 1 steps 3–6.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..visibility import slice_ends
from .slab_tables import MASKED, GridTables, LagValues, Scratch, Slab, TimeTables

__all__ = ["Gradients", "Upward", "Work", "backward_slab", "forward_slab"]

SLAB_ELEMENTS = 2**17
MAX_SLICE = 64

EXPONENTIAL, RADIAL, SHARED = 1, 2, 4
TEMPERATURE, EXPONENT, RADIAL_EXPONENT = range(3)


class Sources(NamedTuple):
    """Inputs of the operator, as `slabs.py` describes them."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_magnitude: Tensor
    key_magnitude: Tensor
    tables: Tensor
    constants: Tensor
    bias: Tensor | None
    query_times: Tensor | None
    key_times: Tensor | None
    seed: Tensor
    flags: int
    ahead: int
    dropout: float


def _slabs(heads: int, batch: int, queries: int, keys: int, source: Sources) -> list[Slab]:
    """Cut the work, leaving out keys that no query of a slice can see."""
    length = max(8, min(MAX_SLICE, queries, SLAB_ELEMENTS // max(1, batch * keys)))
    group = max(1, min(heads, SLAB_ELEMENTS // max(1, batch * keys * length)))
    timed = source.query_times is not None
    ends, whole = slice_ends(
        (queries, keys, length),
        source.ahead >= 0,
        None if timed else source.ahead,
        source.query_times,
        source.key_times,
    )
    return [
        Slab(
            slice(head, min(head + group, heads)),
            slice(start, min(start + length, queries)),
            max(1, end),
            queries - min(start + length, queries),
            all_see,
        )
        for start, end, all_see in zip(range(0, queries, length), ends, whole, strict=True)
        for head in range(0, heads, group)
    ]


class Work:
    """Head-major, query-reversed views of the inputs, and scratch memory for one slab."""

    def __init__(self, source: Sources) -> None:
        self.query = source.query.transpose(0, 1).flip(2).contiguous()
        self.key = source.key.transpose(0, 1).contiguous()
        self.value = source.value.transpose(0, 1).contiguous()
        self.own = source.query_magnitude.transpose(0, 1).flip(2).contiguous()
        self.magnitude = source.key_magnitude.transpose(0, 1).contiguous()
        self.square = self.magnitude * self.magnitude
        self.constants = source.constants
        self.per_octave = source.constants * math.log(2.0)
        self.bias = source.bias
        self.exponential = bool(source.flags & EXPONENTIAL)
        self.radial = bool(source.flags & RADIAL)
        self.shared = bool(source.flags & SHARED)
        heads, batch, queries, _ = self.query.shape
        self.slabs = _slabs(heads, batch, queries, source.key.shape[2], source)
        size = max(
            ((s.heads.stop - s.heads.start) * (s.queries.stop - s.queries.start) * s.keys)
            for s in self.slabs
        )
        self.scratch = Scratch(self.query, size * batch)
        self.tables: GridTables | TimeTables = GridTables(source.tables)
        if source.query_times is not None and source.key_times is not None:
            self.tables = TimeTables(
                source.tables,
                source.query_times.flip(1),
                source.key_times,
                source.ahead >= 0,
                self.radial and not self.shared,
                source.constants[TEMPERATURE],
                self.scratch,
            )
        self.dropout = source.dropout
        self.generator = None
        if self.dropout:
            self.generator = torch.Generator(device=self.query.device)
            # The seed is drawn on the host; reading it syncs no device.
            self.generator.manual_seed(int(source.seed))

    def rows(self, slab: Slab, reversed_tensor: Tensor) -> Tensor:
        total = reversed_tensor.shape[2]
        return reversed_tensor[
            slab.heads, :, total - slab.queries.stop : total - slab.queries.start
        ]

    def constant(self, which: int, slab: Slab) -> Tensor:
        return self.constants[which, slab.heads].reshape(-1, 1, 1, 1)

    def octave(self, which: int, slab: Slab) -> Tensor:
        """The same constant, to multiply logarithms to base 2."""
        return self.per_octave[which, slab.heads].reshape(-1, 1, 1, 1)

    def bias_slice(self, slab: Slab) -> Tensor | None:
        """The additive mask, (group or 1, batch or 1, slice or 1, keys)."""
        if self.bias is None:
            return None
        part = self.bias if self.bias.shape[1] == 1 else self.bias[:, slab.heads]
        if part.shape[2] > 1:
            part = part[:, :, slab.queries].flip(2)
        return part[..., : slab.keys].transpose(0, 1)


class Intermediates(NamedTuple):
    """What the backward pass reuses from a slab; (group, batch, slice, keys) each.

    penalty is what the exponent c multiplies: log₂(1 + k S) (times ln 2), or k S with exponential
    weights; so is radial_penalty. log_kappa is log₂ k, of k·ratio at given times.
    """

    lags: LagValues
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


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Σ left·right per head of a group, (group,)."""
    group = left.shape[0]
    return torch.bmm(left.reshape(group, 1, -1), right.reshape(group, -1, 1)).flatten()


def forward_slab(work: Work, slab: Slab) -> Intermediates:
    query, key = work.rows(slab, work.query), work.key[slab.heads, :, : slab.keys]
    shape = (*query.shape[:3], slab.keys)
    one, lags = query.new_ones(()), work.tables.open(slab)
    gap, kappa, log_kappa, inner, penalty, attention, logits = (
        work.scratch(name, shape)
        for name in ("gap", "kappa", "log_kappa", "inner", "penalty", "attention", "logits")
    )
    torch.baddbmm(
        one.expand(shape).flatten(0, 1),
        query.flatten(0, 1),
        key.flatten(0, 1).transpose(1, 2),
        alpha=-1.0,
        out=gap.flatten(0, 1),
    )
    gap.clamp_(min=0.0)
    square = work.square[slab.heads, :, None, : slab.keys]
    torch.addcmul(lags.offset, square, lags.slope, out=kappa)
    if lags.ratio is not None:
        torch.mul(kappa, lags.ratio, out=log_kappa).log2_()
        torch.mul(log_kappa, work.octave(TEMPERATURE, slab), out=logits)
        if lags.hidden is not None:
            logits[..., slab.whole :].masked_fill_(lags.hidden, MASKED)
    else:
        assert lags.log_ratio is not None
        torch.log2(kappa, out=log_kappa)
        torch.addcmul(lags.log_ratio, log_kappa, work.octave(TEMPERATURE, slab), out=logits)
    if work.exponential:
        penalty = inner = torch.mul(kappa, gap, out=inner)
        logits.addcmul_(penalty, work.constant(EXPONENT, slab), value=-1.0)
    else:
        torch.addcmul(one, kappa, gap, out=inner)
        torch.log2(inner, out=penalty)
        logits.addcmul_(penalty, work.octave(EXPONENT, slab), value=-1.0)
    bias = work.bias_slice(slab)
    if bias is not None:
        logits.add_(bias)
    torch.softmax(logits, -1, out=attention)
    kept, dropped = attention, None
    if work.generator is not None:
        dropped = work.scratch("dropped", shape)
        dropped.bernoulli_(1.0 - work.dropout, generator=work.generator)
        dropped.div_(1.0 - work.dropout)
        kept = torch.mul(attention, dropped, out=work.scratch("kept", shape))
    result = Intermediates(lags, gap, kappa, log_kappa, inner, penalty, attention, kept, dropped)
    if not work.radial:
        return result
    moved, projected = work.scratch("moved", shape), work.scratch("projected", shape)
    magnitude = work.magnitude[slab.heads, :, None, : slab.keys]
    torch.mul(magnitude, lags.decay, out=moved)
    torch.addcmul(moved, moved, gap, value=-1.0, out=projected)
    result = result._replace(moved=moved, projected=projected, radial=attention)
    if work.shared:
        return result
    off, squared, radial_inner, radial = (
        work.scratch(name, shape) for name in ("off", "squared", "radial_inner", "radial")
    )
    torch.sub(projected, work.rows(slab, work.own).unsqueeze(-1), out=off)
    torch.mul(off, off, out=squared)
    if work.exponential:
        radial_penalty = torch.mul(squared, lags.rho, out=radial_inner)
        torch.sub(lags.log_rho, radial_penalty, out=logits)
    else:
        torch.addcmul(one, squared, lags.rho, out=radial_inner)
        radial_penalty = torch.log2(radial_inner, out=squared)
        torch.addcmul(
            lags.log_rho,
            radial_penalty,
            work.octave(RADIAL_EXPONENT, slab),
            value=-1.0,
            out=logits,
        )
    if bias is not None:
        logits.add_(bias)
    torch.softmax(logits, -1, out=radial)
    return result._replace(
        off=off, radial_inner=radial_inner, radial_penalty=radial_penalty, radial=radial
    )


class Gradients:
    """Accumulators of the backward pass, head-major like `Work`'s views.

    Those of keys and values lie features first, (heads, batch, features, keys): the products that
    they add up are a third faster that way round.
    """

    def __init__(self, work: Work) -> None:
        self.query = torch.zeros_like(work.query)
        self.key = torch.zeros_like(work.key.mT, memory_format=torch.contiguous_format)
        self.value = torch.zeros_like(work.value.mT, memory_format=torch.contiguous_format)
        self.own = torch.zeros_like(work.own)
        self.magnitude = torch.zeros_like(work.magnitude)
        self.constants = torch.zeros_like(work.constants)


class Upward(NamedTuple):
    """Gradients that arrive, and the row means the softmax rule subtracts; query-reversed."""

    direction: Tensor
    magnitude: Tensor
    row_mean: Tensor
    radial_mean: Tensor


def backward_slab(work: Work, slab: Slab, grads: Gradients, upward: Upward) -> None:
    saved = forward_slab(work, slab)
    heads, keys, shape = slab.heads, slab.keys, saved.gap.shape
    direction = work.rows(slab, upward.direction)
    magnitude = work.rows(slab, upward.magnitude).unsqueeze(-1)
    temperature, exponent = work.constant(TEMPERATURE, slab), work.constant(EXPONENT, slab)

    score = work.scratch("logits", shape)
    value = work.value[heads, :, :keys].flatten(0, 1)
    torch.bmm(direction.flatten(0, 1), value.mT, out=score.flatten(0, 1))
    grads.value[heads, ..., :keys] += direction.mT @ saved.kept
    if saved.dropped is not None:
        score.mul_(saved.dropped)
    if work.radial and work.shared:
        assert saved.projected is not None
        score.addcmul_(saved.projected, magnitude)
    score.sub_(work.rows(slab, upward.row_mean).unsqueeze(-1))
    score.mul_(saved.attention)  # ∂/∂L
    octave = math.log(2.0)
    grads.constants[TEMPERATURE, heads] += octave * _dot(score, saved.log_kappa)
    unit = 1.0 if work.exponential else octave
    grads.constants[EXPONENT, heads] -= unit * _dot(score, saved.penalty)

    # c ∂/∂L ∂(penalty)/∂(k S), and from it ∂/∂k and ∂/∂cos.
    kappa_grad, cosine_grad = work.scratch("log_kappa", shape), work.scratch("cosine_grad", shape)
    if work.exponential:
        pull = torch.mul(score, exponent, out=saved.inner)
        torch.div(score, saved.kappa, out=kappa_grad)
        kappa_grad.mul_(temperature).addcmul_(pull, saved.gap, value=-1.0)
    else:
        # k ∂/∂k = β score − c k S/(1 + k S) score = (β − c) score + pull
        pull = torch.div(score, saved.inner, out=saved.inner).mul_(exponent)
        torch.addcmul(pull, score, temperature - exponent, out=kappa_grad)
        kappa_grad.div_(saved.kappa)
    torch.mul(pull, saved.kappa, out=cosine_grad)
    product = torch.mul(kappa_grad, work.square[heads, :, None, :keys], out=pull)
    work.tables.add_precision(slab, score, kappa_grad, product, saved.kappa)
    torch.mul(kappa_grad, saved.lags.slope, out=product)
    grads.magnitude[heads, :, :keys].addcmul_(
        product.sum(2), work.magnitude[heads, :, :keys], value=2.0
    )
    decay_grad = None
    if work.radial:
        decay_grad = _backward_radial(work, slab, grads, upward, saved, cosine_grad)
    work.tables.add_decay(slab, decay_grad)
    work.rows(slab, grads.query).copy_(cosine_grad @ work.key[heads, :, :keys])
    grads.key[heads, ..., :keys] += work.rows(slab, work.query).mT @ cosine_grad


def _backward_radial(
    work: Work,
    slab: Slab,
    grads: Gradients,
    upward: Upward,
    saved: Intermediates,
    cosine_grad: Tensor,
) -> Tensor:
    """Adds to the gradients; returns that of the decay E."""
    heads, keys, shape = slab.heads, slab.keys, saved.gap.shape
    magnitude = work.rows(slab, upward.magnitude).unsqueeze(-1)
    assert saved.projected is not None
    assert saved.moved is not None
    assert saved.radial is not None
    if work.shared:
        projected_grad = torch.mul(saved.radial, magnitude, out=work.scratch("off", shape))
    else:
        assert saved.off is not None
        assert saved.radial_inner is not None
        assert saved.radial_penalty is not None
        projected_grad = torch.mul(saved.radial, magnitude, out=saved.radial)
        score = saved.projected.sub_(work.rows(slab, upward.radial_mean).unsqueeze(-1))
        score.mul_(projected_grad)  # ∂/∂L_R
        radial_score = score
        if work.exponential:
            pull = work.scratch("radial pull", shape).copy_(score)
        else:
            change = _dot(score, saved.radial_penalty)
            grads.constants[RADIAL_EXPONENT, heads] -= math.log(2.0) * change
            pull = torch.div(score, saved.radial_inner, out=saved.radial_inner)
            pull.mul_(work.constant(RADIAL_EXPONENT, slab))
        pull.mul_(saved.off)
        product = torch.mul(pull, saved.off, out=saved.off).neg_()
        off_grad = pull.mul_(saved.lags.rho).mul_(-2.0)
        work.tables.add_radial(slab, radial_score, product)
        work.rows(slab, grads.own).copy_(-off_grad.sum(-1))
        projected_grad.add_(off_grad)
    cosine_grad.addcmul_(projected_grad, saved.moved)
    # x = m_j E cos
    moved_grad = projected_grad.addcmul_(projected_grad, saved.gap, value=-1.0)
    product = torch.mul(moved_grad, saved.lags.decay, out=saved.moved)
    grads.magnitude[heads, :, :keys] += product.sum(2)
    return moved_grad.mul_(work.magnitude[heads, :, None, :keys])
