"""Encoders of sounds and clips."""
