"""The same operations in ambient coordinates: the baseline, with its failures.

Points are (…, 1 + n) tensors, time first; formulas as in the literature, with the customary clamps.
In float32 they lose all accuracy at radius 8 (Proposition 1). For comparison only.

The clamps hide it: where rounding has made −⟨x, y⟩/k less than 1, or ⟨Σwx, Σwx⟩ positive, a clamped
formula gives a wrong finite number and the textbook's gives NaN. `eps=None` and `guarded=False` are
the textbook's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "ambient_attention",
    "ambient_centroid",
    "ambient_decay",
    "ambient_distance",
    "ambient_exp_map",
    "ambient_exp_map_origin",
    "ambient_gyro_add",
    "ambient_gyro_scale",
    "ambient_horospherical_shift",
    "ambient_linear",
    "ambient_log_map",
    "ambient_log_map_origin",
    "ambient_parallel_transport",
    "ambient_squared_distance",
    "ambient_time_boost",
    "lorentz_inner",
    "with_time",
]


def lorentz_inner(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩ = −x₀y₀ + x·y of shape (…)."""
    return (x[..., 1:] * y[..., 1:]).sum(-1) - x[..., 0] * y[..., 0]


def _root(k: float | Tensor) -> float | Tensor:
    return k.sqrt() if isinstance(k, Tensor) else math.sqrt(k)


def with_time(space: Tensor, k: float | Tensor = 1.0) -> Tensor:
    """Prepend the time coordinate √(k + ‖x‖²)."""
    return torch.cat([(k + space.square().sum(-1, keepdim=True)).sqrt(), space], -1)


def _arcosh(value: Tensor, eps: float | None) -> Tensor:
    return torch.acosh(value if eps is None else value.clamp(min=1.0 + eps))


def ambient_distance(
    x: Tensor, y: Tensor, *, k: float | Tensor = 1.0, eps: float | None = 0.0
) -> Tensor:
    """√k arcosh(−⟨x, y⟩/k) (Eq. 1), the argument clamped to 1 + eps, or for None not at all."""
    return _root(k) * _arcosh(-lorentz_inner(x, y) / k, eps)


def ambient_squared_distance(
    x: Tensor, y: Tensor, *, k: float | Tensor = 1.0, eps: float | None = 0.0
) -> Tensor:
    """The square of `ambient_distance`."""
    return ambient_distance(x, y, k=k, eps=eps).square()


def ambient_centroid(
    points: Tensor, weights: Tensor, *, k: float | Tensor = 1.0, guarded: bool = True
) -> Tensor:
    """√k Σwx/‖Σwx‖ (Eq. 4): points (…, N, 1 + n), weights (…, N) or (…, M, N)."""
    if weights.dim() == points.dim():
        total = weights @ points
    else:
        total = (weights.unsqueeze(-1) * points).sum(-2)
    inner = lorentz_inner(total, total)
    norm = (inner.abs().clamp(min=1e-8) if guarded else -inner).sqrt()
    return _root(k) * total / norm.unsqueeze(-1)


def ambient_exp_map(x: Tensor, xi: Tensor, *, k: float | Tensor = 1.0) -> Tensor:
    """cosh(ω) x + sinhc(ω) ξ, ω = ‖ξ‖/√k."""
    omega = (lorentz_inner(xi, xi).clamp(min=1e-15) / k).sqrt().unsqueeze(-1)
    return torch.cosh(omega) * x + torch.sinh(omega) / omega * xi


def ambient_log_map(x: Tensor, y: Tensor, *, k: float | Tensor = 1.0) -> Tensor:
    """D/sinh D (y + ⟨x, y⟩/k x)."""
    gamma = (-lorentz_inner(x, y) / k).clamp(min=1.0 + 1e-7).unsqueeze(-1)
    d = torch.acosh(gamma)
    return d / torch.sinh(d) * (y - gamma * x)


def ambient_parallel_transport(
    x: Tensor, y: Tensor, xi: Tensor, *, k: float | Tensor = 1.0
) -> Tensor:
    """ξ + ⟨y, ξ⟩(x + y)/(k − ⟨x, y⟩)."""
    factor = lorentz_inner(y, xi) / (k - lorentz_inner(x, y))
    return xi + factor.unsqueeze(-1) * (x + y)


