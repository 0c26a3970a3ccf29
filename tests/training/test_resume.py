"""Resuming: a killed run ends with the same weights, and a bad checkpoint falls back to the one before."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.toys import FIELDS, ROOT, make_photos, same, weights
from vitrail.errors import InvalidOption, TrainingError, VitrailWarning
from vitrail.training import Event, read_log, train
from vitrail.training import checkpoint as checkpoints
from vitrail.training.interrupt import SIGNALS, Interrupted, OutOfTime, Stop
from vitrail.training.run_directory import last_evaluation

RANDOM = {"mixup": 0.2, "cutmix": 1.0, "augment": "medium", "drop_path": 0.2, "ema": 0.9, "clip": 0.5}
"""All that is random in a step."""

KILLED = textwrap.dedent(
    """
    import json, os, signal, sys, torch
    from vitrail.training import train
    torch.set_num_threads(1)

    def on_event(event):
        if event.kind == "train" and event.done == 7:  # in the middle of the fourth epoch
            os.kill(os.getpid(), signal.SIGKILL)

    train(**json.loads(sys.argv[1]), on_event=on_event)
    """
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stopped(photos: str, tmp_path: Path) -> Path:
    """A run of nine steps that was stopped in the seventh, with checkpoints of steps 4 and 6."""

    def on_event(event: Event) -> None:
        if event.kind == "train" and event.done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(data=photos, out=str(tmp_path / "run"), save_every="2 steps", on_event=on_event, **FIELDS)
    return tmp_path / "run"


def finished(photos: str, folder: Path, **fields: Any) -> dict[str, torch.Tensor]:
    return weights(train(data=photos, out=str(folder), **{**FIELDS, **fields}).last)


def test_killed_and_resumed_within_an_epoch_gives_the_same_bits(photos: str, tmp_path: Path) -> None:
    fields = {"data": photos, "save_every": "2 steps", **FIELDS, **RANDOM, "validation": 0.1, "epochs": 5}
    out = str(tmp_path / "killed")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps({**fields, "out": out})], cwd=ROOT, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (Path(out) / "last").exists()
    resumed = train(out=out, resume=True)
    whole = train(**fields, out=str(tmp_path / "whole"))
    assert same(weights(resumed.last), weights(whole.last))
    assert resumed.evaluation.loss == whole.evaluation.loss
    # The log reads as if nothing had happened, but for the second start.
    first, second = (read_log(run.folder / "log.jsonl", "epoch") for run in (resumed, whole))
    assert [(line["step"], line["losses"]) for line in first] == [(line["step"], line["losses"]) for line in second]
    assert [line["step"] for line in read_log(resumed.folder / "log.jsonl", "start")] == [0, 6]


def test_a_truncated_checkpoint_is_skipped_and_named(photos: str, stopped: Path, tmp_path: Path) -> None:
    state = stopped / "checkpoints" / "step-00000006" / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    output: list[str] = []
    run = train(out=str(stopped), resume=True, on_event=lambda event: output.append(event.text))
    notes = [text for text in output if "incomplete" in text]
    assert len(notes) == 1
    assert notes[0].startswith("The checkpoint of step 6 is incomplete (state.pt has")
    assert notes[0].endswith("resuming from step 4 instead.")
    assert same(weights(run.last), finished(photos, tmp_path / "whole"))


def test_one_run_at_a_time_uses_a_directory(photos: str, tmp_path: Path) -> None:
    out, refused = str(tmp_path / "run"), []

    def interfere(event: Event) -> None:
        if event.kind == "train" and not refused:
            for how in ("overwrite", "resume"):
                with pytest.raises(TrainingError, match="in use by another run; nothing was changed") as output:
                    train(data=photos, out=out, **FIELDS, **{how: True})
                refused.append(output)

    run = train(data=photos, out=out, on_event=interfere, **{**FIELDS, "save_every": "1 steps", "log_every": 2})
    assert len(refused) == 2
    assert same(weights(run.last), finished(photos, tmp_path / "alone", save_every="1 steps", log_every=2))
    train(out=out, resume=True)  # it has let go of the folder


def test_damaged_bytes_are_noticed(stopped: Path) -> None:
    state = stopped / "checkpoints" / "step-00000006" / "state.pt"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(bytes(data))
    assert checkpoints.find_fault(state.parent) == "state.pt is damaged"
    assert checkpoints.find_fault(state.parent.with_name("step-00000004")) is None


def test_nothing_complete_is_an_error(stopped: Path) -> None:
    for file in stopped.glob("checkpoints/*/complete.json"):
        file.unlink()
    with pytest.raises(TrainingError, match=r"no complete checkpoint to resume from: [^;]*; [^;]*\. Start over"):
        train(out=str(stopped), resume=True)
    (stopped / "last").mkdir()
    (stopped / "last" / "config.json").touch()
    with pytest.raises(TrainingError, match=r"the run's last model, .*last, is complete"):
        train(out=str(stopped), resume=True)


def test_a_full_disk_leaves_the_previous_checkpoint_and_training_goes_on(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = torch.save, []

    def save(values: Any, file: Any) -> None:
        calls.append(1)
        if len(calls) in (2, 3):
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(values, file)

    monkeypatch.setattr(torch, "save", save)
    folder = tmp_path / "run"
    seen: dict[int, list[str]] = {}

    def on_event(event: Event) -> None:
        if event.kind == "train":
            seen[event.done] = sorted(path.name for path in folder.glob("checkpoints/*"))

    with pytest.warns(VitrailWarning, match=r"cannot write.*No space left.*step 3 is kept") as warned:
        run = train(data=photos, out=str(folder), on_event=on_event, **FIELDS)
    assert ["step 6" in str(one.message) for one in warned] == [True, False]
    assert seen[8] == ["step-00000003"]
    assert sorted(path.name for path in folder.glob("checkpoints/*")) == ["step-00000003"]
    assert same(weights(run.last), finished(photos, tmp_path / "whole"))


def test_only_the_last_checkpoints_are_kept(photos: str, tmp_path: Path) -> None:
    run = train(data=photos, out=str(tmp_path / "run"), save_every="2 steps", keep=3, **FIELDS)
    names = sorted(path.name for path in run.folder.glob("checkpoints/*"))
    assert names == ["step-00000006", "step-00000008", "step-00000009"]


def test_a_finished_run_has_nothing_left_to_do(photos: str, tmp_path: Path) -> None:
    run = train(data=photos, out=str(tmp_path / "run"), **FIELDS)
    before = weights(run.last)
    output: list[str] = []
    train(out=str(run.folder), resume=True, on_event=lambda event: output.append(event.text))
    assert any("nothing left to train" in text for text in output)
    assert same(weights(run.last), before)
    longer = next(run.folder.glob("checkpoints/*")).rename(run.folder / "checkpoints" / "step-00000336")
    with pytest.raises(TrainingError, match=f"{longer.name} belongs to another run: this one has 9 steps"):
        train(out=str(run.folder), resume=True)
    assert same(weights(run.last), before)


def test_the_last_evaluation_is_read_back_from_the_log(photos: str, tmp_path: Path) -> None:
    fields = {**FIELDS, "validation": 0.25}
    run = train(data=photos, out=str(tmp_path / "run"), **fields)
    found = last_evaluation(run.folder)
    assert run.evaluation is not None
    assert found is not None
    assert found.summary() == run.evaluation.summary()
    assert (found.score, found.classes) == (run.evaluation.score, run.evaluation.classes)
    again = train(out=str(run.folder), resume=True).evaluation
    assert again is not None
    assert again.summary() == found.summary()
    assert last_evaluation(train(data=photos, out=str(tmp_path / "none"), **FIELDS).folder) is None


def test_resume_may_change_execution_but_not_results(photos: str, stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"lr=0\.5, but the run in .* was started with"):
        train(out=str(stopped), resume=True, lr=0.5)
    with pytest.raises(InvalidOption, match=r"epochs=30, but the run .*model="):
        train(out=str(stopped), resume=True, epochs=30)
    run = train(out=str(stopped), resume=True, keep=1, keep_data="workers", workers=0)
    assert same(weights(run.last), finished(photos, tmp_path / "whole"))


def test_other_data_is_refused(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="started with 24 images of 3 classes; got 27 of 3"):
        train(out=str(stopped), resume=True, data=str(make_photos(tmp_path / "more", 9)))


def test_the_same_data_in_another_place_is_the_same(photos: str, stopped: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(photos, tmp_path / "moved")
    run = train(out=str(stopped), resume=True, data=str(moved))
    assert same(weights(run.last), finished(photos, tmp_path / "whole"))


def test_stop_finishes_the_step_and_allows_resuming(photos: str, tmp_path: Path) -> None:
    def on_event(event: Event) -> None:
        if event.kind == "train" and event.done == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"Stopped after step 5 of 9\. Resume with .*step-00000005"):
        train(data=photos, out=str(tmp_path / "run"), on_event=on_event, **FIELDS)
    assert signal.getsignal(signal.SIGTERM) is before
    assert same(weights(train(out=str(tmp_path / "run"), resume=True).last), finished(photos, tmp_path / "whole"))


def test_time_limit_stops_with_a_checkpoint_and_allows_resuming(photos: str, tmp_path: Path) -> None:
    runs, stops = tmp_path / "run", 0
    while not (runs / "last").exists():
        with suppress(OutOfTime):
            train(data=photos, out=str(runs), resume=runs.exists(), seconds=1e-9, **FIELDS)
        stops += 1
        assert len(list((runs / "checkpoints").glob("step-*"))) > 0
        assert stops < 20
    assert stops == 9  # one step each time, of nine
    assert same(weights(runs / "last"), finished(photos, tmp_path / "whole"))


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, "60"])
def test_an_invalid_time_is_refused_before_anything_is_written(seconds: Any, photos: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"seconds=.*expected a number above 0"):
        train(data=photos, out=str(tmp_path / "run"), seconds=seconds, **FIELDS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["train", "evaluating"])
def test_stop_in_the_last_step_or_evaluation_finishes_the_run(kind: str, photos: str, tmp_path: Path) -> None:
    fields = {**FIELDS, "validation": 0.25, "evaluate_every": 3}
    notes: list[str] = []

    def on_event(event: Event) -> None:
        if event.kind == kind and (event.done == 5 or kind == "evaluating"):  # of six steps: the sixth is under way
            os.kill(os.getpid(), signal.SIGTERM)
        if event.kind == "note":
            notes.append(event.text)

    before = signal.getsignal(signal.SIGTERM)
    run = train(data=photos, out=str(tmp_path / "run"), on_event=on_event, **fields)
    assert ["Interrupted after the last step" in text for text in notes] == [True]
    assert signal.getsignal(signal.SIGTERM) is before
    whole = train(data=photos, out=str(tmp_path / "whole"), **fields)
    assert same(weights(run.last), weights(whole.last))
    assert run.evaluation.loss == whole.evaluation.loss


def test_a_finished_run_without_a_model_gets_one(photos: str, tmp_path: Path) -> None:
    fields = {**FIELDS, "validation": 0.25, "merge": "r=1", "ema": 0.9}
    run = train(data=photos, out=str(tmp_path / "run"), **fields)
    before = weights(run.last)
    shutil.rmtree(run.last)
    again = train(out=str(run.folder), resume=True)
    assert same(weights(again.last), before)
    assert again.evaluation.loss == run.evaluation.loss


def test_a_signal_reaches_the_outer_listener() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Stop.listening() as outer:
        with Stop.listening() as first:
            pass
        assert not first.wanted
        with Stop.listening() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert [signal.getsignal(number) for number in SIGNALS] == before  # asking again stops at once
        assert (inner.wanted, outer.wanted) == (True, True)
        assert [signal.getsignal(number) for number in SIGNALS] == before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no run to resume"):
        train(out=str(tmp_path / "none"), resume=True)
    with pytest.raises(InvalidOption, match="resume continues a run and overwrite replaces it"):
        train(out=str(tmp_path / "none"), resume=True, overwrite=True)
