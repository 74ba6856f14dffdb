"""Attention by squared distances and polar centroids."""
