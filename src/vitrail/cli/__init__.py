"""The command line: thin, and quick to start; commands import what is heavy when they run."""

from vitrail.cli.app import app, main

__all__ = ["app", "main"]
