"""Digit and speaker of spoken digits: independent labels."""
