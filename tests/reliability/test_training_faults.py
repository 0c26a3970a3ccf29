"""Faults while training: divergence, full disks, directories of others, edited settings, data that changes."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.training.toys import FIELDS, make_photos, same, weights
from vitrail.errors import Diverged, InvalidOption, ModelLoadError, TrainingError
from vitrail.training import Event, train
from vitrail.training import loop as loops
from vitrail.training.loop import find_nonfinite


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos")


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


class Stopped(Exception):
    """A run that ends in the middle."""


def stop_at(step: int) -> Any:
    def on_event(event: Event) -> None:
        if event.kind == "train" and event.done == step:
            raise Stopped

    return on_event


# Divergence


def test_weights_that_are_not_finite_are_never_saved(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the step is finite, and so is every logged one: only the weights are not."""
    real = loops.Loop._train_step

    def step(self: Any, number: int) -> None:
        real(self, number)
        if number == 5:
            with torch.no_grad():
                self.models.model.blocks[1].mlp.fc1.weight[3, 4] = float("inf")

    monkeypatch.setattr(loops.Loop, "_train_step", step)
    out, fields = tmp_path / "run", {**FIELDS, "save_every": "1 steps", "log_every": 100, "keep": 2}
    with pytest.raises(Diverged, match=r"1 tensors are not finite after step 5.*fc1\.weight.*step-00000005") as caught:
        train(data=str(photos), out=str(out), **fields)
    assert "They were not saved" in str(caught.value)
    assert steps(out) == ["step-00000004", "step-00000005"]
    for name in steps(out):
        assert all(value.isfinite().all() for value in weights(out / "checkpoints" / name).values())


def test_a_run_that_diverges_keeps_its_last_finite_checkpoint(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fields = {**FIELDS, "save_every": "1 steps", "log_every": 100, "lr": 1000.0, "clip": 0.0, "warmup_epochs": 0}
    with pytest.raises(Diverged):
        train(data=str(photos), out=str(out), **fields)
    for name in steps(out):
        state = torch.load(out / "checkpoints" / name / "state.pt", weights_only=True)
        assert find_nonfinite(state) == []


def test_what_is_not_finite_is_found() -> None:
    tensors = {"a": torch.ones(3), "b": torch.full((2, 2), 1e38), "empty": torch.zeros(0), "n": torch.tensor(3)}
    assert find_nonfinite(tensors) == []
    for value in (float("nan"), float("inf"), -float("inf")):
        assert find_nonfinite({**tensors, "c": torch.tensor([1.0, value])}) == ["c"]


# Overwriting


@pytest.mark.parametrize("content", ["name: mine\n", "data: x\n", "[1]", "lr: 1e-3\nmodel: theirs\n"])
def test_a_folder_with_any_config_is_not_overwritten(content: str, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "best").mkdir(parents=True)
    (folder / "best" / "thesis.txt").write_text("years of work")
    (folder / "config.yaml").write_text(content)
    with pytest.raises(TrainingError, match="not a run directory; nothing was changed"):
        train(data=str(photos), out=str(folder), overwrite=True, **FIELDS)
    assert (folder / "best" / "thesis.txt").read_text() == "years of work"


def test_overwriting_touches_what_a_run_wrote_and_nothing_else(photos: Path, tmp_path: Path) -> None:
    run = train(data=str(photos), out=str(tmp_path / "run"), **FIELDS)
    (run.folder / "notes.txt").write_text("mine")
    again = train(data=str(photos), out=str(run.folder), overwrite=True, **{**FIELDS, "epochs": 1})
    assert (run.folder / "notes.txt").read_text() == "mine"
    assert steps(again.folder) == ["step-00000003"]
    assert not (run.folder / ".previous").exists()


def test_the_old_run_comes_back_where_the_new_one_fails_before_its_first_checkpoint(
    photos: Path, tmp_path: Path
) -> None:
    run = train(data=str(photos), out=str(tmp_path / "run"), **FIELDS)
    before, names, log = weights(run.last), steps(run.folder), (run.folder / "log.jsonl").read_text()
    with pytest.raises(Stopped):
        train(data=str(photos), out=str(run.folder), overwrite=True, on_event=stop_at(1), **{**FIELDS, "epochs": 20})
    assert same(weights(run.last), before)
    assert (steps(run.folder), (run.folder / "log.jsonl").read_text()) == (names, log)
    assert train(out=str(run.folder), resume=True).folder == run.folder


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_the_old_run_comes_back_where_the_new_one_was_killed(how: str, photos: Path, tmp_path: Path) -> None:
    run = train(data=str(photos), out=str(tmp_path / "run"), **FIELDS)
    before = weights(run.last)
    aside = run.folder / ".previous"  # as a kill leaves it
    aside.mkdir()
    for name in ("checkpoints", "last", "log.jsonl", "config.yaml", ".vitrail-run"):
        (run.folder / name).rename(aside / name)
    (run.folder / "checkpoints").mkdir()
    (run.folder / "config.yaml").write_text("data: unfinished\n")
    if how == "resume":
        train(out=str(run.folder), resume=True)
        assert same(weights(run.last), before)
    else:
        with pytest.raises(TrainingError, match="already holds a run"):
            train(data=str(photos), out=str(run.folder), **FIELDS)
        train(data=str(photos), out=str(run.folder), overwrite=True, **FIELDS)
    assert not aside.exists()


# Full disks


def test_training_goes_on_where_the_best_model_cannot_be_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, notes = loops.write_model, []

    def write(folder: Path, *arguments: Any) -> None:
        if folder.name == "best":
            raise ModelLoadError(f"could not write to {folder} (No space left on device)")
        real(folder, *arguments)

    monkeypatch.setattr(loops, "write_model", write)
    fields = {**FIELDS, "validation": 0.25}
    run = train(data=str(photos), out=str(tmp_path / "run"), on_event=lambda e: notes.append(e.text), **fields)
    assert any("No space left" in text and "Training continues" in text for text in notes)
    assert (run.folder / "last" / "model.safetensors").is_file()


def test_a_run_whose_last_model_cannot_be_written_can_be_finished_later(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, *arguments: Any) -> None:
        if folder.name == "last":
            folder.mkdir(exist_ok=True)
            raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(loops, "write_model", full)
        with pytest.raises(TrainingError, match=r"finished, but its model is not saved.*Resume with"):
            train(data=str(photos), out=str(out), **FIELDS)
    resumed = train(out=str(out), resume=True)
    whole = train(data=str(photos), out=str(tmp_path / "whole"), **FIELDS)
    assert same(weights(resumed.last), weights(whole.last))


# Resuming


@pytest.fixture
def stopped(photos: Path, tmp_path: Path) -> Path:
    with pytest.raises(Stopped):
        train(data=str(photos), out=str(tmp_path / "run"), save_every="2 steps", on_event=stop_at(7), **FIELDS)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.123), ("clip", 0.5), ("seed", 7), ("options", {"width": 32, "depth": 3, "heads": 2})]
)
def test_an_edited_setting_is_noticed(name: str, value: Any, stopped: Path) -> None:
    settings = yaml.safe_load((stopped / "config.yaml").read_text())
    (stopped / "config.yaml").write_text(yaml.safe_dump({**settings, name: value}))
    with pytest.raises((TrainingError, InvalidOption), match=name):
        train(out=str(stopped), resume=True)
    (stopped / "config.yaml").write_text(yaml.safe_dump(settings))
    train(out=str(stopped), resume=True)


