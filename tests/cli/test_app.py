"""The command line itself: help, version, notes, and the demo."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail
from vitrail.cli import app, console
from vitrail.cli.demo import HONESTY, run_demo
from vitrail.errors import SaturatedWarning
from vitrail.pictures import read_picture


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


def test_module_runs_and_loads_nothing_heavy_for_its_help() -> None:
    code = (
        "import sys, runpy; sys.argv = ['vitrail', '--help']\n"
        "try: runpy.run_module('vitrail', run_name='__main__')\n"
        "except SystemExit as leave: assert not leave.code\n"
        "print(sorted({'PIL', 'timm', 'transformers', 'torchvision'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: vitrail " in result.stdout
    assert result.stdout.strip().endswith("[]")


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


def test_demo_writes_sheets_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[:, 40:] = (250, 200, 40)
    Image.fromarray(pixels).save(tmp_path / "halves.png")
    threads = torch.get_num_threads()
    runs = run_demo(
        tmp_path / "out",
        longest=64,
        strengths={"gentle": 0.5, "strong": 0.25},
        pictures={"halves": tmp_path / "halves.png"},
    )
    assert torch.get_num_threads() == threads
    assert [run.input_size for run in runs] == [(32, 64), (32, 64)]
    assert [run.cost.tokens_after[-1] for run in runs] == [5, 3]
    assert [run.pictures[0].panes for run in runs] == [4, 2]

    sheet = np.asarray(read_picture(tmp_path / "out" / "halves.png"))
    assert (sheet[4:44, 4:84] == pixels).all()
    # Two panes are left, and they are the two halves: similar colours merged, different ones did not.
    strong = sheet[4 + 40 + 6 + 4 :, 4:84][:40]
    assert tuple(strong[20, 5]) == (0, 0, 0)
    assert tuple(strong[20, 75]) == (250, 200, 40)

    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["note"] == HONESTY
    assert [run["weights"] for run in summary["runs"]] == ["random", "random"]
    assert "weights are random" in (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    captured = capsys.readouterr()
    assert "weights are random" in captured.err
    assert str((tmp_path / "out").resolve()) in captured.out


def test_demo_is_the_same_each_time(tmp_path: Path) -> None:
    Image.effect_noise((64, 48), 90).convert("RGB").save(tmp_path / "noise.png")
    for name in ("one", "two"):
        run_demo(tmp_path / name, longest=64, strengths={"half": 0.5}, pictures={"noise": tmp_path / "noise.png"})
        torch.rand(3)
    assert read_picture(tmp_path / "one" / "noise.png") == read_picture(tmp_path / "two" / "noise.png")


def test_demo_command_takes_a_folder_and_answers_mistakes_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []
    monkeypatch.setattr("vitrail.cli.demo.run_demo", folders.append)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    assert CliRunner().invoke(app, ["demo", "-o", "elsewhere"]).exit_code == 0
    assert folders == [Path("demo"), Path("elsewhere")]
    monkeypatch.undo()
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "-o", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "could not be made" in result.stderr
