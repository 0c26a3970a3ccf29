"""Merging on clips of moving shapes, with patches of space and time."""
