"""Optimizers, the learning rate schedule, and weight averaging."""
