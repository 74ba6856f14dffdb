"""What both attention layers share: projections, times, rotation, masks, cache, choice of path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from .cache import FilterCache
from .masks import Visibility, check_attention_mask, check_padding_mask, rows_that_see
from .parameters import FilterScalars, RotaryFrequencies
from .transport import apply_rotation, check_times, relative_times, rotation, rotation_angles

__all__ = [
    "AttentionOptions",
    "AttentionWeights",
    "FilterAttention",
    "TokenStream",
    "check_choice",
    "quarantine",
    "rotate_pair",
    "rotation",
    "unit",
]

BACKENDS = ("auto", "dense", "chunked", "flex")
SMALLEST_NORM = 1e-6
# Up to this many weights the dense path is as light as any other.
SMALL_PROBLEM = 4096


class AttentionWeights(NamedTuple):
    """Attention weights for pictures, each (batch, heads, queries, keys); radial may be None."""

    directional: Tensor
    radial: Tensor | None


class TokenStream(NamedTuple):
    """Times and visibility of one call, settled before anything is computed.

    ahead: keys before query 0 where both stand on the default grid 0, 1, 2, …; None where times
        were given, or the streams differ.
    """

    view: Visibility
    ahead: int | None
    all_times: Tensor
    all_padding: Tensor | None


class AttentionOptions(TypedDict, total=False):
    """Keywords that all filter attention layers share; `FilterAttention` documents them."""

    head_dim: int | None
    causal: bool
    dropout: float
    base: float
    conjugate_frequencies: bool
    learn_frequencies: bool


class FilterAttention(nn.Module):
    """Multi-head scaffold over lifted complex heads; subclasses say what is estimated.

    Inputs are (batch, tokens, d_model). Weights are plain bias-free linear maps, real to complex
    and back (appendix F.1): a row with nothing to attend to comes out as exact zeros.

    Args:
        d_model: features of the residual stream.
        num_heads: heads H.
        head_dim: complex features d per head, default d_model // num_heads: the projections then
            map d_model real to 2·d_model real numbers (appendix F.1). d_model // (2·num_heads)
            gives the widths, and the parameters, of ordinary attention.
        causal: whether a token sees only tokens not later than itself, by time.
        dropout: dropout on the (directional) attention weights while training.
        base, conjugate_frequencies, learn_frequencies: angular frequencies, see
            `transport.rotary_frequencies`; they stay float32 whatever the module is cast to.
        rotary: False leaves out transport by rotation.
        backend: which path computes the estimate.

    Raises:
        ValueError: sizes or options that make no sense together.
    """

    scalars: nn.ModuleDict

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        causal: bool = True,
        dropout: float = 0.0,
        base: float = 10000.0,
        conjugate_frequencies: bool = True,
        learn_frequencies: bool = False,
        rotary: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if d_model < 1 or num_heads < 1:
            raise ValueError(f"need d_model, num_heads ≥ 1, got {d_model} and {num_heads}")
        if head_dim is None:
            if d_model % num_heads:
                raise ValueError(
                    f"d_model={d_model} is not divisible by num_heads={num_heads}; pass head_dim"
                )
            head_dim = d_model // num_heads
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        check_choice("backend", backend, BACKENDS)
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, head_dim
        self.causal, self.dropout, self.backend = causal, dropout, backend
        width = 2 * head_dim * num_heads
        self.query_projection = nn.Linear(d_model, width, bias=False)
        self.key_projection = nn.Linear(d_model, width, bias=False)
        self.value_projection = nn.Linear(d_model, width, bias=False)
        self.output_projection = nn.Linear(width, d_model, bias=False)
        self.rotary = rotary
        self.frequencies = RotaryFrequencies(
            head_dim, base, conjugate_pairs=conjugate_frequencies, learned=learn_frequencies
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Isotropic complex initialisation (appendix F.3): real and imaginary parts alike, variance
        1/d_model into the head, 1/width out of it."""
        for projection in (self.query_projection, self.key_projection, self.value_projection):
            nn.init.normal_(projection.weight, std=self.d_model**-0.5)
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
            f"d_model={self.d_model}, num_heads={self.num_heads}, head_dim={self.head_dim},"
            f" causal={self.causal}, backend={self.backend!r}"
        )

    def _hold_scalars(self, modules: Mapping[str, nn.Module | None]) -> None:
        """Keep those numbers of Algorithm 1 that this layer has."""
        self.scalars = nn.ModuleDict({k: v for k, v in modules.items() if v is not None})

    def _read_scalars(self, **others: Tensor) -> FilterScalars:
        """The current values, each (heads,), float32 or better; absent ones leave no effect."""
        reference = next(iter(self.scalars.parameters()))
        ones = torch.ones(self.num_heads, device=reference.device, dtype=reference.dtype)
        values = dict.fromkeys(FilterScalars._fields, ones)
        values |= {"decay": ones * 0, "process_noise": ones * 0}
        values |= {name: module() for name, module in self.scalars.items()}
        return FilterScalars(**(values | others))

    def _check_features(self, x: Tensor, name: str) -> None:
        if x.dim() != 3 or x.shape[-1] != self.d_model or not x.is_floating_point():
            raise ValueError(
                f"{name} must be floating, of shape (batch, tokens, {self.d_model}), got"
                f" {tuple(x.shape)} {x.dtype}"
            )

    def _stream(
        self,
        x: Tensor,
        memory: Tensor | None,
        times: Tensor | None,
        memory_times: Tensor | None,
        padding: Tensor | None,
        mask: Tensor | None,
        cache: FilterCache | None,
        causal: bool | None,
    ) -> TokenStream:
        self._check_features(x, "x")
        batch, tokens, _ = x.shape
        if memory is None:
            if memory_times is not None:
                raise ValueError("memory_times were given without memory")
            causal = self.causal if causal is None else causal
            stream = self._self_stream(x, times, padding, cache, causal)
        else:
            if cache is not None:
                raise ValueError("a cache holds self-attention's tokens; pass memory without it")
            stream = self._cross_stream(x, memory, times, memory_times, padding, bool(causal))
        if mask is not None:
            keys = stream.view.key_times.shape[1]
            mask = check_attention_mask(mask, batch, self.num_heads, tokens, keys)
            stream = stream._replace(view=stream.view._replace(mask=mask))
        return stream

    def _self_stream(
        self,
        x: Tensor,
        times: Tensor | None,
        padding: Tensor | None,
        cache: FilterCache | None,
        causal: bool,
    ) -> TokenStream:
        batch, tokens, _ = x.shape
        before = 0 if cache is None else cache.length
        regular = times is None
        if regular:
            if cache is not None and not cache.regular:
                raise ValueError("the cached tokens came with times; pass times for these, too")
            new = _grid(before, tokens, x.device)
        else:
            assert times is not None
            if cache is not None and before and cache.regular:
                raise ValueError("the cached tokens came without times; pass none for these, too")
            new = check_times(times.to(x.device), batch, tokens)
        if padding is not None and cache is None:
            check_padding_mask(padding, batch, tokens)
        if cache is not None:
            padding = cache.extend_padding(padding, batch, tokens)
        if padding is not None and not regular:
            new = _fill_padded_times(new, padding[:, -tokens:] if tokens else padding, cache)
        everything = new if cache is None else cache.extend_times(new)
        key_times, _ = relative_times(everything)
        view = Visibility(key_times[:, before:], key_times, causal, regular, padding)
        return TokenStream(view, before if regular else None, everything, padding)

    def _cross_stream(
        self,
        x: Tensor,
        memory: Tensor,
        times: Tensor | None,
        memory_times: Tensor | None,
        padding: Tensor | None,
        causal: bool,
    ) -> TokenStream:
        self._check_features(memory, "memory")
        if memory.shape[0] != x.shape[0]:
            raise ValueError(f"memory has batch {memory.shape[0]}, x has {x.shape[0]}")
        if (times is None) != (memory_times is None):
            raise ValueError("pass times and memory_times on one clock, or neither")
        batch, queries, keys = x.shape[0], x.shape[1], memory.shape[1]
        if padding is not None:
            check_padding_mask(padding, batch, keys)
        if times is None or memory_times is None:
            own, theirs = _grid(0, queries, x.device), _grid(0, keys, x.device)
            ahead: int | None = 0
        else:
            own = check_times(times.to(x.device), batch, queries)
            theirs = check_times(memory_times.to(x.device), batch, keys, "memory_times")
            if padding is not None:
                theirs = _fill_padded_times(theirs, padding, None)
            ahead = None
        key_times, origin = relative_times(theirs)
        query_times, _ = relative_times(own, origin)
        return TokenStream(
            Visibility(query_times, key_times, causal, times is None, padding),
            ahead,
            theirs,
            padding,
        )

    def _project(
        self, x: Tensor, memory: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """x, memory (padded tokens at zero, whatever was there), and query, key, value of them."""
        if padding is not None and memory is None:
            x = x.masked_fill(padding[:, -x.shape[1] :, None], 0.0)
        elif padding is not None and memory is not None:
            memory = memory.masked_fill(padding[..., None], 0.0)
        source = x if memory is None else memory
        query, key = self.query_projection(x), self.key_projection(source)
        return x, memory, query, key, self.value_projection(source)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, heads, tokens, 2d) in float32 or better."""
        work = torch.promote_types(x.dtype, torch.float32)
        return x.to(work).unflatten(-1, (self.num_heads, 2 * self.head_dim)).transpose(1, 2)

    def _merge(self, heads: Tensor, like: Tensor) -> Tensor:
        """(batch, heads, tokens, 2d) back through the output projection, in `like`'s dtype."""
        merged = heads.transpose(1, 2).flatten(2).to(self.output_projection.weight.dtype)
        return self.output_projection(merged).to(like.dtype)

    def _angles(self, times: Tensor) -> Tensor:
        """(1 or batch, 1, tokens, d) radians."""
        angles = rotation_angles(times, self.frequencies())
        if not self.rotary:
            angles = torch.zeros_like(angles)
        return angles.unsqueeze(1)

    def _use_dense(self, query: Tensor, keys: int, need_weights: bool) -> bool:
        few = query.shape[0] * query.shape[1] * query.shape[2] * keys <= SMALL_PROBLEM
        return need_weights or self.backend == "dense" or (self.backend == "auto" and few)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse an option that is none of its choices, with a ValueError that lists them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _grid(start: int, tokens: int, device: torch.device) -> Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.arange(start, start + tokens, device=device, dtype=dtype).unsqueeze(0)


