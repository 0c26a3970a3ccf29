"""Commands that several processes run together: the first one speaks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from vitrail._distributed import LinkLost, SaidElsewhere, told
from vitrail.cli import console

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
        if told() is None:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


@contextmanager
def one_speaks(*silent: Console) -> Iterator[None]:
    """Let only the first process print results; what the others find wrong by themselves they still say.

    ``silent`` are the consoles on which the others say nothing: by default that of results.
    """
    rank, _ = told() or (0, 1)
    before = {one: one.quiet for one in (silent or (console.out,) if rank else ())}
    try:
        for one in before:
            one.quiet = True
        yield
    finally:
        for one, quiet in before.items():
            one.quiet = quiet


@contextmanager
def said_once() -> Iterator[None]:
    """Leave it to the first process to tell what all of them found, and wait until it did.

    A process that lost the others ends at once: threads of a broken connection would crash it on its way out.
    """
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
