"""Times, causality and masks of one call, settled before anything is computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import check_attention_mask, check_padding_mask
from .cache import FilterCache
from .transport import check_times, relative_times
from .visibility import Visibility

__all__ = ["TokenStream", "check_features", "token_stream"]


class TokenStream(NamedTuple):
    """Times and visibility of one call.

    ahead: keys before query 0 where both stand on the default grid 0, 1, 2, …; None where times
        were given, or the streams differ.
    tokens: what a cache keeps of them: absolute times, padding, and whether they are on the grid.
    """

    view: Visibility
    ahead: int | None
    tokens: tuple[Tensor, Tensor | None, bool]


def check_features(x: Tensor, features: int, name: str) -> None:
    """Refuse what is not floating (batch, tokens, features), with a ValueError."""
    if x.dim() != 3 or x.shape[-1] != features or not x.is_floating_point():
        raise ValueError(
            f"{name} must be floating, of shape (batch, tokens, {features}), got {tuple(x.shape)}"
            f" {x.dtype}"
        )


def token_stream(
    x: Tensor,
    memory: Tensor | None,
    heads: int,
    work: torch.dtype,
    is_causal: bool,
    *,
    times: Tensor | None = None,
    memory_times: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    cache: FilterCache | None = None,
) -> TokenStream:
    """The stream of x alone, after what the cache holds, or of x over a memory, or the errors that
    `FilterAttention.forward` promises. work: dtype of the scores.
    """
    if memory is None:
        if memory_times is not None:
            raise ValueError("memory_times were given without memory")
        stream = _self_stream(x, times, key_padding_mask, cache, is_causal)
    else:
        if cache is not None:
            raise ValueError("a cache holds self-attention's tokens; pass memory without it")
        stream = _cross_stream(x, memory, times, memory_times, key_padding_mask, is_causal)
    if attn_mask is not None:
        sizes = (x.shape[0], heads, x.shape[1], stream.view.key_times.shape[1])
        attn_mask = check_attention_mask(attn_mask, *sizes, dtype=work)
        stream = stream._replace(view=stream.view._replace(mask=attn_mask))
    return stream


def _self_stream(
    x: Tensor,
    times: Tensor | None,
    padding: Tensor | None,
    cache: FilterCache | None,
    causal: bool,
) -> TokenStream:
    batch, tokens, _ = x.shape
    cache = FilterCache() if cache is None else cache
    before, regular = cache.length, times is None
    if times is None:
        if not cache.regular:
            raise ValueError("the cached tokens came with times; pass times for these, too")
        new = _grid(before, tokens, x.device)
    else:
        if before and cache.regular:
            raise ValueError("the cached tokens came without times; pass none for these, too")
        new = check_times(times.to(x.device), batch, tokens)
    if padding is not None:
        both = before and isinstance(padding, Tensor) and padding.shape[-1:] != (tokens,)
        check_padding_mask(padding, batch, before + tokens if both else tokens)
    padding = cache.extend_padding(padding, batch, tokens)
    if padding is not None and times is not None:
        origin = cache.times[:, :1] if cache.times is not None and before else None
        new = _fill_padded_times(new, padding[:, before:], origin)
    everything = cache.extend_times(new)
    key_times = relative_times(everything)
    view = Visibility(key_times[:, before:], key_times, causal, padding)
    return TokenStream(view, before if regular else None, (everything, padding, regular))


def _cross_stream(
    x: Tensor,
    memory: Tensor,
    times: Tensor | None,
    memory_times: Tensor | None,
    padding: Tensor | None,
    causal: bool,
) -> TokenStream:
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
    origin = (theirs if keys else own)[:, :1]
    key_times = relative_times(theirs, origin)
    query_times = relative_times(own, origin)
    return TokenStream(
        Visibility(query_times, key_times, causal, padding),
        ahead,
        (theirs, padding, times is None),
    )


def _grid(start: int, tokens: int, device: torch.device) -> Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.arange(start, start + tokens, device=device, dtype=dtype).unsqueeze(0)


def _fill_padded_times(times: Tensor, padding: Tensor, origin: Tensor | None) -> Tensor:
    """Give padded tokens the first real one's time, or the origin, so that theirs is unused."""
    times = times.expand(padding.shape)
    if not padding.shape[1]:
        return times
    first = times.gather(1, (~padding).to(torch.uint8).argmax(1, keepdim=True))
    if origin is not None:
        first = origin.expand_as(first)
    return torch.where(padding, first, times)
