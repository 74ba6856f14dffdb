"""Radial–tangential filter."""
from .attention import PolarAttention
