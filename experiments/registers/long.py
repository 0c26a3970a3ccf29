"""Alias of `experiments.registers.large_models`: ``python -m experiments.registers.long``."""

import typer

from experiments.registers.large_models import main

if __name__ == "__main__":
    typer.run(main)
