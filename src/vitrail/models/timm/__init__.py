"""Conversion between timm's models and ours."""
