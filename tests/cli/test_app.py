"""The command line itself: help, version, and notes."""

import os
import subprocess
import sys
import warnings

import pytest
from typer.testing import CliRunner

import vitrail
from vitrail.cli import app, console
from vitrail.errors import SaturatedWarning


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.strip()) == (0, f"vitrail {vitrail.__version__}")


def test_help_names_the_commands_and_gives_examples() -> None:
    assert CliRunner().invoke(app, []).output.count("merge") >= 1
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert "merge" in text
    assert "demo" in text
    text = CliRunner().invoke(app, ["merge", "-h"]).stdout
    assert "Examples" in text
    assert "--random-weights" in text
    assert "Example" in CliRunner().invoke(app, ["demo", "-h"]).stdout


def test_notes_show_each_of_our_warnings_once_and_leave_others_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with console.notes():
            warnings.warn("not ours", DeprecationWarning, stacklevel=1)
            for text in ("too\nmany", "too\nmany", "others"):
                warnings.warn(text, SaturatedWarning, stacklevel=1)
    assert [str(warning.message) for warning in others] == ["not ours"]
    assert capsys.readouterr().err == "Note: too many\nNote: others\n"


def test_paths_and_markup_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = "/a/folder/[red]with/a/long/name/" + "x" * 100
    console.say(text)
    console.complain(text)
    captured = capsys.readouterr()
    assert captured.out == f"{text}\n"
    assert captured.err == f"Error: {text}\n"


def test_a_reader_that_leaves_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        patient = console.Patient(file=file)
        for _ in range(3):
            patient.print("nobody reads this")
        assert patient.quiet
    code = "from vitrail.cli import console\nfor i in range(9999): console.say('x' * 99)\nconsole.note('the end')"
    piped = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{code}" | head -1'], capture_output=True, text=True)
    assert piped.stdout == f"{'x' * 99}\n"
    assert piped.stderr == "Note: the end\n"
