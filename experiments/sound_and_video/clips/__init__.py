"""Clips of moving shapes, whose patches of space and time merge."""
