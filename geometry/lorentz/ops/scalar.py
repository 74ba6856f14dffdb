"""Scalar functions that stay accurate, and differentiable, where the textbook forms do not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .point import host_readable, radius_limit

_LN2 = math.log(2.0)

_Scalar: TypeAlias = Callable[[Tensor], Tensor]


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def _with_slope(slope: Callable[[Tensor, Tensor], Tensor]) -> Callable[[_Scalar], _Scalar]:
    """Give a function of one tensor its derivative in closed form, `slope(x, value)`, which can be
    differentiated itself."""

    def wrap(function: _Scalar) -> _Scalar:
        class Closed(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return function(x)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
                ctx.save_for_backward(*inputs, output)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient * slope(*ctx.saved_tensors)

        @functools.wraps(function)
        def call(x: Tensor) -> Tensor:
            return Closed.apply(x)

        return call

    return wrap


class _LimitRadius(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, limit: float) -> Tensor:
        return a.clamp(max=limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def limit_radius(a: Tensor, limit: float | None = None) -> Tensor:
    """Radii, those beyond a limit (`radius_limit`) taken as the limit, with the derivative of the
    identity: such a point is computed with as if it were there, and can still be pulled back.
    """
    return _LimitRadius.apply(a, radius_limit(a.dtype) if limit is None else limit)


@_with_slope(lambda a, value: torch.tanh(a))
def log_cosh(a: Tensor) -> Tensor:
    """ln cosh a for a ≥ 0, without forming cosh a."""
    return a + torch.log1p(torch.exp(-2.0 * a)) - _LN2


def _log_sinh_slope(a: Tensor, value: Tensor) -> Tensor:
    positive = a > 0
    return torch.where(positive, 1.0 / torch.tanh(torch.where(positive, a, 1.0)), 0.0)


@_with_slope(_log_sinh_slope)
def log_sinh(a: Tensor) -> Tensor:
    """ln sinh a for a > 0 without forming sinh a; at a = 0 the value is −inf, the gradient 0."""
    safe = a.clamp(min=0.5)
    large = safe + torch.log1p(-torch.exp(-2.0 * safe)) - _LN2
    return torch.where(a < 1.0, torch.log(torch.sinh(a.clamp(0.0, 1.0))), large)


# e^ℓ/√(1 + e^2ℓ) = tanh arsinh e^ℓ, and 0 at ℓ = −∞.
@_with_slope(lambda log_value, value: torch.tanh(value))
def asinh_exp(log_value: Tensor) -> Tensor:
    """arsinh(e^ℓ): the rescaled radius whose ln sinh is ℓ. ℓ = −inf gives 0 with gradient 0."""
    large = log_value.clamp(min=0.0)
    large = large + torch.log1p(torch.sqrt(1.0 + torch.exp(-2.0 * large)))
    small = torch.asinh(torch.exp(log_value.clamp(max=0.0)))
    return torch.where(log_value > 0, large, small)


# torch's derivative squares the norm, which overflows.
@_with_slope(lambda norm, value: 1.0 / torch.hypot(norm, torch.ones_like(norm)))
def asinh_of_norm(norm: Tensor) -> Tensor:
    """arsinh of a norm, also where its square would overflow."""
    return torch.asinh(norm)


def _root_pieces(c: Tensor) -> tuple[Tensor, Tensor]:
    """sinh D and D for cosh D = 1 + c, c ≥ 0; the product c(c+2) itself could overflow."""
    sinh_d = torch.sqrt(c) * torch.sqrt(c + 2.0)
    return sinh_d, torch.log1p(c + sinh_d)


def arcosh1p(c: Tensor) -> Tensor:
    """D = arcosh(1 + c) for c ≥ 0; exactly 0 with gradient 0 at c = 0."""
    positive = c > 0
    return torch.where(positive, _root_pieces(torch.where(positive, c, 1.0))[1], 0.0)


# D/sinh D for cosh D = 1 + c: Σ (−1)^(n−1) 2^n c^(n−1) / (n C(2n, n)), n = 1, 2, …
_RATIO = tuple((-1.0) ** (n - 1) * 2.0**n / (n * math.comb(2 * n, n)) for n in range(1, 12))


def sinh_ratio(c: Tensor) -> Tensor:
    """D / sinh D for cosh D = 1 + c, c ≥ 0; smooth at 0, where it is 1."""
    small = c < 2e-2
    sinh_d, d = _root_pieces(torch.where(small, 1.0, c))
    return torch.where(small, _polynomial(torch.where(small, c, 0.0), _RATIO), d / sinh_d)


# 2D/sinh D is finite at c = 0; the derivative of D, then squared, is not.
@_with_slope(lambda c, value: 2.0 * sinh_ratio(c))
def squared_arcosh1p(c: Tensor) -> Tensor:
    """arcosh(1 + c)² for c ≥ 0; at c = 0 exactly 0, with gradient 2 (of c itself)."""
    return _root_pieces(c)[1].square()


_COSH = tuple(1.0 / math.factorial(2 * n) for n in range(9))
_SINHC = tuple(1.0 / math.factorial(2 * n + 1) for n in range(9))
_SINHC_SLOPE = tuple(n / math.factorial(2 * n + 1) for n in range(1, 9))


def cosh_of_root(z: Tensor) -> Tensor:
    """cosh √z for z ≥ 0, smooth at 0 to all orders."""
    small = z < 0.5
    root = torch.sqrt(torch.where(small, 1.0, z))
    return torch.where(small, _polynomial(torch.where(small, z, 0.0), _COSH), torch.cosh(root))


def _sinhc_slope(z: Tensor, sinhc: Tensor) -> Tensor:
    small = z < 0.5
    safe = torch.where(small, 1.0, z)
    series = _polynomial(torch.where(small, z, 0.0), _SINHC_SLOPE)
    return torch.where(small, series, (torch.cosh(torch.sqrt(safe)) - sinhc) / (2.0 * safe))


@_with_slope(_sinhc_slope)
def sinhc_of_root(z: Tensor) -> Tensor:
    """sinh(√z)/√z for z ≥ 0, smooth at 0 to all orders."""
    small = z < 0.5
    root = torch.sqrt(torch.where(small, 1.0, z))
    series = _polynomial(torch.where(small, z, 0.0), _SINHC)
    return torch.where(small, series, torch.sinh(root) / root)


class _HalfSquaredNorm(torch.autograd.Function):
    """One pass each way, where x·x takes two and three."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1)
        return 0.5 * norm * norm

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient.unsqueeze(-1) * x


