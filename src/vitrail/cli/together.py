"""Commands that several processes run together: the first one speaks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from vitrail.cli import console

SEVERAL = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""What torchrun tells each of several processes."""

PAUSE = 2.0
"""Seconds that the others wait before they end with an error: torchrun then ends the first one, too."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let one of several processes end as soon as all is done and written, with the code that it ends with anyway.

    Threads of the link between processes can crash it while Python takes itself down, and torchrun would then take the
    whole job for failed.
    """
    try:
        yield
    except SystemExit as end:
        if any(name not in os.environ for name in SEVERAL) or os.environ["WORLD_SIZE"] == "1":
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


@contextmanager
def one_speaks() -> Iterator[None]:
    """Let only the first process print results; what the others find wrong by themselves they still say."""
    if os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    before = console.out.quiet
    console.out.quiet = True
    try:
        yield
    finally:
        console.out.quiet = before


@contextmanager
def said_once() -> Iterator[None]:
    """Leave it to the first process to tell what all of them found, and wait until it did.

    A process that lost the others ends at once: threads of a broken connection would crash it on its way out.
    """
    from vitrail.training.distributed import LinkLost, SaidElsewhere

    try:
        yield
    except LinkLost as error:
        console.complain(str(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)
    except SaidElsewhere as error:
        time.sleep(PAUSE)
        raise typer.Exit(2) from error
