"""Norms of patch tokens: distributions, the artifact threshold, tests for a second mode."""
