"""LELU and SoftEikonalLinear: one affine map with a self-allocated low-rank correction.

Source: the RPT guide, "Put self-context inside an ordinary MLP", and the specification of the
self-context layers, which fixes what the guide leaves open.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checks import check_count, check_number

__all__ = ["LELU", "SoftEikonalLinear"]

LELU_SLOPE = math.pi / math.sqrt(3.0)  # makes the logistic gate's density one of unit variance
RMS_FLOOR = 1e-6
COST_FLOOR = 1e-5
EVIDENCE_FEATURES = 4
RESPONSE_WIDTH = 12


class LELU(nn.Module):
    """Logistic-gated linear unit x · sigmoid(π x / √3): the gate's distribution has unit variance.

    Shape: any; output like input, in its dtype. Source: the RPT guide.

    Example:
        >>> import torch
        >>> from rpt.geometry.self_context import LELU
        >>> LELU()(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1402,  0.0000,  0.8598])
    """

    def forward(self, x: Tensor) -> Tensor:
        # Not silu(kx)/k: that is NaN once kx leaves the range of a half-precision x.
        return x * torch.sigmoid(LELU_SLOPE * x)


def _rms(x: Tensor) -> Tensor:
    """Root mean square over the last dimension, kept, floored at 1e-6; gradient 0 at the floor."""
    # The floor goes inside the root: the derivative of a bare root at zero is infinite.
    return x.square().mean(dim=-1, keepdim=True).clamp_min(RMS_FLOOR**2).sqrt()


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class SoftEikonalLinear(nn.Module):
    """An affine map plus a low-rank correction that the activation allocates to itself.

    The activation x builds a positive semidefinite metric M(x), weighs `directions` fixed
    projection frames of `rank` rows by their cost under it, proposes a chart point near x from the
    weighted frames, and rereads the frames there:

        y = base(x) + softplus(scale) · (Σ_d weight_d p_d) @ shared,   p, weight at the chart point

    Statistics and the softmax are computed in float32 or better, whatever the dtype of the layer;
    backpropagation is exact through everything but the RMS of x that bounds the context.

    Initialisation: `base`, `metric` and `response` as `nn.Linear` does; `shared` normal with
    standard deviation 1/√rank; `scale` −1.5. `primitive` is a buffer (saved, never trained):
    Gaussian rows of unit length over `n_in`, from a generator of its own that is seeded by the two
    widths, so equal widths give equal frames and the global random state is not touched by them.

    Args:
        n_in: width of the input's last dimension.
        n_out: width of the output's last dimension.
        directions: number of fixed projection frames.
        rank: rows per frame; the metric is rank × rank.
        self_context_strength: length of the proposal, as a fraction of the RMS of x. With 0 the
            chart point is x and nothing is proposed.
        temperature: of the softmax over the frames.
        context_steps: proposals in a row. Each starts from x again, so they never accumulate.

    Shape: (..., n_in) → (..., n_out), any leading dimensions, none included.

    Raises:
        ValueError: a width or count below 1, a temperature that is not positive, a strength that is
            negative or not finite, or an input whose last dimension is not `n_in`.

    Source: the RPT guide, "Inside one self-context layer".

    Example:
        >>> import torch
        >>> from rpt.geometry.self_context import SoftEikonalLinear
        >>> SoftEikonalLinear(8, 3, self_context_strength=0.25)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 3])
    """

    primitive: Tensor

    def __init__(
        self,
        n_in: int,
        n_out: int,
        directions: int = 12,
        rank: int = 4,
        self_context_strength: float = 0.0,
        temperature: float = 1.0,
        context_steps: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("n_in", n_in),
            ("n_out", n_out),
            ("directions", directions),
            ("rank", rank),
            ("context_steps", context_steps),
        ):
            check_count(name, value)
        check_number("temperature", temperature, above=0.0)
        check_number("self_context_strength", self_context_strength, 0.0)
        self.n_in = n_in
        self.n_out = n_out
        self.directions = directions
        self.rank = rank
        self.self_context_strength = self_context_strength
        self.temperature = temperature
        self.context_steps = context_steps

        self.base = nn.Linear(n_in, n_out, device=device, dtype=dtype)
        self.metric = nn.Linear(n_in, rank * rank, device=device, dtype=dtype)
        self.shared = nn.Parameter(torch.empty(rank, n_out, device=device, dtype=dtype))
        # One element in one dimension: sharded training refuses parameters of no dimension.
        self.scale = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.response = nn.Sequential(
            nn.Linear(EVIDENCE_FEATURES, RESPONSE_WIDTH, device=device, dtype=dtype),
            LELU(),
            nn.Linear(RESPONSE_WIDTH, 1, device=device, dtype=dtype),
        )
        self.register_buffer(
            "primitive", torch.empty(directions, rank, n_in, device=device, dtype=dtype)
        )
        self._reset_own()

    def reset_parameters(self) -> None:
        """Draw every parameter again, and write the fixed frames (for `to_empty` after `meta`)."""
        self.base.reset_parameters()
        self.metric.reset_parameters()
        for layer in self.response:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        self._reset_own()

    @torch.no_grad()
    def _reset_own(self) -> None:
        nn.init.normal_(self.shared, std=1.0 / math.sqrt(self.rank))
        nn.init.constant_(self.scale, -1.5)
        # Drawn on the CPU in float64: the frames do not depend on the layer's device or dtype.
        generator = torch.Generator(device="cpu").manual_seed(1_000_003 * self.n_in + self.n_out)
        frames = torch.randn(
            self.directions,
            self.rank,
            self.n_in,
            generator=generator,
            device="cpu",
            dtype=torch.float64,
        )
        frames /= torch.linalg.vector_norm(frames, dim=-1, keepdim=True)
        self.primitive.copy_(frames)

    def allocate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project x on every frame and weigh the frames.

        Args:
            x: (..., n_in).

        Returns:
            The projections (..., directions, rank) in the layer's arithmetic dtype, and the weights
            (..., directions), positive with sum 1, in float32 or better.
        """
        factor = self.metric(x).unflatten(-1, (self.rank, self.rank))
        projected = functional.linear(x, self.primitive.flatten(0, 1)).unflatten(
            -1, (self.directions, self.rank)
        )
        wide = _at_least_float32(projected)
        # pᵀ A Aᵀ p as the squared length of pᵀ A: no rank × rank metric per sample, never negative.
        # Its square leaves float16's range early, so autocast must not touch this product.
        with torch.autocast(x.device.type, enabled=False):
            reading = wide @ factor.to(wide.dtype)
        cost = reading.square().sum(dim=-1) / self.rank
        evidence = torch.stack(
            (
                cost.log1p(),
                wide.square().mean(dim=-1).log1p(),
                wide.mean(dim=-1),
                wide.abs().mean(dim=-1).log1p(),
            ),
            dim=-1,
        )
        response = self.response(evidence.to(x.dtype)).squeeze(-1)
        relative_cost = cost / (cost.mean(dim=-1, keepdim=True) + COST_FLOOR)
        weight = torch.softmax((response - relative_cost) / self.temperature, dim=-1)
        return projected, weight

    def pool(self, projected: Tensor, weight: Tensor) -> Tensor:
        """Σ_d weight_d p_d: (..., directions, rank) and (..., directions) → (..., rank)."""
        return (weight.to(projected.dtype).unsqueeze(-2) @ projected).squeeze(-2)

    def context(self, x: Tensor, projected: Tensor, weight: Tensor) -> Tensor:
        """Lift the allocated projections back to (..., n_in) and give them the RMS of x."""
        weighted = (weight.to(projected.dtype).unsqueeze(-1) * projected).flatten(-2)
        lifted = _at_least_float32(weighted @ self.primitive.flatten(0, 1)) / self.rank
        size = _rms(_at_least_float32(x)).detach()
        return (lifted * (size / _rms(lifted))).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.n_in:
            raise ValueError(
                f"SoftEikonalLinear: the input's last dimension must be {self.n_in}, "
                f"got an input of shape {tuple(x.shape)}"
            )
        projected, weight = self.allocate(x)
        if self.self_context_strength:
            for _ in range(self.context_steps):
                chart = x + self.self_context_strength * self.context(x, projected, weight)
                projected, weight = self.allocate(chart)
        correction = self.pool(projected, weight) @ self.shared
        # Under autocast softplus runs in float32; the output keeps the dtype that `base` gives.
        strength = functional.softplus(self.scale).to(correction.dtype)
        return self.base(x) + strength * correction

    def extra_repr(self) -> str:
        return (
            f"{self.n_in}, {self.n_out}, directions={self.directions}, rank={self.rank}, "
            f"self_context_strength={self.self_context_strength}, "
            f"temperature={self.temperature}, context_steps={self.context_steps}"
        )
