"""Commands meet names of all kinds, models that give NaN, full disks, and interrupts."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import vitrail
from tests.training.toys import ROOT
from vitrail.cli import app
from vitrail.cli._shared import console
from vitrail.cli._shared.output import Names
from vitrail.cli._shared.summary import markdown, markdown_table
from vitrail.data import open_dataset

HOSTILE = ["[/red]", "<script>alert(1)</script>\x1b[31m"]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.fixture(autouse=True)
def consoles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(console, "out", console.PlainConsole())
    monkeypatch.setattr(console, "err", console.PlainConsole(stderr=True))


def save(folder: Path, fill: float | None = None) -> Path:
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "num_classes": 2}
    model = vitrail.create_model("vit_tiny_patch16", **sizes)
    if fill is not None:
        torch.nn.init.constant_(model.blocks[0].mlp.fc1.weight, fill)
    model.save_pretrained(folder)
    (folder / "labels.json").write_text(json.dumps({"classes": {"label": HOSTILE}}))
    return folder


def image(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, "PNG")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    folder = tmp_path / "odd"
    names = ["[bold].png", "<img src=x onerror=alert(1)>|a`b.png", "e\x1b]0;x\x07.png", "n\nl.png", "x" * 240 + ".png"]
    for seed, name in enumerate(names):
        image(folder / name, seed)
    image(Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.png")))
    (folder / "loop.png").symlink_to("loop.png")
    return folder


def test_merge_takes_names_of_all_kinds_and_writes_them_as_text(odd: Path, tmp_path: Path) -> None:
    result = run("merge", save(tmp_path / "model"), odd, "-r", 2, "-o", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 1, result.output  # the link in a circle
    assert "loop.png" in result.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert len(summary["pictures"]) == 6
    text = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    for shown in (text, result.stdout, result.stderr):
        assert "\x1b" not in shown
    assert "<img" not in text
    assert "<script" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;\\|a\\`b.png" in text
    for one in summary["pictures"]:
        assert all((tmp_path / "out" / file).is_file() for file in one["files"].values())
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 8  # a head, a rule and six images: no name breaks a row


def test_markdown_and_terminal_show_text_as_it_is() -> None:
    assert markdown("<b>*a*_b_`c`[x](y)|\n\x1b[31m") == "&lt;b&gt;\\*a\\*\\_b\\_\\`c\\`\\[x\\](y)\\| �\\[31m"
    assert markdown_table(["a"], [["x|y\nz"]])[2] == "| x\\|y z |"
    assert console.printable("a\x1b[31m\ud800\x07\x9b\nü") == "a�[31m?��\nü"
    table = console.table("[/red]", title="[/blue]")
    table.add_row("[/green]\x1b[31m")
    with console.out.capture() as shown:
        console.out.print(table)
    assert all(name in shown.get() for name in [*HOSTILE[:1], "[/blue]", "[/green]�[31m"])
    with console.status("[/red]"), console.bars() as update:
        update("[/red]", 1, 2, "[/x]")


def test_long_names_leave_room_for_endings(tmp_path: Path) -> None:
    for name in ("x" * 250 + "a", "x" * 250 + "b", "é" * 120):
        image(tmp_path / f"{name}.png")
    names = Names(tmp_path / "out", open_dataset(tmp_path, labels=None))
    files = [file for index in range(3) for file in names.of(index, ["side-by-side"]).values()]
    assert len(set(files)) == 3
    assert max(len(os.fsencode(file.name)) for file in files) < 230


def test_a_model_that_gives_nan_is_named(tmp_path: Path) -> None:
    for number in range(2):
        image(tmp_path / "data" / "[/red]" / f"{number}.png", number)
    model = save(tmp_path / "model", float("nan"))
    result = run("merge", model, tmp_path / "data", "-r", 2, "-o", tmp_path / "out", "--device", "cpu")
    assert "NaN or infinite for 2 of 2 images" in result.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert [one["cosine"] for one in summary["pictures"]] == [None, None]
    assert [one["same_top1"] for one in summary["pictures"]] == [None, None]
    (tmp_path / "model" / "labels.json").write_text(json.dumps({"classes": {"label": ["a", "b"]}}))
    for name in ("a", "b"):
        image(tmp_path / "labeled" / name / "0.png")
    result = run("evaluate", model, tmp_path / "labeled", "--device", "cpu")
    assert "2 predictions are not finite" in " ".join(result.stderr.split()), result.output


def test_figures_are_printed_before_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path / "model")
    (model / "labels.json").write_text(json.dumps({"classes": {"label": ["a", "b"]}}))
    for name in ("a", "b"):
        image(tmp_path / "data" / name / "0.png")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vitrail._atomic_files.rename_all", full)
    result = run("evaluate", model, tmp_path / "data", "--device", "cpu", "-o", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "Loss" in result.stdout
    assert "No space left" in result.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_merges_keep_their_summary(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(4):
        image(tmp_path / "data" / f"{index}.png", index)
    real, calls = vitrail.merge, [0]

    def merge(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:  # the first one only checks the options
            os.kill(os.getpid(), number)
        return real(*arguments, **options)

    monkeypatch.setattr(vitrail, "merge", merge)
    result = run("merge", save(tmp_path / "m"), tmp_path / "data", "-r", 2, "-o", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], result.output
    assert "Stopped after 2 of 4 images" in result.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert [one["picture"] for one in summary["pictures"]] == ["0.png", "1.png"]


def test_sigterm_leaves_no_temporary_files(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom vitrail._atomic_files import temporary_files\n"
        "from vitrail.cli._shared.ranks import command\n"
        "with command(), temporary_files(Path(sys.argv[1])) as (file,):\n"
        "    file.write_bytes(b'half')\n    os.kill(os.getpid(), signal.SIGTERM)\n    signal.pause()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], env=environment, capture_output=True)
    assert b"Terminated." in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    for _ in range(20):
        if not subprocess.run(["umount", str(folder)], capture_output=True).returncode:
            return
        time.sleep(0.1)


@pytest.mark.parametrize("ending", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_export_to_a_full_disk_is_one_message(ending: str, small_disk: Path, tmp_path: Path) -> None:
    if ending == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 8, "width": 128, "depth": 3, "heads": 2, "num_classes": 2}
    vitrail.create_model("vit_tiny_patch16", **sizes).save_pretrained(tmp_path / "model")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "vitrail", "export", str(tmp_path / "model"), "-r", "2", "--batch", "1"]
    done = subprocess.run([*command, "-o", str(small_disk / f"m.{ending}")], env=environment, capture_output=True)
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"No space left" in done.stderr
    assert list(small_disk.iterdir()) == []


def test_a_usage_error_does_not_repeat_a_value_of_any_length() -> None:
    result = CliRunner().invoke(app, ["inspect", "vitrail:tiny", "photos", "--engine", "x" * 100_000])
    assert result.exit_code == 2
    assert "--engine" in result.stderr
    assert len(result.stderr) < 5000
