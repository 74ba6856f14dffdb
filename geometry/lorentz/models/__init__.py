"""Whole models: Polar-ViT and the polar U-Net."""
