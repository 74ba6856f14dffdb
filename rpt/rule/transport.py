"""Momentum carried by the minimum rotation between live requests, axial closure, and the certificate.

Pure functions over a stack of `b` parameters, each flattened to `n` entries: tensors are (b, n),
per-parameter scalars are (b, 1), arrays or tensors as `numbers` says (`rpt.rule.scalars`). Zero padding
at the end of a row changes no result, because everything here is an inner product or a linear combination.

Source: the RPT guide, "Transport remains the default update".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .scalars import Numbers, Scalars

# The share of an update below which what the certificate leaves of it is rounding.
_ROUNDING = 1e-5


class Frame(NamedTuple):
    """The live request's frame compared with the stored one; every field is (b, 1).

    Attributes:
        length: n = ‖P‖_F.
        inverse: 1/n, 0 for a request that vanished.
        coherence: q = ⟨h₋, h⟩ clipped to [-1, 1]; 1 where there was nothing to compare.
        confidence: ρ = clip(q, 0, 1); 1 with no stored frame, 0 for a request that vanished.
        compared: whether q compares two frames, bool.
        live: whether n > `transport_eps`, bool.
    """

    length: Scalars
    inverse: Scalars
    coherence: Scalars
    confidence: Scalars
    compared: Scalars
    live: Scalars


class Carried(NamedTuple):
    """Momentum and update after one step.

    Attributes:
        momentum: m, (b, n).
        update: u, (b, n).
        closing: length ρ β1 (‖P‖ - ⟨m̂,h⟩) of the axial closure, (b, 1).
    """

    momentum: Tensor
    update: Tensor
    closing: Scalars


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Row-wise inner product, (b, n), (b, n) -> (b, 1)."""
    # Two to three times faster on CPUs than a batched matrix product of single rows.
    return torch.mul(x, y).sum(-1, keepdim=True)


