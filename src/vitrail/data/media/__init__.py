"""Clips and sounds: their files, decoding, and what a model sees of one."""
