"""Error reporting and exit codes of the commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer

from vitrail.errors import VitrailError

EXTRAS = "train,plot,data,timm"
"""Extras of Vitrail that the studies need."""

REPORTED = (VitrailError, OSError, ModuleNotFoundError)
"""Errors reported without a traceback."""

INTERRUPTED, FAILED, INVALID, UNFINISHED = 130, 1, 2, 3
"""Exit codes: interrupted, runs failed, invalid options or data, no time left for some runs."""

EXIT_CODES = (INTERRUPTED, FAILED, INVALID, UNFINISHED, 0)
"""All exit codes, the most severe first."""


def format_error(error: VitrailError | OSError | ModuleNotFoundError, options: str) -> str:
    """Return the message of an error; for system errors with the file, and the options that set another one."""
    if isinstance(error, VitrailError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; run pip install -e '.[{EXTRAS}]' in the checkout"
    return f"{error.filename}: {error.strerror}. Expected a writable path; set another one with {options}"


@contextmanager
def exit_on_error(options: str) -> Iterator[None]:
    """Exit with code 2 and the message of `format_error` instead of a traceback."""
    try:
        yield
    except REPORTED as error:
        typer.echo(format_error(error, options), err=True)
        raise typer.Exit(INVALID) from error


def worst_exit_code(codes: Iterable[int]) -> int:
    """Return the most severe of several exit codes; an unknown code counts as a failure."""
    known = {code if code in EXIT_CODES else FAILED for code in codes}
    return next(code for code in EXIT_CODES if code in known)
