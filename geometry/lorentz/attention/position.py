"""Horospherical positional encoding: relative, and logarithmic in the token gap (Eq. 10, 11)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...checks import check_choice, check_count, check_number
from ..ops.gyro import axis_boost
from ..ops.horosphere import horospherical_shift, to_half_space
from ..ops.point import PointLike, promote
from .scores import ScoreCoordinates, half_space_score, polar_score_coordinates


class _PositionEncoding(nn.Module):
    """Positions, rates per head, and the step of each head at each token."""

    undecayed_parameters = ("rate",)
    grid_positions: Tensor | None
    min_head_dim: int

    def __init__(
        self, num_heads: int, num_positions: int | tuple[int, ...], initial_rate: float
    ) -> None:
        super().__init__()
        sizes = (num_positions,) if isinstance(num_positions, int) else tuple(num_positions)
        if not 1 <= len(sizes) <= 2 or any(size < 1 for size in sizes):
            raise ValueError(
                "num_positions must be a positive number or a pair (rows, columns), got "
                f"{num_positions!r}"
            )
        check_count("num_heads", num_heads)
        check_number("initial_rate", initial_rate)
        self.num_heads, self.sizes = num_heads, sizes
        self.rate = nn.Parameter(torch.full((len(sizes), num_heads), float(initial_rate)))
        # Integers: a cast of the module leaves them exact.
        grid = None
        if len(sizes) == 2:
            index = torch.arange(sizes[0] * sizes[1])
            grid = torch.stack([index // sizes[1], index % sizes[1]])
        self.register_buffer("grid_positions", grid, persistent=False)

    def read(
        self, x: PointLike, positions: Tensor | None, offset: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads and their steps."""
        ((a, u),) = promote(x)
        if u.shape[-1] < self.min_head_dim:
            raise ValueError(
                f"this encoding needs head dimensions ≥ {self.min_head_dim}, got {u.shape[-1]}"
            )
        return a, u, self.steps(a.shape[-1], a.dtype, positions, offset)

    def default_positions(self, length: int, offset: int, device: torch.device) -> Tensor:
        """(axes, length): tokens in order, or the patches of the grid row by row."""
        if len(self.sizes) == 1:
            return torch.arange(offset, offset + length, device=device).unsqueeze(0)
        if offset or length != self.sizes[0] * self.sizes[1]:
            raise ValueError(
                f"a grid of {self.sizes[0]} × {self.sizes[1]} patches needs as many tokens, got "
                f"{length}; pass positions of shape (…, tokens, 2) otherwise"
            )
        assert self.grid_positions is not None
        return self.grid_positions

    def steps(
        self, length: int, dtype: torch.dtype, positions: Tensor | None, offset: int
    ) -> Tensor:
        """t = m ρ_h / M for each axis: (axes, H, length) or (axes, batch, H, length)."""
        axes = len(self.sizes)
        if positions is None:
            positions = self.default_positions(length, offset, self.rate.device)
        elif axes == 1:
            positions = positions.unsqueeze(0)
        else:
            if positions.shape[-1] != axes:
                raise ValueError(f"grid positions have shape (…, tokens, {axes})")
            positions = positions.movedim(-1, 0)
        if positions.shape[-1] != length or positions.dim() not in (2, 3):
            raise ValueError(
                f"positions must have shape (tokens,) or (batch, tokens) with {length} tokens"
                + ("" if axes == 1 else " and a last dimension of 2")
            )
        sizes = torch.tensor(self.sizes, dtype=dtype, device=positions.device)
        # The quotient first: positions may be large integers or real times.
        shares = positions.to(dtype) / sizes.view(-1, *[1] * (positions.dim() - 1))
        rate = self.rate.to(dtype)
        if positions.dim() == 3:
            return shares.unsqueeze(2) * rate[:, None, :, None]
        return shares.unsqueeze(1) * rate[:, :, None]


