"""The demo without a trained model: sheets, a summary, and the words that say what they are worth."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.cli.demo_random import HONESTY, run_random_demo
from vitrail.pictures import read_picture


def test_random_demo_writes_sheets_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[:, 40:] = (250, 200, 40)
    Image.fromarray(pixels).save(tmp_path / "halves.png")
    threads = torch.get_num_threads()
    runs = run_random_demo(
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


def test_random_demo_is_the_same_each_time(tmp_path: Path) -> None:
    Image.effect_noise((64, 48), 90).convert("RGB").save(tmp_path / "noise.png")
    for name in ("one", "two"):
        run_random_demo(
            tmp_path / name, longest=64, strengths={"half": 0.5}, pictures={"noise": tmp_path / "noise.png"}
        )
        torch.rand(3)
    assert read_picture(tmp_path / "one" / "noise.png") == read_picture(tmp_path / "two" / "noise.png")
