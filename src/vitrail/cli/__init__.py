"""The command line: one file per command, which imports heavy modules only when it runs."""

from vitrail.cli._app import app, main

__all__ = ["app", "main"]
