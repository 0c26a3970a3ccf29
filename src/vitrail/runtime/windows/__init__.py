"""Merging inside windows: numbers of tiles (`tiling`), blocks that merge (`block`), attention rows (`attention`)."""
