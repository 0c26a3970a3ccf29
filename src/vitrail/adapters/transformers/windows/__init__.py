"""Encoders whose layers attend in windows."""
