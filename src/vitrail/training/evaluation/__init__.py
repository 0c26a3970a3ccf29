"""Evaluation: outputs, metrics, token diagnostics, and their result."""