def test_other_pixels_under_the_same_names_are_noticed(photos: Path, stopped: Path, tmp_path: Path) -> None:
    first = photos / "blue" / "0.png"
    good = first.read_bytes()
    shutil.copy(photos / "red" / "0.png", first)
    with pytest.raises(TrainingError, match="other contents"):
        train(out=str(stopped), resume=True)
    first.write_bytes(good)  # the time of change does not count, as data may move
    train(out=str(stopped), resume=True)


def test_data_that_changes_under_a_run_is_reported(photos: Path, tmp_path: Path) -> None:
    notes: list[str] = []

    def on_event(event: Event) -> None:
        if event.kind == "train" and event.done == 2:
            shutil.copy(photos / "red" / "0.png", photos / "blue" / "3.png")
        notes.append(event.text)

    train(data=str(photos), out=str(tmp_path / "run"), on_event=on_event, **FIELDS)
    assert [text for text in notes if "1 files of the training data changed" in text and "3.png" in text]
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["names"] for line in lines if line["kind"] == "changed"] == [["3.png"]]


def test_shards_of_a_checkpoint_are_read_without_running_code(tmp_path: Path) -> None:
    import os
    import pickle

    from vitrail._distributed import World
    from vitrail.training.checkpoint import Checkpoints

    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    shards = tmp_path / "step-00000001" / "shards"
    shards.mkdir(parents=True)
    (shards / ".metadata").write_bytes(pickle.dumps(Payload()))
    found = Checkpoints(tmp_path, 2, World(0, 1, torch.device("cpu")))
    with pytest.raises(TrainingError, match=r"\.metadata.*is not metadata"):
        found.load(1, nn.Linear(2, 2).state_dict())
    assert not (tmp_path / "ran").exists()
