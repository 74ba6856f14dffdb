"""Attention masks: one convention, checked and converted in one place.

- `attn_mask`, boolean: True where a query **may attend** to a key, as in
  `torch.nn.functional.scaled_dot_product_attention` (and the opposite of
  `torch.nn.MultiheadAttention`). Floating: added to the scores, −inf excludes.
- `key_padding_mask`, boolean: True where a key **is padding**, as in `torch.nn.MultiheadAttention`.
- Integers are refused: 0 and 1 could mean either of the three.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["additive_mask", "check_attention_mask", "check_padding_mask"]


def check_padding_mask(
    mask: Tensor, batch: int, keys: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a mask (batch, keys), True where a key is padding, after checking it.

    Args:
        mask: boolean; floating, to be added to the scores, only where `dtype` is given.
        dtype: what the scores are computed in.

    Raises:
        TypeError: the mask is an integer one, or floating where none is taken or of a wider dtype.
        ValueError: it has another shape.

    Example:
        >>> import torch
        >>> from rpt.geometry.masks import check_padding_mask
        >>> check_padding_mask(torch.tensor([[True, False]]), batch=1, keys=2)
        tensor([[ True, False]])
    """
    _check_dtype("key_padding_mask", mask, "True where a key is padding", dtype)
    if mask.shape != (batch, keys):
        raise ValueError(
            f"key_padding_mask must have shape ({batch}, {keys}), got {tuple(mask.shape)}"
        )
    return mask


def check_attention_mask(
    mask: Tensor,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return an attention mask as (1 or batch, 1 or heads, queries, keys), a view, after checking.

    Args:
        mask: boolean (True: may attend) or floating (added to the scores), of shape (queries, keys),
            (batch, queries, keys) or (batch, heads, queries, keys); sizes of 1 broadcast.
        dtype: what the scores are computed in; a floating mask of a wider dtype is refused.

    Raises:
        TypeError: the mask is neither boolean nor floating, or its dtype is wider than `dtype`.
        ValueError: it has another shape.

    Example:
        >>> import torch
        >>> from rpt.geometry.masks import check_attention_mask
        >>> causal = torch.ones(4, 4, dtype=torch.bool).tril()
        >>> check_attention_mask(causal, batch=2, heads=3, queries=4, keys=4).shape
        torch.Size([1, 1, 4, 4])
    """
    _check_dtype("attn_mask", mask, "True where a query may attend", dtype)
    full = mask
    if full.dim() == 2:
        full = full[None, None]
    elif full.dim() == 3:
        full = full.unsqueeze(1)
    sizes = (batch, heads, queries, keys)
    if full.dim() != 4 or any(
        have not in (1, want) for have, want in zip(full.shape, sizes, strict=True)
    ):
        raise ValueError(
            f"attn_mask must have shape ({queries}, {keys}), ({batch}, {queries}, {keys}) or"
            f" ({batch}, {heads}, {queries}, {keys}), where sizes of 1 broadcast, got"
            f" {tuple(mask.shape)}"
        )
    return full.expand(-1, -1, queries, keys)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores: 0 where `allowed`, −inf elsewhere; a floating mask is only cast.

    Example:
        >>> import torch
        >>> from rpt.geometry.masks import additive_mask
        >>> additive_mask(torch.tensor([True, False]), torch.float32)
        tensor([0., -inf])
    """
    if allowed.dtype != torch.bool:
        return allowed.to(dtype)
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, -torch.inf)


def _check_dtype(name: str, mask: Tensor, meaning: str, dtype: torch.dtype | None) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
    if mask.dtype == torch.bool:
        return
    if dtype is None or not mask.is_floating_point():
        other = "" if dtype is None else " or floating (added to the scores)"
        raise TypeError(
            f"{name} must be boolean ({meaning}){other}, got {mask.dtype}: pass {name}.bool() if"
            " its ones mean True"
        )
    if torch.promote_types(mask.dtype, dtype) != dtype:
        raise TypeError(
            f"{name} is {mask.dtype} but the scores are {dtype}: pass {name}.to({dtype})"
        )
