"""Transport in time: rotation of directions, decay of magnitudes, propagated variances.

Times are one number per token, absolute, of any origin; each sequence's first time is subtracted in
float64 before anything is rounded, so real-valued times of size 1e9 keep their fractions. Only time
differences enter any result.

Rotation angles are formed in float64 from float32 frequencies and handed on as float32 cosines and
sines. What remains is the rounding of the frequencies themselves: half a unit in the last place of
ω, times the distance to the first token. With base 10000 that bounds the error of a cosine by
2e-3 at distance 65,000 and by about 0.04 at distance 1e6.

Source: RT-Filter paper, Eq. 3, 4, 6 and appendix A.4, F.2.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = [
    "apply_rotation",
    "check_times",
    "context_angles",
    "process_variance",
    "relative_times",
    "rotary_frequencies",
    "rotate",
    "rotation",
    "rotation_angles",
    "transport_state",
]


def rotary_frequencies(
    dimension: int, base: float = 10000.0, *, conjugate_pairs: bool = False
) -> Tensor:
    """Angular frequencies ω, shape (dimension,), float32, radians per unit of time.

    Args:
        dimension: complex features per head.
        base: ω_k = base^(−k/dimension), as in rotary position embeddings of 2·dimension features.
        conjugate_pairs: ω = (ω_1, −ω_1, ω_2, −ω_2, …) (appendix F.2), so that the real system
            matrix is real. An odd dimension ends with the self-conjugate frequency 0.

    Raises:
        ValueError: dimension < 1, or base not positive.

    Example:
        >>> from rpt.geometry.rt_filter import rotary_frequencies
        >>> rotary_frequencies(4, base=16.0)
        tensor([1.0000, 0.5000, 0.2500, 0.1250])
    """
    if dimension < 1 or base <= 0:
        raise ValueError(f"need dimension ≥ 1 and base > 0, got {dimension} and {base}")
    distinct = max(dimension // 2, 1) if conjugate_pairs else dimension
    omega = base ** (-torch.arange(distinct, dtype=torch.float64) / distinct)
    if conjugate_pairs and dimension > 1:
        omega = torch.stack((omega, -omega), dim=-1).flatten()
        omega = torch.cat((omega, omega.new_zeros(dimension - omega.numel())))
    return omega.float()


def check_times(times: Tensor, batch: int, tokens: int, name: str = "times") -> Tensor:
    """Times (tokens,), (1, tokens) or (batch, tokens) as float64 (1 or batch, tokens).

    Raises:
        TypeError: half-precision or non-real times.
        ValueError: another shape; non-finite times; float32 times too large to tell apart.
    """
    if times.dim() == 1:
        times = times.unsqueeze(0)
    if times.dim() != 2 or times.shape[1] != tokens or times.shape[0] not in (1, batch):
        raise ValueError(
            f"{name} must have shape ({tokens},), (1, {tokens}) or ({batch}, {tokens}),"
            f" got {tuple(times.shape)}"
        )
    if times.dtype in (torch.float16, torch.bfloat16) or times.is_complex():
        raise TypeError(
            f"{name} of dtype {times.dtype} cannot tell events apart; pass float64, float32 or"
            " integer times"
        )
    if not torch.compiler.is_compiling() and times.numel():
        _refuse_lost_times(times, name)
    # Apple's backend has no float64; there, times must be small enough for float32.
    return times.to(torch.float32 if times.device.type == "mps" else torch.float64)


def _refuse_lost_times(times: Tensor, name: str) -> None:
    if times.is_floating_point():
        # A deliberate host sync: bad times would otherwise become wrong results in silence. It
        # happens only where explicit times are passed outside a compiled graph.
        largest = float(times.detach().abs().max())
        if not largest < float("inf"):
            raise ValueError(f"{name} contain NaN or infinity")
        if times.dtype == torch.float32:
            spacing = largest * torch.finfo(torch.float32).eps
            if largest >= 2**24:
                raise ValueError(
                    f"float32 {name} up to {largest:.3g} are spaced {spacing:.3g} apart and merge"
                    " events; pass float64 times, or subtract an origin first"
                )
            if spacing > 1e-3 and bool((times != times.round()).any()):
                warnings.warn(
                    f"float32 {name} up to {largest:.3g} resolve only {spacing:.2g} time units;"
                    " pass float64 times, or subtract an origin first",
                    stacklevel=3,
                )


def relative_times(times: Tensor, origin: Tensor | None = None) -> Tensor:
    """Subtract each sequence's first time (or `origin`, (rows, 1)) in the dtype of `times`."""
    return times - (times[:, :1] if origin is None else origin)