class HorosphericalEncoding(_PositionEncoding):
    """Shifts queries and keys along horospheres by t = m ρ_h / M, ρ_h learned per head.

    The score then depends on positions only by their difference. In one dimension this is one
    shift (ideal point of space axis 0, along axis 1). On a grid of patches:

    - `scheme="shared"`: one ideal point, two shift axes; shifts commute, and the score depends
      exactly on both differences. Heads need dimension ≥ 3.
    - `scheme="paper"`: one pair of axes per grid axis, (0, 1) and (2, 3); exactly relative along
      each axis, to first order in the rates across both. Heads need dimension ≥ 4.

    Args:
        num_heads: H.
        num_positions: M, or (rows, columns) for a grid. It sets the unit of the rates and may be
            exceeded.
        scheme: see above; without meaning in one dimension.
        initial_rate: ρ_h at the start.

    The rates (axes, H) are never decayed (`parameter_groups`).

    Raises:
        ValueError: an option that does not exist; heads or positions that do not fit.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> encoding = lorentz.HorosphericalEncoding(num_heads=2, num_positions=9)
        >>> encoding(lorentz.exp_map_origin(torch.randn(1, 2, 9, 4))).vector.shape
        torch.Size([1, 2, 9, 3])
    """

    def __init__(
        self,
        num_heads: int,
        num_positions: int | tuple[int, ...],
        *,
        scheme: str = "shared",
        initial_rate: float = 1.0,
    ) -> None:
        super().__init__(num_heads, num_positions, initial_rate)
        check_choice("scheme", scheme, ("shared", "paper"))
        self.scheme = scheme
        self.min_head_dim = 4 if scheme == "paper" and len(self.sizes) == 2 else 1 + len(self.sizes)

    def forward(
        self, x: PointLike, positions: Tensor | None = None, *, offset: int = 0
    ) -> ScoreCoordinates:
        """Encode heads (batch, H, N), (batch, H, N, m) at their positions.

        Args:
            x: queries or keys.
            positions: (N,) or (batch, N), real or integer, with a last dimension of 2 on a grid;
                by default offset, offset + 1, …, or the patches row by row.
            offset: where default positions begin.

        Returns:
            Score coordinates (level, scale, vector) for the attention functions.
        """
        a, u, steps = self.read(x, positions, offset)
        if self.scheme == "paper" and len(self.sizes) == 2:
            shifted = horospherical_shift((a, u), steps[0])
            coordinates = to_half_space(shifted, axis=2)
            # Without axis 2, axis 3 is the third of the remaining coordinates.
            return _shifted(coordinates, steps[1:], 2)
        return _shifted(to_half_space((a, u)), steps, 0)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, positions={self.sizes}, scheme={self.scheme!r}"


def _shifted(coordinates: tuple[Tensor, Tensor], steps: Tensor, first: int) -> ScoreCoordinates:
    """Add steps (axes, …, N) to the components of w from `first` on."""
    log_nu, w = coordinates
    rest = w.shape[-1] - first - steps.shape[0]
    # Positions seldom differ between samples: the padding is done before the addition broadcasts.
    return half_space_score(log_nu, w + nn.functional.pad(steps.movedim(0, -1), (first, rest)))


class BoostEncoding(_PositionEncoding):
    """Lorentz boosts in place of shifts (after HoPE, Dai et al. 2025): the paper's ablation.

    One boost of rapidity m ρ_h / M per grid axis, along space axis 0 (and 2).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> encoding = lorentz.BoostEncoding(num_heads=2, num_positions=(3, 3))
        >>> encoding(lorentz.exp_map_origin(torch.randn(1, 2, 9, 4))).vector.shape
        torch.Size([1, 2, 9, 4])
    """

    def __init__(
        self,
        num_heads: int,
        num_positions: int | tuple[int, ...],
        *,
        initial_rate: float = 1.0,
    ) -> None:
        super().__init__(num_heads, num_positions, initial_rate)
        self.min_head_dim = 2 * len(self.sizes) - 1

    def forward(
        self, x: PointLike, positions: Tensor | None = None, *, offset: int = 0
    ) -> ScoreCoordinates:
        """Encode heads (batch, H, N), (batch, H, N, m); see `HorosphericalEncoding.forward`."""
        a, u, steps = self.read(x, positions, offset)
        for axis, step in enumerate(steps):
            a, u = axis_boost((a, u), step, axis=2 * axis)
        return polar_score_coordinates((a, u))