def ambient_gyro_add(x: Tensor, y: Tensor, *, k: float | Tensor = 1.0) -> Tensor:
    """x ⊕ y by Eq. 20."""
    root = _root(k)
    dot = (x[..., 1:] * y[..., 1:]).sum(-1, keepdim=True)
    factor = dot / (root * (x[..., :1] + root)) + y[..., :1] / root
    return with_time(y[..., 1:] + factor * x[..., 1:], k)


def ambient_decay(x: Tensor, amount: float, *, k: float | Tensor = 1.0) -> Tensor:
    """Manifold weight decay: the centroid of x and the origin with weights (1 − w, w)."""
    origin = torch.zeros_like(x)
    origin[..., 0] = _root(k)
    pair = torch.stack([x, origin], -2)
    weights = torch.tensor([1.0 - amount, amount], dtype=x.dtype, device=x.device)
    return ambient_centroid(pair, weights.expand(x.shape[:-1] + (2,)), k=k)


def ambient_linear(x: Tensor, weight: Tensor, *, k: float | Tensor = 1.0) -> Tensor:
    """The Lorentz layer in its general form: space coordinates W x, time recomputed."""
    return with_time(x @ weight.mT, k)


def ambient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gain: float | Tensor,
    *,
    k: float | Tensor = 1.0,
    guarded: bool = True,
) -> Tensor:
    """softmax(−gain · arcosh²(−⟨q, κ⟩/k)) and the centroid: (…, N, 1 + n) tensors."""
    flipped = torch.cat([-key[..., :1], key[..., 1:]], -1)
    inner = query @ flipped.mT
    scores = -gain * _arcosh(-inner / k, 1e-6 if guarded else None).square()
    return ambient_centroid(value, torch.softmax(scores, -1), k=k, guarded=guarded)


def ambient_exp_map_origin(v: Tensor, k: float | Tensor = 1.0) -> Tensor:
    """exp at the origin of tangent vectors (…, n)."""
    root = _root(k)
    norm = v.norm(dim=-1, keepdim=True).clamp(min=1e-15) / root
    return torch.cat([root * torch.cosh(norm), torch.sinh(norm) / norm * v], -1)


def ambient_log_map_origin(x: Tensor, k: float | Tensor = 1.0) -> Tensor:
    """The tangent vectors (…, n) at the origin that lead to x."""
    space = x[..., 1:]
    norm = space.norm(dim=-1, keepdim=True).clamp(min=1e-15)
    return _root(k) * torch.asinh(norm / _root(k)) / norm * space


def ambient_gyro_scale(factor: float | Tensor, x: Tensor, *, k: float | Tensor = 1.0) -> Tensor:
    """t ⊗ x: the point at t times the distance, t a number or (…)."""
    if isinstance(factor, Tensor) and factor.dim() > 0:
        factor = factor.unsqueeze(-1)
    return ambient_exp_map_origin(factor * ambient_log_map_origin(x, k), k)


def _axis_vectors(x: Tensor, *axes: int) -> Tensor:
    vector = torch.zeros(x.shape[-1], dtype=x.dtype, device=x.device)
    vector[list(axes)] = 1.0
    return vector


def ambient_horospherical_shift(x: Tensor, t: Tensor, axis: int, shift_axis: int) -> Tensor:
    """Eq. 10 as it stands, by t (…)."""
    nu = x[..., 0] - x[..., 1 + axis]
    rise = t * x[..., 1 + shift_axis] + 0.5 * t * t * nu
    x = x + rise.unsqueeze(-1) * _axis_vectors(x, 0, 1 + axis)
    return x + (t * nu).unsqueeze(-1) * _axis_vectors(x, 1 + shift_axis)


def ambient_time_boost(x: Tensor, rapidity: Tensor, axis: int) -> Tensor:
    """Boost by a rapidity (…) along one space axis."""
    rise, sinh = torch.cosh(rapidity) - 1.0, torch.sinh(rapidity)
    time, space = x[..., 0], x[..., 1 + axis]
    x = x + (rise * time + sinh * space).unsqueeze(-1) * _axis_vectors(x, 0)
    return x + (sinh * time + rise * space).unsqueeze(-1) * _axis_vectors(x, 1 + axis)