def _fill_padded_times(times: Tensor, padding: Tensor, cache: FilterCache | None) -> Tensor:
    """Give padded tokens the time of the first real one, so that theirs, whatever it is, is
    unused.
    """
    times = times.expand(padding.shape)
    first = times.gather(1, (~padding).to(torch.uint8).argmax(1, keepdim=True))
    if cache is not None and cache.origin is not None:
        first = cache.origin.expand_as(first)
    return torch.where(padding, first, times)


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Norm (…,) and unit direction (…, n); vectors shorter than 1e-6 keep a shorter direction."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    return norm, x / norm.clamp_min(SMALLEST_NORM).unsqueeze(-1)


def rotate_pair(x: Tensor, turn: tuple[Tensor, Tensor], *, inverse: bool = False) -> Tensor:
    """Rotate (…, tokens, 2d) by cosine and sine (…, tokens, d)."""
    return apply_rotation(x, *turn, inverse=inverse)


def quarantine(view: Visibility, *tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Replace keys that are not finite by zeros; say which queries see one, (batch, 1 or heads, q).

    Args:
        tensors: per-key features (batch, heads, keys, 2d) or magnitudes (batch, heads, keys).
    """
    damaged = torch.zeros((), dtype=torch.bool, device=tensors[0].device)
    for tensor in tensors:
        bad = ~torch.isfinite(tensor)
        damaged = damaged | (bad.any(-1) if tensor.dim() == 4 else bad).any(1)
    clean = [
        t.masked_fill(damaged[:, None, :, None] if t.dim() == 4 else damaged[:, None], 0.0)
        for t in tensors
    ]
    return clean, rows_that_see(damaged, view)
