"""Warnings about data before a run starts: samples without a class, and data of one class."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.toys import FIELDS
from vitrail.data import open_dataset
from vitrail.training import Arrays, Config, Event, evaluate, read_log, train
from vitrail.training.data import data_notes

SMALL: dict[str, Any] = {
    **{name: value for name, value in FIELDS.items() if name not in ("image_size", "tokens")},
    "epochs": 1,
    "tasks": "tone,voice",
}


def arrays(tone: list[int], voice: list[Any]) -> Arrays:
    values = torch.randn(len(tone), 1, 8, 16, generator=torch.Generator().manual_seed(0))
    return Arrays(values, {"tone": torch.tensor(tone), "voice": voice})


def test_samples_without_a_class_by_any_task_are_left_out_and_counted(tmp_path: Path) -> None:
    tone, voice = [0, 1, -1, -7] + [0, 1] * 4, ["a", None, "b", None] + ["a", "b"] * 4
    given = arrays(tone, voice)
    complete = [row for row in range(12) if tone[row] >= 0 and voice[row] is not None]
    assert open_dataset(given, labels=("tone", "voice"), labeled=True)._rows == complete
    output: list[Event] = []
    run = train(data=given, validation=given, out=str(tmp_path / "run"), on_event=output.append, **{
        name: value for name, value in SMALL.items() if name != "validation"
    })  # fmt: skip
    notes = [event.text for event in output if event.kind == "note"]
    skipped = f"skipped {12 - len(complete)} samples without a label"
    assert [text.partition(" (")[0] for text in notes] == [f"data: {skipped}", f"validation: {skipped}"]
    assert [line["text"] for line in read_log(run.folder / "log.jsonl", "note")] == notes
    assert run.evaluation.count == len(complete)
    found = evaluate(run.last, given, labels=("tone",), seconds=0, look=0)
    assert found.count == 10
    assert any("skipped 2 samples without a label" in text and text.endswith("in tone.") for text in found.notes)


def test_held_out_samples_are_counted_once() -> None:
    examples = open_dataset(arrays([0, 1, -1] * 4, [0, 1, 0] * 4), labels=("tone", "voice"), labeled=True)
    kept, held = examples.split(0.25, 0)
    assert len(data_notes(Config(data="x", validation=0.25), kept, held)) == 1


@pytest.mark.parametrize(
    ("tone", "only"),
    [([0] * 8, "0"), ([1, -1] * 4 + [1] * 4, "1"), ([0, 1] * 8, None)],
    ids=["one number", "minus one and one", "two classes"],
)
def test_data_of_one_class_is_reported(tone: list[int], only: str | None) -> None:
    voice = ["a", "a", "b", "b"] * (len(tone) // 4)
    examples = open_dataset(arrays(tone, voice), labels=("tone", "voice"), labeled=True)
    messages = [
        text for text in data_notes(Config(data="x", validation=None), examples, None) if "have the class" in text
    ]
    used = sum(value >= 0 for value in tone)
    begin = f"tone: all {used} training samples have the class {only!r}"
    assert len(messages) == (only is not None)
    assert all(text.startswith(begin) for text in messages)


def test_no_warning_without_labels() -> None:
    examples = open_dataset(arrays([0, -1], ["a", "b"]), labels=None)
    assert data_notes(Config(data="x", validation=None), examples, None) == []
