"""Commands under torchrun: only the first rank prints, and all ranks exit cleanly."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

from vitrail._distributed import ConnectionLost, ReportedByMain, torchrun_rank
from vitrail.cli._shared import console

EXIT_DELAY = 2.0
"""Seconds that other ranks wait before they exit with an error: torchrun then stops the first one, too."""


@contextmanager
def exit_at_once() -> Iterator[None]:
    """Exit a rank with its exit code, but without Python's teardown.

    Threads of the process group can crash during teardown, and torchrun would report the whole job as failed.
    """
    try:
        yield
    except SystemExit as end:
        if torchrun_rank() is None:
            raise
        _exit(end.code if isinstance(end.code, int) else int(end.code is not None))


@contextmanager
def first_rank_prints(*silent: Console) -> Iterator[None]:
    """Silence these consoles (results by default) on all ranks but the first; errors of their own are still printed."""
    rank, _ = torchrun_rank() or (0, 1)
    before = {each: each.quiet for each in (silent or (console.out,) if rank else ())}
    try:
        for each in before:
            each.quiet = True
        yield
    finally:
        for each, quiet in before.items():
            each.quiet = quiet


@contextmanager
def first_rank_reports() -> Iterator[None]:
    """Let the first rank report an error that all ranks share, and wait until it did.

    A rank that lost the others exits at once, because threads of a broken connection would crash its teardown.
    """
    try:
        yield
    except ConnectionLost as problem:
        console.error(str(problem))
        _exit(2)
    except ReportedByMain as problem:
        time.sleep(EXIT_DELAY)
        raise typer.Exit(2) from problem


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
