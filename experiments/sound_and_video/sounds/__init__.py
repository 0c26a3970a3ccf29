"""Spoken digits as spectrograms, whose patches merge."""
