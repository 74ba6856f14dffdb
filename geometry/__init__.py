"""Layers that declare their own observation boundaries."""
