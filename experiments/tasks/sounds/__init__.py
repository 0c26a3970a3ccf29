"""Digit and speaker of what was said: labels that are independent of each other."""
