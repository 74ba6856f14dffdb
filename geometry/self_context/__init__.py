"""Self-context layers: an activation builds a local metric and rereads itself through it."""

from .blocks import ContextMLP, ContextTransformerBlock
from .layers import LELU, SoftEikonalLinear

__all__ = ["LELU", "ContextMLP", "ContextTransformerBlock", "SoftEikonalLinear"]