def rotation_angles(relative: Tensor, frequencies: Tensor) -> Tensor:
    """θ = ω t, (…, tokens, d), of times (…, tokens), in their dtype, and frequencies (d,) (Eq. 3).

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import rotation_angles
        >>> rotation_angles(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.5]))
        tensor([[0., 0.],
                [2., 1.]])
    """
    return relative.unsqueeze(-1) * frequencies.to(relative.dtype)


def rotate(x: Tensor, angles: Tensor, *, inverse: bool = False) -> Tensor:
    """Multiply each complex feature by e^{iθ} (e^{−iθ} with `inverse`): rotary positions (F.2).

    Args:
        x: lifted complex features (…, tokens, 2d), interleaved pairs, any floating dtype.
        angles: (…, tokens, d), radians, broadcastable against x's leading dimensions.

    Returns:
        A tensor of x's shape and dtype; the arithmetic runs in float32 or better.

    Raises:
        ValueError: the last sizes do not match, or the tokens dimension would be broadcast.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import rotate
        >>> rotate(torch.tensor([[1.0, 0.0]]), torch.tensor([[torch.pi / 4]]))
        tensor([[0.7071, 0.7071]])
    """
    if x.shape[-1] != 2 * angles.shape[-1] or x.shape[-2] != angles.shape[-2]:
        raise ValueError(
            f"angles of shape {tuple(angles.shape)} do not rotate features of shape"
            f" {tuple(x.shape)}: need (…, tokens, features/2)"
        )
    work = torch.promote_types(x.dtype, torch.float32)
    return apply_rotation(x.to(work), *rotation(angles, work), inverse=inverse).to(x.dtype)


def rotation(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of angles, taken in the angles' precision and rounded to `dtype`."""
    return torch.cos(angles).to(dtype), torch.sin(angles).to(dtype)


def apply_rotation(x: Tensor, cosine: Tensor, sine: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs (…, tokens, 2d) by cosine and sine (…, tokens, d) of x's dtype."""
    if inverse:
        sine = -sine
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack(
        (real * cosine - imaginary * sine, real * sine + imaginary * cosine), dim=-1
    )
    return turned.flatten(-2)


def context_angles(
    increments: Tensor, num_heads: int, padding: Tensor | None, earlier: Tensor | None
) -> Tensor:
    """Angles that add up along the tokens (extension G.2), float64, (batch, heads, tokens, d).

    Padded tokens add nothing; those of `padding`, (batch, keys), end with these. `earlier` are the
    angles of the tokens before, (batch, heads, keys, d), or None.
    """
    work = torch.float32 if increments.device.type == "mps" else torch.float64
    steps = increments.to(work).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    if padding is not None:
        steps = steps.masked_fill(padding[:, None, -steps.shape[2] :, None], 0.0)
    angles = steps.cumsum(2)
    return angles if earlier is None else angles + earlier[:, :, -1:]


def process_variance(lag: Tensor, decay: Tensor) -> Tensor:
    """(1 − e^{−2μ|lag|})/(2μ), the variance of unit process noise (appendix A.4), |lag| at μ = 0.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import process_variance
        >>> process_variance(torch.tensor(3.0), torch.tensor([0.0, 0.5]))
        tensor([3.0000, 0.9502])
    """
    span = lag.abs()
    exponent = 2.0 * decay * span
    small = exponent < 1e-4
    safe = torch.where(small, torch.ones_like(exponent), exponent)
    ratio = torch.where(
        small,
        1.0 - exponent / 2.0 + exponent * exponent / 6.0,
        -torch.expm1(-safe) / safe,
    )
    return span * ratio


def transport_state(
    x: Tensor, lag: Tensor, frequencies: Tensor, decay: Tensor | float = 0.0
) -> Tensor:
    """Predict the lifted state (…, 2d) `lag` (…) later: e^{−μ lag} Φ(lag) x (Eq. 6).

    The lag is signed: a negative one transports backwards and amplifies.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import transport_state
        >>> x, lag, omega = torch.tensor([1.0, 0.0]), torch.tensor(2.0), torch.tensor([0.5])
        >>> transport_state(x, lag, omega, decay=0.1)  # turned by 1 radian, shorter by e^−0.2
        tensor([0.4424, 0.6889])
    """
    angles = rotation_angles(lag, frequencies)
    gain = torch.exp(-torch.as_tensor(decay, dtype=lag.dtype, device=lag.device) * lag)
    turned = rotate(x.unsqueeze(-2), angles.unsqueeze(-2)).squeeze(-2)
    return turned * gain.unsqueeze(-1).to(x.dtype)
