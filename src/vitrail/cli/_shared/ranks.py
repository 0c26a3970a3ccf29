"""What every command runs in: errors without a traceback; under torchrun, one rank that prints and a clean exit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console

from vitrail._distributed import ConnectionLost, ReportedByMain, is_first_to_report, torchrun_rank
from vitrail.cli._shared import console
from vitrail.errors import VitrailError

EXIT_DELAY = 2.0
"""Seconds that other ranks wait before they exit with an error: torchrun then stops the first one, too."""

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM, as shells have them."""

SMALLER = "Use a smaller batch or input size, fewer workers, or a smaller model."


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
def command(*silent: Console, interrupted: str = "Interrupted.") -> Iterator[None]:
    """Report a ``VitrailError`` without a traceback (exit code 2), and each warning of Vitrail once, as a note.

    An interrupt (Ctrl-C) is reported in a line, too (exit code 130).

    All ranks but the first print nothing to the consoles in ``silent`` (results by default). An error that all ranks
    share is reported by the first; a rank that lost the others exits at once, because threads of a broken connection
    would crash its teardown. ``interrupted`` is the line after an interrupt.
    """
    rank, _ = torchrun_rank() or (0, 1)
    try:
        with ExitStack() as stack:
            stack.enter_context(_terminable())
            for each in (silent or (console.out,)) if rank else ():
                stack.callback(setattr, each, "quiet", each.quiet)
                each.quiet = True
            stack.enter_context(console.notes())
            yield
    except ReportedByMain as problem:
        time.sleep(EXIT_DELAY)
        raise typer.Exit(2) from problem
    except VitrailError as problem:
        lost = isinstance(problem, ConnectionLost)
        if not lost or is_first_to_report():
            console.error(console.with_options(str(problem)))
        if lost:
            _exit(2)
        raise typer.Exit(2) from problem
    except (torch.OutOfMemoryError, MemoryError) as problem:
        console.error(f"out of memory. {SMALLER}")
        raise typer.Exit(2) from problem
    except RuntimeError as problem:
        if "can't allocate memory" not in str(problem):
            raise
        console.error(f"out of memory. {SMALLER}")
        raise typer.Exit(2) from problem
    except KeyboardInterrupt as stop:
        if not isinstance(stop, Terminated):
            if not rank:
                console.error(interrupted)
            raise typer.Exit(INTERRUPTED) from stop
        if torchrun_rank() is None:
            console.error("Terminated.")
        elif is_first_to_report():  # rank 0 may be the one that ended
            console.error("Terminated. torchrun ends every rank when one ends; its report names the first.")
        raise typer.Exit(TERMINATED) from stop


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: an interrupt that cleans up as Ctrl-C does."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, so that no temporary file is left."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> NoReturn:
        raise Terminated

    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
