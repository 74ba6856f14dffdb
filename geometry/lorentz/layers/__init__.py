"""Layers that map points to points."""
