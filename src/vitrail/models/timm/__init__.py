"""Conversion between ``vitrail.ViT`` and timm models."""
