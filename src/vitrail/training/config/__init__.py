"""The training configuration."""
