"""Terminal output: lines above progress bars, and wrapping between words."""

import io

import pytest
from rich.console import Console

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
