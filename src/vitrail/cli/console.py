"""What the commands say to a person: results on standard output, everything else on standard error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from vitrail.errors import VitrailError, VitrailWarning


class Patient(Console):
    """A console whose reader may leave (``vitrail train … | head -1``): it then says no more, and work goes on."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on, and give what is still buffered to nobody."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


out = Patient(highlight=False)
err = Patient(stderr=True, highlight=False)


def say(text: str, style: str = "") -> None:
    """Print a line of results; long paths are left in one piece."""
    out.print(Text(text, style=style), soft_wrap=True)


def note(text: str) -> None:
    """Print a yellow note."""
    err.print(Text.assemble(("Note: ", "bold yellow"), (" ".join(text.split()), "yellow")), soft_wrap=True)


def complain(text: str) -> None:
    """Print a red paragraph."""
    err.print(Text.assemble(("Error: ", "bold red"), (" ".join(text.split()), "red")), soft_wrap=True)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn each of our errors into one red paragraph and exit code 2; anything else is a bug and loud."""
    try:
        yield
    except VitrailError as error:
        complain(str(error))
        raise typer.Exit(2) from error


@contextmanager
def notes() -> Iterator[None]:
    """Show each of our warnings as a note, once; other libraries' warnings go their usual way."""
    seen: set[str] = set()
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, VitrailWarning):
                usual(message, category, filename, lineno, file, line)
            elif str(message) not in seen:
                seen.add(str(message))
                note(str(message))

        warnings.simplefilter("always", VitrailWarning)
        warnings.showwarning = show
        yield


def progress() -> Progress:
    """Give a progress bar that leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


@contextmanager
def bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Give what shows how far it is: one line for each thing that is done."""
    with progress() as shown:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage[:1].upper() + stage[1:], total=total)
            shown.update(tasks[stage], completed=done, total=total)

        yield tell