def half_squared_norm(x: Tensor) -> Tensor:
    """½‖x‖² of vectors (…, n): shape (…)."""
    return _HalfSquaredNorm.apply(x)


class _NormAndDirection(torch.autograd.Function):
    """‖x‖ and x/‖x‖ with the closed-form backward, half the passes of the composed one. Norms that
    are given are far from zero and from overflow."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, at_zero: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        if norm is not None:
            return norm.clone(), x / norm.unsqueeze(-1)
        # Infinite components give inf/inf: leave them as they are, no vector before either.
        tiny = torch.finfo(x.dtype).tiny
        scale = x.abs().amax(-1, keepdim=True).clamp(min=tiny)
        # Ordinary vectors are not scaled: to the bit what they are in a batch without others.
        low, high = _ordinary_range(x.dtype)
        low = 0.5 * low / math.sqrt(max(1, x.shape[-1]))
        scale = torch.where((scale > low) & (scale < high), 1.0, scale)
        scaled = x / scale
        length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
        return (length * scale).squeeze(-1), scaled / length.clamp(min=tiny)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output, inputs[1])

    @staticmethod
    def backward(ctx: Any, by_norm: Tensor, by_direction: Tensor) -> tuple[Tensor, None, None]:
        norm, direction, at_zero = ctx.saved_tensors
        divisor = torch.where(norm > 0, norm, at_zero)
        along = (direction * by_direction).sum(-1)
        by_length = (by_norm - along / divisor).unsqueeze(-1)
        by_x = torch.addcmul(by_direction / divisor.unsqueeze(-1), direction, by_length)
        return by_x, None, None


def _ordinary_norm(x: Tensor) -> Tensor | None:
    """Norms (…) of vectors none of which needs care, else None."""
    if not host_readable(x) or not x.numel():
        return None
    norm = torch.linalg.vector_norm(x.detach(), dim=-1)
    smallest, largest = torch.aminmax(norm)
    low, high = _ordinary_range(x.dtype)
    return norm if bool((smallest > low) & (largest < high)) else None


def _ordinary_range(dtype: torch.dtype) -> tuple[float, float]:
    """Norms between these lose nothing that counts when components are squared."""
    low = 1e8 * math.sqrt(torch.finfo(dtype).tiny)
    return low, 1.0 / low


def log_of_norm(norm: Tensor) -> Tensor:
    """ln of a norm (…); for 0 a large negative number with gradient 0."""
    return torch.log(norm.clamp(min=torch.finfo(norm.dtype).tiny))


def norm_and_direction(x: Tensor, at_zero: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Split vectors (…, n) into norms (…) and unit directions (…, n).

    The zero vector has norm 0 (gradient 0) and direction 0, whose gradient is 1/`at_zero` (a number
    or (…), 1 by default: the convention at the origin). No component overflows or vanishes squared.
    """
    if not isinstance(at_zero, Tensor):
        at_zero = torch.full((), at_zero, dtype=x.dtype, device=x.device)
    return _NormAndDirection.apply(x, at_zero, _ordinary_norm(x))
