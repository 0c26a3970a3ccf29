"""Terminal output: lines above progress bars, and wrapping between words."""

import io
import json

import pytest
from rich.console import Console
from rich.table import Table

from vitrail.cli._shared import console


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard output and standard error as one terminal of 40 columns."""
    screen = io.StringIO()
    for name in ("out", "err"):
        made = Console(file=screen, force_terminal=True, color_system=None, width=40, highlight=False)
        monkeypatch.setattr(console, name, made)
    return screen


def visible(screen: io.StringIO) -> list[str]:
    """Return the lines that stay on a screen: what follows the last control sequence of each line."""
    return [line.rpartition("\x1b[2K")[2].rpartition("\x1b[?25h")[2] for line in screen.getvalue().split("\n")]


def test_lines_and_bars_do_not_share_a_line(terminal: io.StringIO) -> None:
    with console.bars() as update:
        update("training", 4, 40, ", epoch 1, loss 2.3")
        assert console.Bars.shown == 1
        console.say("step 4 of 40  label 50.00 %")
    assert console.Bars.shown == 0
    assert "step 4 of 40  label 50.00 %" in visible(terminal)


def test_bars_that_are_not_shown_leave_results_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: io.StringIO() for name in ("out", "err")}
    for name, file in files.items():
        monkeypatch.setattr(console, name, Console(file=file, width=20))
    with console.progress():
        console.say("a result that is longer than the width of the console")
    assert files["out"].getvalue() == "a result that is longer than the width of the console\n"
    assert files["err"].getvalue() == ""


def test_a_terminal_gets_lines_broken_between_words(terminal: io.StringIO) -> None:
    path = "/a/folder/with/a/name/that/is/longer/than/a/line/of/forty/columns"
    console.say(f"  written to {path} in time, and all is well with it")
    console.note("one two three four five six seven eight nine ten eleven")
    lines = terminal.getvalue().splitlines()
    assert lines == [
        "  written to",
        f"  {path}",
        "  in time, and all is well with it",
        "Note: one two three four five six seven",
        "eight nine ten eleven",
    ]


def wide_table() -> Table:
    made = console.table("image", "tokens", "cosine", "top-1 before and after")
    for name in ("astronaut-in-space.jpg", "chelsea.jpg"):
        made.add_row(name, "262 → 70", "0.9863" if "a" in name[:1] else "0.9748", "same")
    return made


def test_a_wide_table_keeps_its_first_column_and_says_constant_values_once(terminal: io.StringIO) -> None:
    console.show(wide_table())
    shown = terminal.getvalue()
    assert "astronaut-in-space.jpg" in shown
    assert "0.9748" in shown
    assert " ".join(shown.split()).endswith("In every row: tokens 262 → 70, top-1 before and after same")


def test_a_table_that_fits_is_printed_as_it_is(terminal: io.StringIO) -> None:
    made = console.table("image", "tokens")
    made.add_row("a.png", "70")
    made.add_row("b.png", "70")
    console.show(made)
    assert terminal.getvalue().count("70") == 2
    assert "In every row" not in terminal.getvalue()


def test_quiet_prints_errors_alone(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.output, "quiet", True)
    console.say("a line")
    console.show(wide_table())
    console.note("a note")
    console.answer({"a": 1})
    with console.status("loading"), console.bars() as update:
        update("training", 1, 2)
    console.error("no such model")
    assert terminal.getvalue().strip() == "Error: no such model"


def test_json_takes_the_place_of_text(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.output, "json", True)
    console.say("a line")
    console.show(wide_table())
    console.answer({"name": "é" * 60})
    console.note("a note")
    line, noted = terminal.getvalue().strip().split("\n")
    assert json.loads(line) == {"name": "é" * 60}
    assert noted == "Note: a note"
