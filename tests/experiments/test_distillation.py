"""Distillation at its reduced size: teachers of the same seed and share, and equal steps for every share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.common import runner as runner_module
from experiments.common.machine import ROOT
from experiments.common.readme import section
from experiments.common.results import RESULTS, SEARCH, pack, read_rows, rows_of, run_key
from experiments.common.runner import Runner
from experiments.common.statistics import paired_difference
from experiments.common.study import Arm, RunOf
from experiments.common.tables import difference, pooled_difference
from experiments.distillation.study import (
    BATCH,
    COMPARISONS,
    SHARES,
    SIZES,
    STEPS,
    STUDY,
    TRAINING_IMAGES,
    pairs,
    plot,
    table,
)
from experiments.long_distillation.study import STUDY as LONG

pytest.importorskip("timm", reason="the teacher is timm's")


def test_all_arms_have_the_same_number_of_steps() -> None:
    for arm in STUDY.arms:
        share, epochs = arm.fields["share"], arm.fields["epochs"]
        steps, warm = (
            count * (round(share * TRAINING_IMAGES) // BATCH) for count in (epochs, arm.fields["warmup_epochs"])
        )
        assert steps == pytest.approx(STEPS, rel=0.02)
        assert warm == pytest.approx(STEPS / 10, rel=0.1)


def test_teachers_have_the_data_of_their_students() -> None:
    taught = [arm for arm in STUDY.arms if "teacher" in arm.fields]
    assert len(taught) == 30
    for arm in taught:
        assert isinstance(arm.fields["teacher"], RunOf)
        assert STUDY.arm(arm.fields["teacher"].arm).fields["share"] == arm.fields["share"]


def test_search_runs_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    calls: list[dict[str, Any]] = []
    train = runner_module.train

    def recording_train(**given: Any) -> Any:
        calls.append(given)
        return train(**given)

    monkeypatch.setattr(runner_module, "train", recording_train)
    study = STUDY.at_reduced_size()
    runner = Runner(study, tmp_path, device="cpu")
    pattern = "Ti hard, 100? %"
    runner.search(pattern)
    assert all(given["validation"] == 0.1 for given in calls)
    for given in calls:
        if "teacher" in given:  # trained without the held-out data, too
            assert "/runs/search/conv-100-%-0-" in given["teacher"]
    searched = {row["arm"] for row in read_rows(tmp_path / SEARCH)}
    assert searched == {"conv, 100 %", "Ti hard, 100 %"}
    calls.clear()
    runner.run(pattern, (1,))
    assert runner.failed == runner.unfinished == 0
    rows = {row["arm"]: row for row in read_rows(tmp_path / RESULTS)}
    assert set(rows) == {"conv, 10 %", "conv, 100 %", "Ti hard, 10 %", "Ti hard, 100 %"}
    for given in calls:
        if "teacher" in given:
            share = given["share"]
            assert f"/runs/runs/conv-{100 * share:.0f}-%-1-" in given["teacher"]
    for name, row in rows.items():
        heads = {"fused", "class"} if name.startswith("conv") else {"fused", "cls", "distillation"}
        assert set(row["accuracy"]) == heads
    found = rows_of(study, tmp_path)
    assert "| Ti hard, 10 % |" in section(study, found)
    plot(study, found, tmp_path)
    for name in ("shares.png", "gains.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_pooled_difference_treats_a_seed_as_one_sample() -> None:
    rng = np.random.default_rng(0)
    right = {(arm, seed): rng.random(40) < 0.5 for arm in "abcd" for seed in (0, 1, 2)}

    def rows(arm: str, *seeds: int) -> list[dict[str, Any]]:
        return [{"seed": seed, "count": 40, "correct": {"fused": pack(right[arm, seed].tolist())}} for seed in seeds]

    found = pooled_difference([(rows("a", 2, 0), rows("b", 0, 1, 2)), (rows("c", 0, 1, 2), rows("d", 2, 0))], "fused")
    ours, theirs = (
        np.array([[(right[one, at][n] + 0.0 + right[two, at][n]) / 2 for n in range(40)] for at in (0, 2)])
        for one, two in ("ac", "bd")
    )
    assert found == paired_difference(ours, theirs)
    gains = [[right[one, at].mean() - right[two, at].mean() for one, two in ("ab", "cd")] for at in (0, 2)]
    assert found.seeds == pytest.approx(np.mean(gains, axis=1))
    twice = pooled_difference([(rows("a", 0, 1, 2), rows("b", 0, 1, 2))] * 2, "fused")
    assert twice == difference(rows("a", 0, 1, 2), rows("b", 0, 1, 2), "fused")  # duplicates add no information
    assert pooled_difference([(rows("a", 0), rows("b", 0)), (rows("c", 1), rows("d", 1))], "fused") is None


def test_pooled_comparisons_use_all_pairs() -> None:
    names = {arm.name for arm in STUDY.arms}
    assert all({first, second} <= names for one in COMPARISONS for first, second in pairs(one, SHARES))
    rows = rows_of(STUDY, ROOT / "experiments" / STUDY.name)
    of = {(row["arm"], row["seed"]): 100 * row["accuracy"]["fused"] for row in rows}

    def gain(kinds: list[tuple[str, str]], *shares: int) -> list[float]:
        return [
            float(
                np.mean(
                    [
                        of[f"{s} {a}, {n} %", at] - of[f"{s} {b}, {n} %", at]
                        for a, b in kinds
                        for s in SIZES
                        for n in shares
                    ]
                )
            )
            for at in STUDY.seeds
        ]

    wanted = {
        "*hard* against *plain*": [("hard", "plain")],
        "*hard, ViT* against *plain*": [("hard, ViT", "plain")],
        "*soft* against *plain*": [("soft", "plain")],
        "*no token* against *plain*": [("hard, no token", "plain")],
        "distillation token against *no token*": [("hard", "hard, no token")],
        "*hard* against *soft*": [("hard", "soft")],
        "CNN against *ViT* as teacher": [("hard", "hard, ViT")],
        "*registers* against no registers": [("registers", "plain"), ("hard + registers", "hard")],
    }
    assert table(STUDY, rows).startswith("| pooled, points |")
    lines = table(STUDY, rows).partition("\n\n")[0].splitlines()[2:]
    assert len(lines) == len(wanted)
    for line, (comparison, kinds) in zip(lines, wanted.items(), strict=True):
        _, heading, *each, by_seed, _ = (cell.strip() for cell in line.split("|"))
        assert heading == comparison
        for points, shares in zip(each, ([10], [30], [100], [10, 30, 100]), strict=True):
            assert points.startswith(f"{np.mean(gain(kinds, *shares)):+.2f} (".replace("-", "−"))
        assert by_seed == ", ".join(f"{one:+.2f}" for one in gain(kinds, 10, 30, 100)).replace("-", "−")
    partly = table(STUDY, [row for row in rows if row["arm"] != "Ti plain, 10 %"])  # used by some comparisons
    first, *_, last = partly.partition("\n\n")[0].splitlines()[2:]
    for line in (first, last):
        _, _, tenth, third, *_, over_all, by_seed, _ = (cell.strip() for cell in line.split("|"))
        assert (tenth, over_all, by_seed) == ("–", "–", "–") != third
    assert "pooled" not in table(STUDY, rows[:20])


def test_run_key_of_a_student_includes_its_teacher(tmp_path: Path) -> None:
    study = replace(STUDY.at_reduced_size(), search=None, draws=None)
    student = study.arm("Ti hard, 100 %")
    longer = tuple(
        Arm(arm.name, **{**arm.fields, "epochs": 2}) if arm.name == "conv, 100 %" else arm for arm in study.arms
    )
    other = replace(study, arms=longer)
    assert run_key(study, student, 0, {}, tmp_path) == run_key(study, student, 0, {}, tmp_path)
    assert run_key(study, student, 0, {}, tmp_path) != run_key(other, student, 0, {}, tmp_path)
    plain = study.arm("Ti plain, 100 %")
    assert run_key(study, plain, 0, {}, tmp_path) == run_key(other, plain, 0, {}, tmp_path)


def test_long_distillation_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    study = replace(LONG.at_reduced_size(), seeds=(0,))
    Runner(study, tmp_path, device="cpu").run()
    rows = rows_of(study, tmp_path)
    assert [row["arm"] for row in rows] == ["conv", "distilled", "distilled, plain end", "labels alone"]
    both, one = {"fused", "cls", "distillation"}, {"fused", "cls"}
    assert [set(row["accuracy"]) for row in rows[1:]] == [both, both, one]
    assert LONG.plot is not None
    LONG.plot(study, rows, tmp_path)
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
