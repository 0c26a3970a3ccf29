"""Merging on spectrograms of spoken digits."""
