"""The application: help, version, notes and pipes."""

import os
import subprocess
import sys
import warnings

import pytest
from typer.testing import CliRunner

import vitrail
from vitrail.cli import app
from vitrail.cli._app import COMMANDS, GROUPS
from vitrail.cli._shared import console
from vitrail.errors import SaturatedWarning


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.strip()) == (0, f"vitrail {vitrail.__version__}")


def test_help_lists_the_commands() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert all(command in text for command in COMMANDS)
    assert "merge" in CliRunner().invoke(app, []).output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_examples(command: str) -> None:
    text = CliRunner().invoke(app, [command, "-h"]).stdout
    assert f"vitrail {command}" in text
    assert "Example" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_quiet(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).stdout
    assert "--json" in text
    assert "--quiet" in text


def test_help_groups_all_commands() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    places = [text.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places)
    assert [place for place in COMMANDS if f"│ {place} " not in text] == []


@pytest.mark.parametrize(("words", "found"), [("vitrail insp", ["inspect"]), ("vitrail inspect --no-c", ["--no-cure"])])
def test_a_shell_completes_commands_and_options(words: str, found: list[str]) -> None:
    place = str(len(words.split()) - 1)
    shell = {"_VITRAIL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    assert CliRunner().invoke(app, [], prog_name="vitrail", env=shell).stdout.split() == found


def test_help_starts_fast() -> None:
    """Only torch, typer and rich are loaded; commands import the rest when they run."""
    code = (
        "import sys\n"
        "from vitrail.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "print(*sys.modules, sep='\\n')\n"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "vitrail.cli" in loaded
    optional = {"PIL", "timm", "transformers", "torchvision", "matplotlib", "sklearn", "scipy", "onnx", "pyarrow"}
    own = {f"vitrail.{name}" for name in ("bench", "export", "report", "analysis", "training.trainer", "drawing")}
    assert loaded.isdisjoint(optional | own | {"torch._dynamo", "torch._inductor"})


def test_notes_print_each_vitrail_warning_once(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with console.notes():
            warnings.warn("not ours", DeprecationWarning, stacklevel=1)
            for text in ("too\nmany", "too\nmany", "others"):
                warnings.warn(text, SaturatedWarning, stacklevel=1)
    assert [str(warning.message) for warning in others] == ["not ours"]
    assert capsys.readouterr().err == "Note: too many\nNote: others\n"


def test_paths_and_markup_are_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    text = "/a/folder/[red]with/a/long/name/" + "x" * 100
    console.say(text)
    console.error(text)
    captured = capsys.readouterr()
    assert captured.out == f"{text}\n"
    assert captured.err == f"Error: {text}\n"


def test_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        pipe = console.PlainConsole(file=file)
        for _ in range(3):
            pipe.print("lost")
        assert pipe.quiet
    loop = "for i in range(9999): console.say('x' * 99)"
    code = f"from vitrail.cli._shared import console\n{loop}\nconsole.note('the end')"
    piped = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{code}" | head -1'], capture_output=True, text=True)
    assert piped.stdout == f"{'x' * 99}\n"
    assert piped.stderr == "Note: the end\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "pass one of r=, keep= and gflops=, such as keep=0.5",
            "pass one of --r, --keep and --gflops, such as --keep 0.5",
        ),
        ("got order='luck' and proportional=False", "got --order 'luck' and --no-proportional"),
        (
            "size=224: not a number; unmerge=True is another matter",
            "--image-size 224: not a number; unmerge=True is another matter",
        ),
        ("choose another directory, out= (-o)", "choose another directory, out= (-o)"),
        ("a == b, merging.keep=3, x-keep=2", "a == b, merging.keep=3, x-keep=2"),
    ],
)
def test_messages_name_the_options_of_the_command(text: str, expected: str) -> None:
    CliRunner().invoke(app, ["merge", "-h"])
    assert console.with_options(text) == expected


@pytest.mark.parametrize(
    ("command", "function"),
    [
        (["merge", "vitrail:tiny", "."], "vitrail.cli.merge.open_dataset"),
        (["evaluate", "vitrail:tiny", "."], "vitrail.training.evaluate"),
        (["export", "vitrail:tiny", "-r", "4", "-o", "x.onnx"], "vitrail.cli.export.load"),
        (["bench", "vitrail:tiny", "-r", "4"], "vitrail.cli.bench.load"),
        (["demo"], "vitrail.cli.demo.run_demo"),
        (["tune", "vitrail:tiny", ".", "--within", "kl 1"], "vitrail.cli.tune.load"),
    ],
)
def test_an_interrupt_prints_a_line(command: list[str], function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    CliRunner().invoke(app, [command[0], "-h"])  # import the command
    monkeypatch.setattr(function, interrupted)
    options = ["--method", "threshold"] if command[0] == "merge" else []
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 130
    assert result.output.strip().endswith("Interrupted.")
