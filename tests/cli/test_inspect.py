"""``vitrail inspect``: what it prints and writes, how it explains mistakes, and several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from tests.cli.reports import FakeReports
from tests.cli.words import one_line
from tests.training.toys import finish, start
from vitrail.cli import app
from vitrail.cli._shared import console
from vitrail.errors import UnsupportedInput
from vitrail.models import create_model

MODEL = "timm:vit_tiny_patch16_224"
TINY = ("--size", "32", "--random-weights", "--device", "cpu")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *(str(argument) for argument in arguments)])


@pytest.fixture
def images(tmp_path: Path) -> Path:
    directory = tmp_path / "images"
    directory.mkdir()
    for number in range(5):
        Image.effect_noise((24, 24), 20 * number + 10).convert("RGB").save(directory / f"{number}.png")
    return directory


# ---------------------------------------------------------------- output


def test_verdict_table_and_files(reports: FakeReports, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = run(MODEL, images, *TINY, "-o", out, "--batch", "2", "--seed", "3", "--no-probes")
    assert result.exit_code == 0, result.output
    assert reports.calls == [{"batch_size": 2, "name": MODEL, "probes": False, "cure": True, "seed": 3}]
    assert reports.sizes == [(2, 3, 32, 32), (2, 3, 32, 32), (1, 3, 32, 32)]
    text = one_line(result.stdout)
    assert text.startswith(f"{MODEL} has artifact tokens.")
    assert "with test-time registers 0.1 % of patch tokens; 2 % with random neurons" in text
    for part in (
        "images 5",
        "norm 12.5",
        "high-norm tokens 2 % of patch tokens",
        "since layer 1 of 2",
        "confidence few images",
    ):
        assert part in text
    assert text.endswith(f"Report: {out}, with its values in report.json")
    assert "random weights" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"images", "report.html", "report.json"}


def test_no_cure(reports: FakeReports, images: Path, tmp_path: Path) -> None:
    assert run(MODEL, images, *TINY, "-o", tmp_path / "a.html", "--no-cure").exit_code == 0
    assert [call["cure"] for call in reports.calls] == [False]


def test_json_instead_of_the_table(reports: FakeReports, images: Path, tmp_path: Path) -> None:
    result = run(MODEL, images, *TINY, "-o", tmp_path / "a.html", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))


def test_json_file_alone_needs_no_jinja(
    reports: FakeReports, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = run(MODEL, images, *TINY, "-o", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    assert one_line(result.stdout).endswith(f"Report: {tmp_path / 'a.json'}")
    result = run(MODEL, images, *TINY, "-o", tmp_path / "a.html")
    assert result.exit_code == 2
    assert "pip install vitrail[report]" in one_line(result.stderr)
    assert len(reports.calls) == 1  # found before any work is done


def test_samples_by_default_and_a_limit(reports: FakeReports, images: Path, tmp_path: Path) -> None:
    assert run(MODEL, *TINY, "-o", tmp_path / "a.html").exit_code == 0
    assert reports.sizes == [(3, 3, 32, 32)]
    for limit, count in ((2, 2), (0, 5)):
        reports.sizes.clear()
        assert run(MODEL, images, *TINY, "-o", tmp_path / "a.html", "--limit", limit).exit_code == 0
        assert reports.sizes == [(count, 3, 32, 32)]


def test_skipped_images_are_named(reports: FakeReports, images: Path, tmp_path: Path) -> None:
    for number in range(7):
        (images / f"broken{number}.png").touch()
    result = run(MODEL, images, *TINY, "-o", tmp_path / "a.html")
    assert result.exit_code == 1
    assert "skipped images 7" in one_line(result.stdout)
    assert result.stderr.count("Skipped") == 5
    assert "and 2 more that could not be read" in result.stderr
    assert (tmp_path / "a.html").is_file()


def test_progress_goes_stage_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    usual = console.progress
    monkeypatch.setattr(console, "progress", lambda: made.append(usual()) or made[-1])
    with console.bars() as tell:
        tell("running images", 1, 3)
        tell("running images", 3, 3)
        tell("analyzing", 1, None)
    tasks = [(task.description, task.completed, task.total) for task in made[0].tasks]
    assert tasks == [("Running images", 3, 3), ("Analyzing", 1, None)]


def test_the_help_has_examples_and_explains_several_devices() -> None:
    text = one_line(CliRunner().invoke(app, ["inspect", "-h"]).stdout)
    assert "torchrun --nproc-per-node 4 -m vitrail inspect" in text
    assert "--random-weights" in text


# ---------------------------------------------------------------- mistakes

MISTAKES = {
    "no such image": ((MODEL, "missing.png"), "missing.png"),
    "no such table": ((MODEL, "missing.parquet"), "missing.parquet"),
    "no model": (("timm:no_such_model", "--random-weights"), "no_such_model"),
    "not a ViT": (("timm:resnet18", "--random-weights"), "ResNet"),
    "wrong size": ((MODEL, "--random-weights", "--size", "33"), "size 33x33"),
    "no size": ((MODEL, "--size", "large"), "'large' is not a size"),
    "labels of files": ((MODEL, "--labels", "breed"), "parquet"),
    "no page": ((MODEL, "-o", "report.pdf"), "-o report.pdf: expected the name of a page, like report.html"),
    "no folder": ((MODEL, "-o", "nowhere/report.html"), "nowhere/report.html"),
    "negative limit": ((MODEL, "--limit", "-1"), "'--limit'"),
    "empty batch": ((MODEL, "--batch", "0"), "'--batch-size'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained_and_nothing_is_written(
    name: str, reports: FakeReports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, answer = MISTAKES[name]
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert answer in one_line(result.stderr)
    assert list(tmp_path.iterdir()) == []


def test_unreadable_images_are_found_before_the_model_is_loaded(
    reports: FakeReports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.cli.inspect.load", lambda *args, **kwargs: pytest.fail("loaded"))
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text("not an image")
    result = run(MODEL, tmp_path, "-o", tmp_path / "report.html")
    assert result.exit_code == 2
    assert "one of the 2" in result.stderr


def test_a_size_that_the_model_does_not_take(reports: FakeReports, saved_vit: Path, tmp_path: Path) -> None:
    result = run(f"hf:{saved_vit}", "--size", "64", "--device", "cpu", "-o", tmp_path / "a.html")
    assert result.exit_code == 2
    assert "images of 64 × 64" in one_line(result.stderr)
    assert reports.calls == []


def test_an_audio_model_is_refused_and_nothing_is_written(reports: FakeReports, images: Path, tmp_path: Path) -> None:
    options = {"in_chans": 1, "image_size": (16, 24), "patch_size": 8}
    create_model("vit_tiny_patch16", width=16, depth=1, heads=1, **options).save_pretrained(tmp_path / "sounds")
    result = run(f"vitrail:{tmp_path / 'sounds'}", images, "--device", "cpu", "-o", tmp_path / "a.html")
    assert result.exit_code == 2
    assert "1 × 16 × 24" in one_line(result.stderr)
    assert reports.calls == []
    assert not (tmp_path / "a.html").exists()


def test_inputs_are_not_overwritten(reports: FakeReports, images: Path) -> None:
    odd = (images / "0.png").rename(images / "0.html")
    before = odd.read_bytes()
    result = run(MODEL, odd, *TINY, "-o", odd)
    assert result.exit_code == 2
    assert "would be overwritten" in result.stderr
    assert odd.read_bytes() == before


STOPS = {
    "Ctrl-C": (KeyboardInterrupt(), 130, "Interrupted: no report was written"),
    "error": (UnsupportedInput("the model is odd"), 2, "Error: the model is odd"),
    "memory": (torch.OutOfMemoryError("CUDA out of memory"), 2, "Use a smaller --batch"),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_failed_run_leaves_the_existing_report(name: str, reports: FakeReports, images: Path, tmp_path: Path) -> None:
    reports.error, code, answer = STOPS[name]
    for ending in ("html", "json"):
        (tmp_path / f"report.{ending}").write_text("old", encoding="utf-8")
    result = run(MODEL, images, *TINY, "-o", tmp_path / "report.html")
    assert result.exit_code == code
    assert answer in one_line(result.stderr)
    assert result.stdout == ""
    files = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"report.html": "old", "report.json": "old"}


# ---------------------------------------------------------------- several ranks

ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow  # tests/report/test_ranks.py is the same without the command line
def test_two_processes_give_the_report_of_one(images: Path, tmp_path: Path) -> None:
    (images / "broken.png").touch()
    one, two = tmp_path / "one.html", tmp_path / "two.html"
    command = ["inspect", MODEL, str(images), *TINY, "--no-probes", "--batch", "1"]
    alone = CliRunner().invoke(app, [*command, "-o", str(one)])
    assert alone.exit_code == 1, alone.output  # an image is broken

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vitrail"]
    result = subprocess.run(
        [*launch, *command, "-o", str(two)], env=os.environ | ALONE, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Report: ") == 1
    assert result.stderr.count("Skipped") == 1

    values = [json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) for path in (one, two)]
    assert values[0]["data"]["images"] == 5
    for value in values:
        del value["versions"]
    assert values[0] == values[1]


def test_a_mistake_of_two_ranks_is_printed_once(tmp_path: Path) -> None:
    missing, page = str(tmp_path / "missing.png"), str(tmp_path / "report.html")
    first, second = finish(start(2, "-m", "vitrail", "inspect", MODEL, missing, "-o", page, "--device", "cpu"))
    assert first[0] == 2
    assert f"Error: {missing}" in first[2]
    assert second == (2, "", "")
