"""Commands that several processes run together: the first one speaks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from vitrail.cli import console

PAUSE = 2.0
"""Seconds that the others wait before they end with an error: torchrun then ends the first one, too."""


def place_among() -> tuple[int, int] | None:
    """Give this process's number and how many there are, as torchrun tells; None where it is alone."""
    told = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    return None if None in told or told[1] == "1" else (int(told[0] or 0), int(told[1] or 1))


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let one of several processes end as soon as all is done and written, with the code that it ends with anyway.

    Threads of the link between processes can crash it while Python takes itself down, and torchrun would then take the
    whole job for failed.
    """
    try:
        yield
    except SystemExit as end:
        if place_among() is None:
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
