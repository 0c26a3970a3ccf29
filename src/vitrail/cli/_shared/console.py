"""Terminal output: results on standard output, everything else on standard error."""

from __future__ import annotations

import io
import json
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from vitrail.errors import VitrailWarning

_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


WIDEST = 10_000
"""Width that no table needs."""


KEY = 24
"""Columns of a terminal that the first column of a table has at least, if it needs them."""


def printable(text: str) -> str:
    """Return text that can be shown: names of files and classes may hold escape sequences, or be no UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROL)


class PlainConsole(Console):
    """A console that prints text as it is: names are no markup, and their escape sequences are not passed on.

    It goes quiet if its pipe is closed (``vitrail train … | head -1``), so that work continues.
    """

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None) -> None:
        super().__init__(stderr=stderr, file=file, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text for a cell, a title or a line."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Discard buffered and further output."""
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())
        os.close(null)


out = PlainConsole()
err = PlainConsole(stderr=True)


@dataclass
class Output:
    """What the present command prints: text unless ``quiet``, or its results as JSON."""

    quiet: bool = False
    json: bool = False


output = Output()


class Bars(Progress):
    """Progress bars on standard error that know whether they are shown."""

    shown = 0

    def start(self) -> None:
        """Show the bars."""
        Bars.shown += not self.disable
        super().start()

    def stop(self) -> None:
        """Remove the bars."""
        Bars.shown -= self.live.is_started
        super().stop()


def say(text: str, style: str = "") -> None:
    """Print lines of results; above progress bars, where both are on one terminal."""
    if output.quiet or output.json:
        return
    console = err if Bars.shown and out.is_terminal else out
    console.print(Text(_wrapped(printable(text), console), style=style), soft_wrap=True)


def show(made: Table) -> None:
    """Print a table of results.

    Where it is too wide, columns that say the same in every row are said once, below it; the first column is never cut.
    """
    if output.quiet or output.json:
        return
    key = made.columns[0]
    key.min_width = min(max((cell_len(str(cell)) for cell in (key.header, *key.cells)), default=0), KEY)
    same: list[str] = []
    while Measurement.get(out, out.options.update(max_width=WIDEST), made).maximum > out.width:
        place = next((place for place in range(len(made.columns) - 1, 0, -1) if _is_constant(made.columns[place])), 0)
        if not place:
            break
        column = made.columns.pop(place)
        same.insert(0, f"{column.header} {next(iter(column.cells))}")
    out.print(made)
    if same:
        say(f"In every row: {', '.join(same)}")


def _is_constant(column: Column) -> bool:
    cells = [str(cell) for cell in column.cells]
    return len(cells) > 1 and len(set(cells)) == 1


def answer(values: Any) -> None:
    """Print the results as JSON if this is wanted."""
    if output.json:
        print_json(values)


def print_json(values: Any) -> None:
    """Print values as one line of JSON."""
    out.print(Text(json.dumps(values, ensure_ascii=False, allow_nan=False)), soft_wrap=True)


def note(text: str) -> None:
    """Print a yellow note, unless quiet."""
    if output.quiet:
        return
    _print_labeled("Note", text, "yellow")


def error(text: str) -> None:
    """Print a red error."""
    _print_labeled("Error", text, "red")


def _print_labeled(label: str, text: str, color: str) -> None:
    line = _wrapped(printable(" ".join(f"{label}: {text}".split())), err)
    shown = Text(line, style=color)
    shown.stylize("bold", 0, len(label) + 1)
    err.print(shown, soft_wrap=True)


def _wrapped(text: str, console: Console) -> str:
    """Return text wrapped between words for a terminal, and unchanged for a file; paths stay whole."""
    if not console.is_terminal:
        return text
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        keep = {"break_long_words": False, "break_on_hyphens": False}
        lines.append(textwrap.fill(line, console.width, subsequent_indent=indent, **keep))  # type: ignore[arg-type]
    return "\n".join(lines)


_flags: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
"""Options of the present command by the name of their argument: flags, and those that switch it off."""

_OPTION = re.compile(r"--[a-z]|(?<![\w-])-[a-z](?![\w-])")
_ARGUMENT = re.compile(r"(?<![\w.-])([a-z]\w*)=(?!=)(True\b|False\b)?(?=(\S?))")


def use_options(parameters: Iterable[Any]) -> None:
    """Let messages name the options of a command."""
    _flags.clear()
    options = (one for one in parameters if one.param_type_name == "option" and one.name)
    _flags.update({one.name: (one.opts, one.secondary_opts) for one in options})


def with_options(text: str) -> str:
    """Return a message of the library in terms of the present command: ``keep=0.5`` becomes ``--keep 0.5``.

    Arguments that the command has no option for stay, and so do messages that name options already.
    """
    if _OPTION.search(text):
        return text

    def option(match: re.Match[str]) -> str:
        name, truth, follows = match.groups()
        on, off = _flags.get(name, ((), ()))
        flags = off if truth == "False" else on
        if not flags:
            return match.group()
        if truth:
            return max(flags, key=len)
        return max(flags, key=len) + (" " if follows and follows not in ",.;:)" else "")

    return _ARGUMENT.sub(option, text)


@contextmanager
def notes() -> Iterator[None]:
    """Print each ``VitrailWarning`` once, as a note; other warnings are shown as usual."""
    seen: set[str] = set()
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, VitrailWarning):
                usual(message, category, *place, **more)
            elif str(message) not in seen:
                seen.add(str(message))
                note(with_options(str(message)))

        warnings.simplefilter("always", VitrailWarning)
        warnings.showwarning = show
        yield


def table(*columns: str, left: int = 1, title: str | None = None) -> Table:
    """Return an empty table whose first ``left`` columns are text and the others numbers."""
    made = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in made.columns[:left]:
        column.overflow = "fold"
    for column in made.columns[left:]:
        column.justify, column.no_wrap = "right", True
    return made


def status(text: str) -> Status:
    """Return a spinner with a text that may name a model or a file."""
    console = PlainConsole(file=io.StringIO()) if output.quiet else err
    return console.status(Text(printable(text)))


def progress() -> Bars:
    """Return a progress bar that disappears when done."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bars(*columns, console=err, transient=True, disable=output.quiet or not err.is_terminal)


@contextmanager
def bars() -> Iterator[Callable[..., None]]:
    """Yield a callback ``(stage, done, total, detail="")`` that draws a progress bar for each stage until done."""
    with progress() as shown:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int | None, detail: str = "") -> None:
            title = printable(f"{stage[:1].upper()}{stage[1:]}{detail}")
            if stage not in tasks:
                tasks[stage] = shown.add_task(title, total=total)
            shown.update(tasks[stage], description=title, completed=done, total=total, visible=done != total)

        yield update