def norm(x: Tensor) -> Tensor:
    """Row-wise Frobenius norm, (b, n) -> (b, 1)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def live_frame(
    request: Tensor, stored: Tensor, held: Scalars, transport_eps: float, numbers: Numbers
) -> Frame:
    """Compare the request's direction with the stored frame.

    Args:
        request: P, (b, n).
        stored: h₋, (b, n).
        held: whether a frame is stored, bool (b, 1).
        transport_eps: τ.
    """
    length = numbers.read(norm(request))
    live = length > transport_eps
    inverse = live / numbers.where(live, length, 1.0)
    compared = live & held
    cosine = numbers.read(dot(stored, request)) * inverse
    cosine = numbers.at_most(numbers.at_least(cosine, -1.0), 1.0)
    coherence = numbers.where(compared, cosine, 1.0)
    confidence = numbers.at_least(coherence, 0.0) * live
    return Frame(length, inverse, coherence, confidence, compared, live)


def store_frame(stored: Tensor, request: Tensor, frame: Frame, numbers: Numbers) -> None:
    """h₋ <- P/‖P‖ in place; the stored frame stays where the request vanished."""
    inverse = numbers.tensor(frame.inverse)
    # Read where it costs nothing: a copy of the large tensor is saved.
    if numbers.on_host and frame.live.all():
        torch.mul(request, inverse, out=stored)
    else:
        stored.mul_(numbers.tensor(~frame.live)).addcmul_(request, inverse)


def rotation(
    along_old: Scalars, along_new: Scalars, frame: Frame, transport_eps: float, numbers: Numbers
) -> tuple[Scalars, Scalars, Scalars]:
    """Carry the momentum into the live frame: coefficients on (m, h₋, h), each (b, 1).

    The minimum rotation that takes h₋ to h is, with a = ⟨m,h₋⟩ and z = m - a h₋,
    T(m) = a h + z - c (h₋ + h), c = ⟨z,h⟩/(1+q): a combination of m, h₋ and h. Its part along h is
    kept in proportion to ρ, its part across h to ρ², the unrotated momentum to 1 - ρ:

        m <- (1-ρ) m + ρ (⟨T(m),h⟩ h + ρ (T(m) - ⟨T(m),h⟩ h))

    At q = -1 the plane of rotation is undefined and nothing rotates; nor does it without a comparison.

    Args:
        along_old: ⟨m,h₋⟩, (b, 1).
        along_new: ⟨m,h⟩, (b, 1).
        frame: what `live_frame` returned.
        transport_eps: τ.
    """
    q, rho = frame.coherence, frame.confidence
    opening = 1.0 + q
    turns = frame.compared & (opening > transport_eps)
    tilt = (along_new - along_old * q) / numbers.at_least(opening, transport_eps)
    on_old = -(along_old + tilt)
    on_new = along_old - tilt
    forward = along_new + on_old * q + on_new
    # All three are zero corrections to (1, 0, 0) where nothing turns.
    rho = rho * turns
    squared = rho * rho
    return (
        1.0 - rho + squared,
        squared * on_old,
        (rho - squared) * forward + squared * on_new,
    )


def carry(
    momentum: Tensor,
    stored: Tensor,
    request: Tensor,
    frame: Frame,
    *,
    beta1: float,
    correction: Scalars,
    transport_eps: float,
    numbers: Numbers,
    transport: bool = True,
    closure: bool = True,
) -> Carried:
    """Transport, accumulate, look ahead and close the axial lag.

        m <- β1 T + (1-β1) P                      T the carried momentum of `rotation`
        u  = β1 m̂ + (1-β1) P + ρ β1 (‖P‖ - ⟨m̂,h⟩) h

    Everything lies in the span of m, h₋ and P, so that only coefficients are computed here and each
    large tensor is written once.

    Args:
        momentum: m, (b, n), changed in place.
        stored: h₋, (b, n), zero where there is none.
        request: P, (b, n).
        frame: what `live_frame` returned.
        beta1: momentum coefficient.
        correction: 1 - β1^t, (b, 1).
        transport_eps: τ.
        transport: False leaves the momentum where it was.
        closure: False leaves plain bias-corrected momentum, u = m̂.
    """
    tensor = numbers.tensor
    along = numbers.read(dot(momentum, request)) * frame.inverse
    if transport:
        behind = numbers.read(dot(momentum, stored))
        on_m, on_old, on_new = rotation(behind, along, frame, transport_eps, numbers)
        on_m, on_old, on_new = beta1 * on_m, beta1 * on_old, beta1 * on_new
        # ⟨m,h⟩ of the carried momentum follows from the coefficients: no large tensor is read again.
        along = on_m * along + on_old * frame.coherence + on_new
        momentum.mul_(tensor(on_m)).addcmul_(stored, tensor(on_old))
        momentum.addcmul_(request, tensor(on_new * frame.inverse + (1.0 - beta1)))
    else:
        along = beta1 * along
        momentum.lerp_(request, 1.0 - beta1)
    along = along + (1.0 - beta1) * frame.length
    if not closure:
        return Carried(momentum, momentum / tensor(correction), frame.confidence * 0.0)
    closing = frame.confidence * beta1 * (frame.length - along / correction)
    update = momentum * tensor(beta1 / correction)
    update.addcmul_(request, tensor(closing * frame.inverse + (1.0 - beta1)))
    return Carried(momentum, update, closing)


def certificate(
    update: Tensor,
    gradient: Tensor,
    numbers: Numbers,
    lengths: tuple[Scalars, Scalars | None] | None = None,
) -> tuple[Tensor, Scalars, Scalars]:
    """Remove what opposes the gradient: u - ⟨u,G⟩/‖G‖² G wherever ⟨u,G⟩ < 0; 0 if only rounding is left.

    Inner products run in float64 on the gradient divided by its largest entry, so that neither its
    scale nor cancellation in float32 decides.

    Args:
        update: u, (b, n).
        gradient: G, (b, n).
        numbers: how the numbers are kept; on the host they decide what is computed.
        lengths: ‖u‖ and ‖G‖ where they are known, (b, 1); the second may still be None.

    Returns:
        the certified update, (b, n), its length, (b, 1), and its cosine with the gradient, (b, 1), 1
        where either is zero.
    """
    length, steepness = lengths or (numbers.read(norm(update)), None)
    if not numbers.on_host or update.dtype != torch.float32:
        certified, size, cosine = _remove_opposing(update, gradient, numbers.tensor(length))
        return certified, numbers.read(size), numbers.read(cosine)
    # A cosine this far above zero has the same sign in float64. Reading it costs nothing on a CPU.
    # Lengths too small for a product in float32 give a cosine too small to pass.
    steepness = numbers.read(norm(gradient)) if steepness is None else steepness
    cosine = numbers.read(dot(update, gradient)) / numbers.at_least(length * steepness, 1e-30)
    doubtful = ~(cosine > 1e-3)[:, 0]
    if doubtful.any():
        rows = torch.from_numpy(doubtful.nonzero()[0])
        known = numbers.tensor(length[doubtful])
        part, left, alignment = _remove_opposing(update[rows], gradient[rows], known)
        update = update.index_copy(0, rows, part)
        length[doubtful], cosine[doubtful] = left.numpy(), alignment.numpy()
    return update, length, cosine


def _remove_opposing(
    update: Tensor, gradient: Tensor, size: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The certificate of every row, in float64: what is left of it, its length and its cosine.

    `size` is ‖u‖, (b, 1).
    """
    peak = gradient.abs().amax(dim=-1, keepdim=True).double()
    wide = gradient.double() / torch.where(peak > 0, peak, 1.0)
    whole = update.double()
    inner, squared = dot(whole, wide), norm(wide).square()
    excess = torch.where(inner < 0, inner / squared.clamp_min(1.0), 0.0)
    certified = torch.addcmul(whole, excess, wide, value=-1.0).to(update.dtype)
    # Of an update that lay against the gradient nothing is left but rounding: no direction to follow.
    length = norm(certified)
    kept = length > _ROUNDING * size
    certified, length = certified.mul_(kept), length * kept
    lengths = length.double() * squared.sqrt()
    cosine = torch.where(lengths > 0, inner.clamp_min(0) / lengths, 1.0).to(update.dtype)
    return certified, length, cosine
