"""What both attention layers share: projections, times, rotation, masks, cache, choice of path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from ..checks import check_choice, check_count, check_number, renamed
from ..softmax import damaged
from .cache import FilterCache
from .parameters import (
    DecayRates,
    FilterScalars,
    PositiveParameter,
    RotaryFrequencies,
    decay_rates,
)
from .stream import TokenStream, check_features, token_stream
from .transport import rotation_angles

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "AttentionCall",
    "AttentionOptions",
    "AttentionWeights",
    "FilterAttention",
    "FilterStep",
    "Projected",
    "unit",
]

SMALLEST_NORM = 1e-6
# Up to this many weights the dense path is as light as any other.
SMALL_PROBLEM = 4096


class AttentionWeights(NamedTuple):
    """Attention weights for pictures, each (batch, heads, queries, keys); radial may be None.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import PolarAttention
        >>> _, weights = PolarAttention(16, 2)(torch.randn(3, 5, 16), need_weights=True)
        >>> weights.directional.shape
        torch.Size([3, 2, 5, 5])
    """

    directional: Tensor
    radial: Tensor | None


class FilterStep(NamedTuple):
    """The result of `FilterAttention.filter`.

    output: (batch, tokens, embed_dim), the increment of the residual stream, in the input's dtype.
    weights: attention weights, or None.
    log_precision: with gain="bayes", log λ⁺ of each token's direction, (batch, heads, tokens).
    """

    output: Tensor
    weights: AttentionWeights | None
    log_precision: Tensor | None = None


class Projected(NamedTuple):
    """Tokens and their projections, (batch, heads, tokens, 2d) in float32 or better.

    x: the tokens, zero where padded or not finite. lost: (batch, tokens), True in the latter case.
    own: the value of x itself where `value` is that of a memory, or None.
    """

    x: Tensor
    lost: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    own: Tensor | None


class AttentionOptions(TypedDict, total=False):
    """Keywords that all filter attention layers share; `PolarAttention` documents them."""

    head_dim: int | None
    is_causal: bool
    dropout: float
    base: float
    conjugate_frequencies: bool
    learn_frequencies: bool
    weights: Literal["student_t", "exponential"]
    decay: bool
    decay_range: tuple[float, float]
    nu: float
    temperature: float
    backend: Literal["auto", "dense", "chunked"]


class AttentionCall(TypedDict, total=False):
    """Keywords of one call; `FilterAttention.forward` documents them."""

    times: Tensor | None
    memory_times: Tensor | None
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    cache: FilterCache | None
    is_causal: bool | None


class FilterAttention(nn.Module):
    """Multi-head scaffold over lifted complex heads; subclasses say what is estimated.

    Inputs are (batch, tokens, embed_dim), batch first. Weights are plain bias-free linear maps, real
    to complex and back (appendix F.1): a row with nothing to attend to comes out as exact zeros.
    `PolarAttention` says what the options mean; process noise or a floor of 0 is left out.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        is_causal: bool = True,
        dropout: float = 0.0,
        base: float = 10000.0,
        conjugate_frequencies: bool = True,
        learn_frequencies: bool = False,
        weights: Literal["student_t", "exponential"] = "student_t",
        decay: bool = True,
        decay_range: tuple[float, float] = (1e-3, 1e-1),
        nu: float = 4.0,
        temperature: float = 1.0,
        process_noise: float = 0.0,
        magnitude_floor: float = 0.0,
        backend: Literal["auto", "dense", "chunked"] = "auto",
    ) -> None:
        super().__init__()
        check_choice("weights", weights, ("student_t", "exponential"))
        check_number("process_noise", process_noise, 0.0)
        check_number("nu", nu, above=0.0)
        check_number("temperature", temperature, above=0.0)
        check_count("embed_dim", embed_dim)
        check_count("num_heads", num_heads)
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; pass head_dim"
                )
            head_dim = embed_dim // num_heads
        check_count("head_dim", head_dim)
        check_number("dropout", dropout, 0.0, below=1.0)
        check_number("base", base, above=0.0)
        check_choice("backend", backend, ("auto", "dense", "chunked"))
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        self.is_causal, self.dropout, self.backend = is_causal, dropout, backend
        self.weights, self.decay = weights, decay
        width = 2 * head_dim * num_heads
        self.query_projection = nn.Linear(embed_dim, width, bias=False)
        self.key_projection = nn.Linear(embed_dim, width, bias=False)
        self.value_projection = nn.Linear(embed_dim, width, bias=False)
        self.output_projection = nn.Linear(width, embed_dim, bias=False)
        self.frequencies = RotaryFrequencies(
            head_dim, base, conjugate_pairs=conjugate_frequencies, learned=learn_frequencies
        )
        shape = (num_heads,)
        noisy = decay and process_noise
        scalars: dict[str, nn.Module | None] = {
            "decay": DecayRates(decay_rates(num_heads, *decay_range)) if decay else None,
            "key_tangential": PositiveParameter(1.0, shape),
            "query_tangential": PositiveParameter(1.0, shape),
            "inflation_tangential": PositiveParameter(1.0, shape),
            "magnitude_floor": PositiveParameter(magnitude_floor, shape)
            if magnitude_floor
            else None,
            "process_noise": PositiveParameter(process_noise, shape) if noisy else None,
            "nu_tangential": PositiveParameter(nu, shape),
            "temperature": PositiveParameter(temperature, shape),
        }
        self.scalars = nn.ModuleDict({k: v for k, v in scalars.items() if v is not None})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Isotropic complex initialisation (appendix F.3): real and imaginary parts alike, variance
        1/embed_dim into the head, 1/width out of it."""
        for projection in (self.query_projection, self.key_projection, self.value_projection):
            nn.init.normal_(projection.weight, std=self.embed_dim**-0.5)
        nn.init.normal_(
            self.output_projection.weight, std=(2 * self.head_dim * self.num_heads) ** -0.5
        )

    def optimizer_observation_modules(self) -> tuple[nn.Module, ...]:
        """The output projection: the first matrix to read what attention made."""
        return (self.output_projection,)

    def new_cache(self) -> FilterCache:
        """An empty cache for decoding with this layer alone."""
        return FilterCache(1)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim},"
            f" is_causal={self.is_causal}, backend={self.backend!r}"
        )

    @renamed(causal="is_causal")
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        times: Tensor | None = None,
        memory_times: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cache: FilterCache | None = None,
        is_causal: bool | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, AttentionWeights]:
        """What attention adds to the residual stream, (batch, tokens, embed_dim), in x's dtype.

        Args:
            x: (batch, tokens, embed_dim). A token that is not finite makes its own row NaN and those
                that see it, and no other; gradients of the others stay as they are.
            memory: (batch, keys, embed_dim) for cross-attention: x's own states are updated by
                observations from `memory`. Causal only if `is_causal=True` says so.
            times: absolute time of each token, (tokens,), (1, tokens) or (batch, tokens), any
                origin and order; default 0, 1, 2, …. Large values need float64 or integers.
            memory_times: likewise for memory, on the same clock.
            key_padding_mask: boolean (batch, keys), True where a key is padding. With a cache: of
                the new tokens, or of all.
            attn_mask: boolean (True: may attend) or additive, (queries, keys), (batch, queries,
                keys) or (batch, heads, queries, keys).
            cache: a `FilterCache`; x then continues it. Committed at the end of the call.
            is_causal: overrides the constructor's choice.
            need_weights: also return the weights; takes the dense path.

        Raises:
            ValueError, TypeError: on shapes, masks or times that do not fit, before any change of
                the cache.
        """
        if cache is not None:
            check_features(x, self.embed_dim, "x")
            cache.open(x.shape[0], 1)
        step = self.filter(
            x,
            memory,
            times=times,
            memory_times=memory_times,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            cache=cache,
            is_causal=is_causal,
            need_weights=need_weights,
        )
        if cache is not None:
            cache.commit()
        if need_weights:
            assert step.weights is not None
            return step.output, step.weights
        return step.output

    def filter(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        layer: int = 0,
        need_weights: bool = False,
        prior_log_precision: Tensor | None = None,
        **call: Unpack[AttentionCall],
    ) -> FilterStep:
        """`forward` for stacks of layers: stages tokens in layer `layer` of a shared cache without
        committing, and carries the precision of extension G.3, (batch, heads, tokens)."""
        stream = self._stream(x, memory, **call)
        tokens = self._project(x, memory, stream.view.padding)
        with torch.autocast(device_type=x.device.type, enabled=False):
            update, lost, weights, log_precision = self._step(
                tokens, stream, call.get("cache"), layer, need_weights, prior_log_precision
            )
        return FilterStep(self._merge(update, lost, x), weights, log_precision)

    def _step(
        self,
        tokens: Projected,
        stream: TokenStream,
        cache: FilterCache | None,
        layer: int,
        need_weights: bool,
        prior_log_precision: Tensor | None,
    ) -> tuple[Tensor, Tensor, AttentionWeights | None, Tensor | None]:
        """The increment per head (batch, heads, tokens, 2d), which rows are lost (batch, tokens),
        weights, and the precision handed on."""
        raise NotImplementedError

    def filter_scalars(self) -> FilterScalars:
        """The current numbers of Algorithm 1, each (heads,), float32 or better; absent ones leave no
        effect. Robust Filter Attention's variances are those called tangential here."""
        return FilterScalars(**self._numbers())

    def _numbers(self) -> dict[str, Tensor]:
        reference = next(iter(self.scalars.parameters()))
        ones = torch.ones(self.num_heads, device=reference.device, dtype=reference.dtype)
        values = dict.fromkeys(FilterScalars._fields, ones)
        values.update(decay=ones * 0, process_noise=ones * 0)
        values.update((name, module()) for name, module in self.scalars.items())
        return values

    def _stream(
        self, x: Tensor, memory: Tensor | None, is_causal: bool | None = None, **call: Any
    ) -> TokenStream:
        check_features(x, self.embed_dim, "x")
        if memory is None:
            is_causal = self.is_causal if is_causal is None else is_causal
        else:
            check_features(memory, self.embed_dim, "memory")
        work = torch.promote_types(self.output_projection.weight.dtype, torch.float32)
        return token_stream(x, memory, self.num_heads, work, bool(is_causal), **call)

    def _project(self, x: Tensor, memory: Tensor | None, padding: Tensor | None) -> Projected:
        """Padded tokens enter at zero, whatever was there; so do damaged ones, which stay marked:
        a weight's gradient sums over all tokens, and zero times NaN is NaN."""
        if padding is not None and memory is None:
            x = x.masked_fill(padding[:, padding.shape[1] - x.shape[1] :, None], 0.0)
        elif padding is not None and memory is not None:
            memory = memory.masked_fill(padding[..., None], 0.0)
        x, lost = _heal(x)
        source, damaged = (x, lost) if memory is None else _heal(memory)
        query, key = self.query_projection(x), self.key_projection(source)
        value = self.value_projection(source)
        key = key.masked_fill(damaged[..., None], float("nan"))
        own = None if memory is None else self._heads(self.value_projection(x))
        return Projected(x, lost, self._heads(query), self._heads(key), self._heads(value), own)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, heads, tokens, 2d) in float32 or better."""
        work = torch.promote_types(x.dtype, torch.float32)
        return x.to(work).unflatten(-1, (self.num_heads, 2 * self.head_dim)).transpose(1, 2)

    def _merge(self, heads: Tensor, lost: Tensor, like: Tensor) -> Tensor:
        """(batch, heads, tokens, 2d) back through the output projection, in `like`'s dtype, NaN in
        rows that are lost, (batch, tokens)."""
        merged = heads.transpose(1, 2).flatten(2).to(self.output_projection.weight.dtype)
        output = self.output_projection(merged).to(like.dtype)
        return output.masked_fill(lost[..., None], float("nan"))

    def _angles(self, times: Tensor) -> Tensor:
        """(1 or batch, 1, tokens, d) radians."""
        return rotation_angles(times, self.frequencies()).unsqueeze(1)

    def _use_dense(self, query: Tensor, key: Tensor, need_weights: bool) -> bool:
        size = query.shape[:3].numel() * key.shape[2]
        few = self.backend == "auto" and size <= SMALL_PROBLEM
        return not size or few or need_weights or self.backend == "dense"


def _heal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (batch, tokens, features) with those that are not finite at zero, and which they are."""
    lost = damaged(x)
    return x.masked_fill(lost[..., None], 0.0), lost


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Norm (…,) and unit direction (…, n); vectors shorter than 1e-6 keep a shorter direction."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    return norm, x / norm.clamp_min(SMALLEST_NORM).unsqueeze(-1)
