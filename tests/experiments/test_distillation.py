"""Distillation at its reduced size: teachers of the same seed and share, and equally many steps for every share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.common import running
from experiments.common.choosing import run_key
from experiments.common.pages import section
from experiments.common.rows import RESULTS, SEARCH, read_rows
from experiments.common.running import Runner
from experiments.common.study import Arm, RunOf
from experiments.common.tables import rows_of
from experiments.distillation.study import BATCH, PICTURES, STEPS, STUDY, draw
from experiments.long_distillation.study import STUDY as LONG

pytest.importorskip("timm", reason="the teacher is timm's")


def test_every_arm_has_as_many_steps() -> None:
    for arm in STUDY.arms:
        share, epochs = arm.fields["share"], arm.fields["epochs"]
        steps, warm = (count * (round(share * PICTURES) // BATCH) for count in (epochs, arm.fields["warmup_epochs"]))
        assert steps == pytest.approx(STEPS, rel=0.02)
        assert warm == pytest.approx(STEPS / 10, rel=0.1)


def test_teachers_have_seen_no_more_than_their_students() -> None:
    taught = [arm for arm in STUDY.arms if "teacher" in arm.fields]
    assert len(taught) == 9
    for arm in taught:
        assert isinstance(arm.fields["teacher"], RunOf)
        assert STUDY.arm(arm.fields["teacher"].arm).fields["share"] == arm.fields["share"]


def test_from_search_to_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    asked: list[dict[str, Any]] = []
    train = running.train

    def told(**given: Any) -> Any:
        asked.append(given)
        return train(**given)

    monkeypatch.setattr(running, "train", told)
    study = STUDY.small()
    runner = Runner(study, tmp_path, device="cpu")
    pattern = "Ti hard, 100? %"
    runner.tune(pattern)
    assert all(given["validation"] == 0.1 for given in asked)
    for given in asked:
        if "teacher" in given:  # it, too, was trained without what the search holds out
            assert "/runs/search/conv-100-%-0-" in given["teacher"]
    searched = {row["arm"] for row in read_rows(tmp_path / SEARCH)}
    assert searched == {"conv, 100 %", "Ti hard, 100 %"}
    asked.clear()
    runner.run(pattern, (1,))
    assert runner.failed == runner.left == 0
    rows = {row["arm"]: row for row in read_rows(tmp_path / RESULTS)}
    assert set(rows) == {"conv, 10 %", "conv, 100 %", "Ti hard, 10 %", "Ti hard, 100 %"}
    for given in asked:
        if "teacher" in given:
            share = given["share"]
            assert f"/runs/runs/conv-{100 * share:.0f}-%-1-" in given["teacher"]
    for name, row in rows.items():
        heads = {"fused", "class"} if name.startswith("conv") else {"fused", "cls", "distillation"}
        assert set(row["accuracy"]) == heads
    found = rows_of(study, tmp_path)
    assert "| Ti hard, 10 % |" in section(study, found)
    draw(study, found, tmp_path)
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")


def test_a_change_of_the_teacher_is_a_change_of_the_student(tmp_path: Path) -> None:
    study = replace(STUDY.small(), search=None, draws=None)
    student = study.arm("Ti hard, 100 %")
    longer = tuple(
        Arm(arm.name, **{**arm.fields, "epochs": 2}) if arm.name == "conv, 100 %" else arm for arm in study.arms
    )
    other = replace(study, arms=longer)
    assert run_key(study, student, 0, {}, tmp_path) == run_key(study, student, 0, {}, tmp_path)
    assert run_key(study, student, 0, {}, tmp_path) != run_key(other, student, 0, {}, tmp_path)
    plain = study.arm("Ti plain, 100 %")
    assert run_key(study, plain, 0, {}, tmp_path) == run_key(other, plain, 0, {}, tmp_path)


def test_the_long_study_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    study = replace(LONG.small(), seeds=(0,))
    Runner(study, tmp_path, device="cpu").run()
    rows = rows_of(study, tmp_path)
    assert [row["arm"] for row in rows] == ["conv", "distilled", "distilled, plain end", "labels alone"]
    both, one = {"fused", "cls", "distillation"}, {"fused", "cls"}
    assert [set(row["accuracy"]) for row in rows[1:]] == [both, both, one]
    assert LONG.draw is not None
    LONG.draw(study, rows, tmp_path)
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
