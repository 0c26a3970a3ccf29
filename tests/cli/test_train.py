"""``vitrail train`` and ``vitrail evaluate``: files, output and errors."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.cli.words import one_line
from tests.training.toys import make_photos
from vitrail.cli import app
from vitrail.cli._shared import console
from vitrail.training import Config, Event
from vitrail.training import trainer as training
from vitrail.training.config import OPTIONS

SMALL = ("--preset", "tiny", "--image-size", "32", "--device", "cpu", "--epochs", "2", "--batch-size", "8")
SMALL += ("--set", "options={width: 32, depth: 2, heads: 2}")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, run("train", "--data", photos, *SMALL, "--tokens", "cls,register=2", "-o", folder)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_training_prints_progress_paths_and_next_steps(trained: tuple[Path, Result]) -> None:
    folder, result = trained
    assert result.exit_code == 0, result.output
    text = one_line(result.stdout)
    assert "step 2 of 4 loss" in text
    assert "images/s" in text
    assert "step 4 of 4 fused" in text
    assert f"Run directory: {folder}" in text
    assert f"vitrail evaluate {folder}/last DATA" in text
    assert f"vitrail inspect vitrail:{folder}/last" in text
    config = Config.from_yaml(folder / "config.yaml")
    assert (config.tokens, config.options["width"], config.validation) == ("cls,register=2", 32, 0.1)


def test_printed_next_steps_work(trained: tuple[Path, Result], photos: Path, tmp_path: Path) -> None:
    folder, _ = trained
    values = tmp_path / "result.json"
    result = run("evaluate", folder, photos, "--merge", "r=2", "--confusion", "-o", values, "--device", "cpu")
    assert result.exit_code == 0, result.output
    text = one_line(result.stdout)
    assert "24 images, merged: r=2" in text
    for word in ("fused", "cls", "calibration error", "Loss", "images/s", "true class in rows", "blue green red"):
        assert word in text
    found = json.loads(values.read_text())
    assert found["count"] == 24
    assert sum(map(sum, found["confusion"]["fused"])) == 24
    merged = run("merge", f"vitrail:{folder}", photos / "red" / "0.png", "-r", "2", "-o", tmp_path / "glass")
    assert merged.exit_code == 0, merged.output


def test_a_run_is_resumed_replaced_or_left_alone(trained: tuple[Path, Result], photos: Path) -> None:
    folder, _ = trained
    before = (folder / "log.jsonl").read_text()
    refused = run("train", "--data", photos, *SMALL, "-o", folder)
    assert refused.exit_code == 2
    assert "already holds a run; nothing was changed" in one_line(refused.stderr)
    assert (folder / "log.jsonl").read_text() == before
    resumed = run("train", "-o", folder, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "nothing left to train" in one_line(resumed.stderr)
    changed = run("train", "-o", folder, "--resume", "--lr", "0.5")
    assert changed.exit_code == 2
    assert "--lr 0.5, but the run in" in one_line(changed.stderr)
    replaced = run("train", "--data", photos, *SMALL, "--epochs", "1", "-o", folder, "--overwrite")
    assert replaced.exit_code == 0, replaced.output
    assert Config.from_yaml(folder / "config.yaml").epochs == 1


def test_a_file_gives_fields_and_options_win(photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"data: {photos}\npreset: tiny\nepochs: 7\nclip: 0.5\nimage_size: 32\nbatch_size: 8\n")
    out = tmp_path / "run"
    size = ("--set", "options={width: 32, depth: 1, heads: 2}", "--validation", "none")
    result = run("train", "--config", file, "--epochs", "1", "-o", out, "--device", "cpu", *size)
    assert result.exit_code == 0, result.output
    config = Config.from_yaml(out / "config.yaml")
    assert (config.epochs, config.clip, config.validation) == (1, 0.5, None)
    assert not (out / "best").exists()


def test_stopping_prints_a_message(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.training.interrupt import Interrupted

    def loop(*_: object) -> None:
        raise Interrupted("Stopped after step 3 of 4. Go on with --resume.")

    monkeypatch.setattr(training, "_prepare", loop)
    result = run("train", "--data", photos, *SMALL, "-o", tmp_path / "run")
    assert result.exit_code == 130
    assert one_line(result.stderr) == "Error: Stopped after step 3 of 4. Go on with --resume."


def test_time_limit_has_its_own_exit_code(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run("train", "--data", photos, *SMALL, "--set", "log_every=1", "-o", out, "--seconds", "1e-9")
    assert result.exit_code == 3, result.output
    assert "Stopped after step 1 of" in one_line(result.stderr)
    assert "the time limit is reached. Resume with" in one_line(result.stderr)
    result = run("train", "-o", out, "--resume", "--seconds", "inf")
    assert result.exit_code == 0, result.output
    assert (out / "last" / "labels.json").is_file()


def test_stopped_in_the_last_evaluation_it_ends_as_a_finished_run(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def bars() -> Iterator[Any]:
        yield lambda stage, *rest: os.kill(os.getpid(), signal.SIGTERM) if stage == "evaluating" else None

    monkeypatch.setattr(console, "bars", bars)
    result = run("train", "--data", photos, *SMALL, "--epochs", "1", "-o", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "Note: Interrupted after the last step" in one_line(result.stderr)
    assert (tmp_path / "run" / "last" / "labels.json").is_file()


MISTAKES = {
    "no data": ((), "data is missing"),
    "unknown model": (("--data", "PHOTOS", "--model", "vit"), "--model 'vit'"),
    "unknown field": (
        ("--data", "PHOTOS", "--set", "clips=1"),
        "unknown training option 'clips'; did you mean 'clip'?",
    ),
    "no value": (("--data", "PHOTOS", "--set", "clip"), "--set clip: expected NAME=VALUE"),
    "distillation without teacher": (("--data", "PHOTOS", "--tokens", "cls,distillation"), "needs a teacher"),
    "no such data": (("--data", "nowhere"), "nowhere"),
    "no such file": (("--config", "nowhere.yaml"), "cannot read nowhere.yaml"),
    "nothing to resume": (("-o", "runs/x", "--resume"), "has no run to resume"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = MISTAKES[mistake]
    result = run("train", *(str(photos) if text == "PHOTOS" else text for text in arguments), "--device", "cpu")
    assert result.exit_code == 2, result.output
    assert expected in one_line(result.stderr)
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_evaluation_of_no_samples_is_explained(photos: Path, tmp_path: Path) -> None:
    result = run("evaluate", tmp_path, photos)
    assert result.exit_code == 2
    assert "holds no model; expected a run directory" in one_line(result.stderr)


def test_help_has_examples_and_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("train", "-h").stdout
    assert all(flag.split("/")[0] in shown for option in OPTIONS.values() for flag in option.flags)
    assert "by default small" in " ".join(shown.split())
    for name in ("train", "evaluate"):
        assert "Examples" in run(name, "-h").stdout


def test_options_reach_the_config(photos: Path, tmp_path: Path) -> None:
    given = ("--clip", "0.5", "--no-tensorboard", "--options", "{width: 32, depth: 1, heads: 2}", "--save-every", "2")
    result = run("train", "--data", photos, *SMALL[:-2], *given, "--validation", "none", "-o", tmp_path / "run")
    assert result.exit_code == 0, result.output
    config = Config.from_yaml(tmp_path / "run" / "config.yaml")
    assert (config.clip, config.tensorboard, config.options["depth"], config.save_every) == (0.5, False, 1, "2")


def test_events_are_plain_data() -> None:
    assert Event("note", text="x").values == {}
