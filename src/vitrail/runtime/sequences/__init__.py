"""Sequences beyond one grid per image: several images in one, and fewer visual tokens for a language model."""
