"""Momentum carried by the minimum rotation between live requests, axial closure, and the certificate.

Pure functions over a stack of `b` parameters, each flattened to `n` entries: tensors are (b, n),
per-parameter scalars are (b, 1). Zero padding at the end of a row changes no result, because
everything here is an inner product or a linear combination.

Source: the RPT guide, "Transport remains the default update".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Frame", "axial_closure", "certificate", "live_frame", "rescale_to_rms", "transport"]


class Frame(NamedTuple):
    """The live request's frame, compared with the stored one.

    Attributes:
        direction: h, the unit request, (b, n); the stored frame where the request vanished.
        length: ‖P‖_F, (b, 1).
        coherence: q = ⟨h₋, h⟩ clipped to [-1, 1], (b, 1); 1 where there was nothing to compare.
        confidence: ρ = clip(q, 0, 1), (b, 1); 1 with no stored frame, 0 for a vanished request.
        compared: whether q compares two frames, bool (b, 1).
        live: whether the request is longer than `transport_eps`, bool (b, 1).
    """

    direction: Tensor
    length: Tensor
    coherence: Tensor
    confidence: Tensor
    compared: Tensor
    live: Tensor


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Row-wise inner product, (b, n), (b, n) -> (b, 1)."""
    return torch.linalg.vecdot(x, y).unsqueeze(-1)


def norm(x: Tensor) -> Tensor:
    """Row-wise Frobenius norm, (b, n) -> (b, 1)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def live_frame(request: Tensor, stored: Tensor, transport_eps: float) -> Frame:
    """Normalise the request and compare it with the stored frame (a zero row means: none stored)."""
    length = norm(request)
    live = length > transport_eps
    direction = request / length.clamp_min(transport_eps)
    stored = stored.to(request.dtype)
    # A stored frame has length one; only a row that never held one is zero.
    known = dot(stored, stored) > 0.5
    compared = live & known
    coherence = torch.where(compared, dot(stored, direction).clamp(-1.0, 1.0), 1.0)
    confidence = torch.where(live, coherence.clamp(0.0, 1.0), 0.0)
    kept = torch.where(live, direction, stored)
    return Frame(kept, length, coherence, confidence, compared, live)


def transport(momentum: Tensor, stored: Tensor, frame: Frame, transport_eps: float) -> Tensor:
    """Rotate the momentum into the live frame and fade what lies across it.

    T(m) = a h + z - ⟨z,h⟩/(1+q) (h₋ + h) with a = ⟨m,h₋⟩, z = m - a h₋, is the rotation in the plane
    of h₋ and h that takes h₋ to h. Its part across h is kept in proportion to ρ², its part along h to
    ρ, the unrotated momentum to 1 - ρ. At q = -1 the plane is undefined and nothing rotates.

    Args:
        momentum: m, (b, n).
        stored: h₋, (b, n), zero where there is none.
        frame: what `live_frame` returned for the live request.
        transport_eps: τ.

    Returns:
        The carried momentum, (b, n); rows without a comparison come back unchanged.
    """
    stored = stored.to(momentum.dtype)
    direction, coherence, confidence = frame.direction, frame.coherence, frame.confidence
    turns = frame.compared & (1.0 + coherence > transport_eps)
    along = dot(momentum, stored)
    across = momentum - along * stored
    tilt = dot(across, direction) / (1.0 + coherence).clamp_min(transport_eps)
    rotated = along * direction + across - tilt * (stored + direction)
    forward = dot(rotated, direction) * direction
    carried = (1.0 - confidence) * momentum + confidence * (
        forward + confidence * (rotated - forward)
    )
    return torch.where(turns, carried, momentum)


def axial_closure(
    momentum: Tensor, request: Tensor, frame: Frame, beta1: float, correction: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Nesterov look-ahead, with the lag along the live axis closed in proportion to ρ.

    u = β1 m̂ + (1-β1) P + ρ β1 (‖P‖ - ⟨m̂,h⟩) h, m̂ the bias-corrected momentum that already holds P.

    Args:
        momentum: m after this step's accumulation, (b, n).
        request: P, (b, n).
        frame: the live frame.
        beta1: momentum coefficient.
        correction: 1 - β1^t, a float or (b, 1).

    Returns:
        u, (b, n), and the closing length ρ β1 (‖P‖ - ⟨m̂,h⟩), (b, 1).
    """
    corrected = momentum / correction
    lag = frame.length - dot(corrected, frame.direction)
    closing = torch.where(frame.live, frame.confidence * beta1 * lag, 0.0)
    update = beta1 * corrected + (1.0 - beta1) * request + closing * frame.direction
    return update, closing


def certificate(update: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Remove what opposes the gradient: u - ⟨u,G⟩/‖G‖² G wherever ⟨u,G⟩ < 0.

    Inner products run in float64 on the gradient divided by its largest entry, so that neither the
    gradient's scale nor cancellation in float32 decides.

    Returns:
        the certified update, (b, n), and its cosine with the gradient, (b, 1), 1 where either is zero.
    """
    peak = gradient.abs().amax(dim=-1, keepdim=True)
    unit = (gradient / torch.where(peak > 0, peak, 1.0)).double()
    inner = dot(update.double(), unit)
    squared = dot(unit, unit)
    excess = torch.where(inner < 0, inner / squared.clamp_min(1.0), 0.0)
    certified = update - (excess * unit).to(update.dtype)
    lengths = norm(certified).double() * squared.sqrt()
    alignment = torch.where(lengths > 0, inner.clamp_min(0) / lengths, 1.0)
    return certified, alignment.to(update.dtype)


def rescale_to_rms(update: Tensor, rms: float, size: Tensor | int) -> Tensor:
    """Give every row the root mean square `rms` over its `size` true entries; a zero row stays zero.

    Args:
        update: u, (b, n).
        rms: the target, in units of the learning rate.
        size: number of entries behind each row without padding, an int or (b, 1).
    """
    # The peak is divided out first: squares of a tiny update would underflow in float32.
    peak = update.abs().amax(dim=-1, keepdim=True)
    shaped = update / torch.where(peak > 0, peak, 1.0)
    target = rms * torch.as_tensor(size, dtype=update.dtype, device=update.device).sqrt()
    length = norm(shaped)
    return shaped * (target / torch.where(length > 0, length, 1.0))
