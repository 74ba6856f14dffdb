"""Polar attention: one step of the radial–tangential filter per head (Algorithm 1, steps 1–8)."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..checks import check_choice, check_number, renamed
from .base import (
    AttentionOptions,
    AttentionWeights,
    FilterAttention,
    Projected,
    unit,
)
from .cache import FilterCache
from .logits import PolarSettings
from .parameters import FilterScalars, PositiveParameter, UnitIntervalParameter
from .paths import PolarEstimate, PolarInputs, estimate
from .paths.standard import standard_attention
from .sphere import across
from .stream import TokenStream
from .transport import apply_rotation, context_angles, rotation
from .visibility import quarantine

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["PolarAttention"]


class PolarAttention(FilterAttention):
    """Multi-head attention as radial–tangential state estimation: x ↦ Δx = W_o ΔV (Algorithm 1).

    A drop-in self-attention without the residual connection: `z = z + attention(z)`, with no norm
    in front, since steps 1 and 2 normalise and rotate queries, keys and values themselves. Every
    correction of the filter has a switch; with all of them off (`PolarAttention.standard`) what
    remains is softmax attention with rotary positions.

    Args:
        embed_dim: features of the residual stream.
        num_heads: heads H.
        head_dim: complex features d per head, default embed_dim // num_heads: the projections then
            map embed_dim real to 2·embed_dim real numbers (appendix F.1). embed_dim // (2·num_heads)
            gives the widths, and the parameters, of ordinary attention.
        is_causal: whether a token sees only tokens not later than itself, by time.
        dropout: dropout on the (directional) attention weights while training.
        base, conjugate_frequencies, learn_frequencies: angular frequencies, see
            `rotary_frequencies`; they stay float32 whatever the module is cast to.
        weights: "student_t" or "exponential" influence weights.
        decay: magnitudes and variances decay at a learned rate per head; a quarter of the heads
            never decays, the others start log-spaced over `decay_range` (1/time).
        magnitude_precision: precision κ grows with the square of the transported magnitude.
        tangent: project the directional update onto the tangent space at the token's own state.
        radial: "own" weights A_R, "shared" (A_T), or "off" (β = 0).
        radial_exponent: "likelihood" (ν_r + 1) or "influence" (1, Algorithm 1 as printed).
        rotate_values: rotate values and counter-rotate their mean.
        directional: "chordal", or "exact" for the complex correlation of extension G.1.
        gain: "learned" step sizes, or "bayes" for the gain of extension G.3.
        normalize: normalise queries, keys and values; False only in the standard limit.
        m_units: "rms" or "raw" magnitudes.
        process_noise: initial variance rate σ² of process noise (appendix A.4); 0 leaves it out.
        context_rotation: rotate by context as well as by time (extension G.2): a linear map of each
            token, initially zero, adds to its angles, and angles add up along the tokens.
        nu, temperature, step: initial ν_t and ν_r, inverse temperature, and α = β.
        backend: "auto", "dense" (reference, second derivatives), or "chunked".

    Raises:
        ValueError: sizes or options that make no sense together.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import PolarAttention
        >>> attention = PolarAttention(embed_dim=16, num_heads=2)
        >>> attention(torch.randn(3, 5, 16), times=torch.tensor([0.0, 0.5, 2.0, 2.5, 9.0])).shape
        torch.Size([3, 5, 16])
    """

    @renamed(d_model="embed_dim", causal="is_causal")
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        magnitude_precision: bool = True,
        tangent: bool = True,
        radial: Literal["own", "shared", "off"] = "own",
        radial_exponent: Literal["likelihood", "influence"] = "likelihood",
        rotate_values: bool = True,
        directional: Literal["chordal", "exact"] = "chordal",
        gain: Literal["learned", "bayes"] = "learned",
        normalize: bool = True,
        m_units: Literal["rms", "raw"] = "rms",
        process_noise: float = 0.0,
        context_rotation: bool = False,
        step: float = 0.5,
        **options: Unpack[AttentionOptions],
    ) -> None:
        for name, value, choices in (
            ("radial", radial, ("own", "shared", "off")),
            ("radial_exponent", radial_exponent, ("likelihood", "influence")),
            ("directional", directional, ("chordal", "exact")),
            ("gain", gain, ("learned", "bayes")),
            ("m_units", m_units, ("rms", "raw")),
        ):
            check_choice(name, value, choices)
        check_number("step", step, above=0.0, below=1.0)
        super().__init__(
            embed_dim,
            num_heads,
            process_noise=process_noise,
            magnitude_floor=0.01 if magnitude_precision else 0.0,
            **options,
        )
        if process_noise and not self.decay:
            raise ValueError("process_noise needs decay=True")
        self.settings = PolarSettings(
            self.weights,
            magnitude_precision,
            self.decay,
            radial,
            radial_exponent,
            directional == "exact",
            process_noise > 0,
        )
        self.tangent, self.rotate_values, self.gain = tangent, rotate_values, gain
        self.normalize, self.m_units = normalize, m_units
        self.is_standard = self.settings == PolarSettings(
            "exponential", False, False, "off", radial_exponent, False, False
        ) and not (tangent or rotate_values or gain == "bayes")
        if not normalize and not self.is_standard:
            raise ValueError(
                "normalize=False leaves the sphere: it needs every correction switched off,"
                " as in PolarAttention.standard"
            )
        per_head = (num_heads,)
        if radial == "own":
            for name in ("key", "query", "inflation", "nu"):
                self.scalars[f"{name}_radial"] = deepcopy(self.scalars[f"{name}_tangential"])
        if normalize:
            self.query_gain = PositiveParameter(1.0)
            self.key_gain = PositiveParameter(1.0)
            self.value_gain = PositiveParameter(1.0)
        if gain == "bayes":
            self.prior_carry = PositiveParameter(1.0, per_head)
            self.prior_precision = PositiveParameter(1.0, per_head)
        else:
            self.directional_step = UnitIntervalParameter(step, per_head)
        if radial != "off":
            self.radial_step = UnitIntervalParameter(step, per_head)
        self.context_projection: nn.Linear | None = None
        if context_rotation:
            self.context_projection = nn.Linear(embed_dim, num_heads * self.head_dim, bias=False)
            nn.init.zeros_(self.context_projection.weight)

    @classmethod
    @renamed(d_model="embed_dim", causal="is_causal")
    def standard(
        cls, embed_dim: int, num_heads: int, *, normalize: bool = False, **options: Any
    ) -> PolarAttention:
        """Every correction off: softmax attention with rotary positions.

        Widths, logit scale 1/√(2d) at the start, frequencies and parameter count of the projections
        are those of ordinary attention (the learned temperature and step sizes per head remain).
        """
        if "head_dim" not in options:
            if embed_dim % (2 * num_heads):
                raise ValueError(f"embed_dim={embed_dim} must be divisible by 2·num_heads")
            options["head_dim"] = embed_dim // (2 * num_heads)
        # Logits are β·2κ̃/(ν d) q·k with κ̃ = 1/3 at the start.
        nu, head_dim = options.get("nu", 4.0), options["head_dim"]
        options.setdefault("temperature", 1.5 * nu * head_dim / math.sqrt(2 * head_dim))
        options.setdefault("conjugate_frequencies", False)
        return cls(
            embed_dim,
            num_heads,
            weights="exponential",
            magnitude_precision=False,
            decay=False,
            tangent=False,
            radial="off",
            rotate_values=False,
            normalize=normalize,
            **options,
        )

    def _numbers(self) -> dict[str, Tensor]:
        found = super()._numbers()
        if self.m_units == "raw":
            found["sphere_scale"] = found["sphere_scale"] / self.head_dim
        if self.normalize:
            found["sphere_scale"] = found["sphere_scale"] * (self.query_gain() * self.key_gain())
        return found

    def _step(
        self,
        tokens: Projected,
        stream: TokenStream,
        cache: FilterCache | None,
        layer: int,
        need_weights: bool,
        prior_log_precision: Tensor | None,
    ) -> tuple[Tensor, Tensor, AttentionWeights | None, Tensor | None]:
        query, key, value, own = tokens.query, tokens.key, tokens.value, tokens.own
        view = stream.view
        query_angles = self._angles(view.query_times)
        key_angles = query_angles if own is None else self._angles(view.key_times)
        extra: tuple[Tensor, ...] = ()
        if self.context_projection is not None:
            if own is not None:
                raise ValueError("context-dependent rotations follow one stream; pass no memory")
            context = self.context_projection(tokens.x.to(self.context_projection.weight.dtype))
            before = None if cache is None else cache.committed(layer)
            earlier = None if before is None else before[3]
            turned = context_angles(context, self.num_heads, view.padding, earlier)
            query_angles = key_angles = query_angles + turned
            extra = (turned,)
        turn = rotation(query_angles, query.dtype)
        key_turn = turn if own is None else rotation(key_angles, key.dtype)
        if self.normalize:
            query, key = unit(query)[1], unit(key)[1]
        # Without a dynamical model left to follow, the standard limit turns as rotary positions do.
        query = apply_rotation(query, *turn, inverse=not self.is_standard)
        key = apply_rotation(key, *key_turn, inverse=not self.is_standard)
        magnitude, value = self._state(value, key_turn)
        if own is None:
            own_magnitude, own = magnitude, value
        else:
            own_magnitude, own = self._state(own, turn)
        if cache is not None:
            staged = cache.stage(layer, (key, value, magnitude, *extra), stream.tokens)
            key, value, magnitude = staged[:3]
        (key, value, magnitude), poisoned = quarantine(view, key, value, magnitude)
        inputs = PolarInputs(query, key, value, own_magnitude, magnitude)
        scalars = self.filter_scalars()
        scalars = FilterScalars(*(s.to(query.dtype) for s in scalars))
        found = self._estimate(inputs, stream, scalars, need_weights)
        update, log_precision = self._update(found, own, own_magnitude, prior_log_precision)
        if self.rotate_values:
            update = apply_rotation(update, *turn)
        weights = None
        if need_weights:
            assert found.directional_weights is not None
            weights = AttentionWeights(found.directional_weights, found.radial_weights)
        return update, tokens.lost | poisoned.any(1), weights, log_precision

    def _state(self, value: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Magnitude (batch, heads, tokens) and rotated unit direction of a state."""
        norm, direction = unit(value)
        if not self.normalize:
            direction = value / math.sqrt(self.head_dim)
        if self.rotate_values:
            direction = apply_rotation(direction, *turn, inverse=True)
        return norm if self.m_units == "raw" else norm / math.sqrt(self.head_dim), direction

    def _estimate(
        self, inputs: PolarInputs, stream: TokenStream, scalars: FilterScalars, need_weights: bool
    ) -> PolarEstimate:
        dropout = self.dropout if self.training else 0.0
        if self.is_standard and (not self.normalize or self.backend == "auto"):
            length = 1 if self.normalize else self.head_dim
            dense = need_weights or self.backend == "dense"
            return standard_attention(
                inputs, stream.view, scalars, stream.ahead, length, dropout, dense
            )
        return estimate(
            inputs,
            stream.view,
            scalars,
            self.settings,
            dense=self._use_dense(inputs.query, inputs.key, need_weights),
            ahead=stream.ahead,
            dropout=dropout,
            precision=self.gain == "bayes",
            weights=need_weights,
        )

    def _update(
        self,
        found: PolarEstimate,
        own: Tensor,
        own_magnitude: Tensor,
        prior_log_precision: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Algorithm 1, step 7, in the rotated frame: α P_T(V)V̄ + β(m̄ − m)V, V at length r."""
        direction, log_precision = found.direction, None
        if self.tangent:
            direction = across(own, direction, exact=self.settings.exact)
        if self.gain == "bayes":
            assert found.log_precision is not None
            gain, log_precision = bayes_gain(
                found.log_precision,
                prior_log_precision,
                carry=self.prior_carry(),
                floor=self.prior_precision(),
            )
            update = gain.unsqueeze(-1) * direction
        else:
            update = self.directional_step().to(own.dtype)[:, None, None] * direction
        if self.settings.radial != "off":
            step = self.radial_step().to(own.dtype)[:, None]
            update = update + (step * (found.magnitude - own_magnitude)).unsqueeze(-1) * own
        length = math.sqrt(self.head_dim)
        if self.normalize:
            return update * (self.value_gain().to(own.dtype) * length), log_precision
        return update * length, log_precision


def bayes_gain(
    log_found: Tensor, log_before: Tensor | None, *, carry: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor]:
    """K = λ_ū/(λ⁻ + λ_ū) and log λ⁺ = log(λ⁻ + λ_ū), λ⁻ = carry·λ⁺_before + floor (G.3)."""
    prior = torch.log(floor).to(log_found.dtype)[:, None].expand_as(log_found)
    if log_before is not None:
        carried = torch.log(carry).to(log_found.dtype)[:, None]
        prior = torch.logaddexp(log_before.to(log_found.dtype) + carried, prior)
    return torch.sigmoid(log_found - prior), torch.logaddexp(log_found, prior)
