"""Merging on spectrograms and clips at the reduced size, against `evaluate`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.common.readme import section, write_readme
from experiments.common.results import rows_of
from experiments.common.runner import Runner
from experiments.common.study import Study, TrainedModel
from experiments.merging.measure import MERGED, UNMERGED, largest_r, throughput
from experiments.merging.report import row_at
from experiments.merging.study import PLAIN, measure
from experiments.sound_and_video.clips.study import STUDY as CLIPS
from experiments.sound_and_video.sounds.study import STUDY as SOUNDS
from vitrail.models import create_model
from vitrail.training import Run, evaluate

STUDIES = {"sounds": (SOUNDS, (40, 64), 9, 12, 40), "clips": (CLIPS, (8, 48, 48), 15, 19, 72)}
"""Study, size of its samples, r of training, cap, and number of patches at the reduced size."""


pytestmark = pytest.mark.usefixtures("short_times")


@pytest.fixture(scope="module", params=list(STUDIES))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path, int, int]:
    """Train and measure a study; return it with r and the number of patches at the reduced size."""
    study, _, r, _, patches = STUDIES[request.param]

    def checked(run: Run, trained: TrainedModel) -> dict[str, Any]:
        accuracy = evaluate(run.last, trained.data.validation, merge={"r": r}, seconds=0, look=0).accuracy
        return {**measure(run, trained, seconds=1e-3), "evaluated": dict(accuracy)}

    out = tmp_path_factory.mktemp(request.param)
    study = replace(study.at_reduced_size(), measure=checked, search=None, seeds=(0,))
    runner = Runner(study, out, device="cpu")
    runner.run()
    assert (runner.failed, runner.unfinished) == (0, 0)
    return study, out, r, patches


def test_models_are_measured_merged_and_unmerged(finished: tuple[Study, Path, int, int]) -> None:
    study, out, r, patches = finished
    rows = rows_of(study, out)
    assert [row["arm"] for row in rows] == [PLAIN, f"trained with r = {r}"]
    for row in rows:
        assert row_at(row, (MERGED, 0))["correct"] == row_at(row, (UNMERGED, 0))["correct"] == row["correct"]
        values = [one["r"] for one in row["measured"] if one["kind"] == MERGED]
        assert values[-1] == patches // 3  # the cap of two layers
        assert (r in values) == (row["arm"] != PLAIN)
        for one in row["measured"]:
            assert one["tokens"] == 1 + patches - 2 * one["r"]
            assert (throughput(one) is None) == (one["kind"] in ("at random", "pruned"))
    trained = row_at(rows[1], (MERGED, r))
    assert trained["accuracy"] == pytest.approx(rows[1]["evaluated"])
    assert rows[1]["trained_with"] == [MERGED, r]


def test_readme_agrees_with_the_rows(finished: tuple[Study, Path, int, int]) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    study, out, r, _ = finished
    write_readme(study, out)
    rows = rows_of(study, out)
    expected = row_at(rows[1], (MERGED, r))
    (line,) = (
        line for line in section(study, rows).splitlines() if line.startswith(f"| {rows[1]['arm']}: r = {r} | 1 |")
    )
    assert f"| {100 * expected['accuracy']['fused']:.2f} |" in line
    assert f"| {expected['images_per_s']:,.0f} | {expected['speed_up']:.2f} |" in line
    assert {path.name for path in out.glob("*.png")} == {"trade.png", "kinds.png"}


@pytest.mark.parametrize("name", STUDIES)
def test_readme_names_patches_and_cap(name: str) -> None:
    study, size, r, cap, _ = STUDIES[name]
    with torch.device("meta"):
        model = create_model(study.base["model"], image_size=size, patch_size=study.base["patch_size"])
    page = (Path(__file__).parents[2] / "experiments" / study.name / "README.md").read_text(encoding="utf-8")
    words = " ".join(page.split())
    assert largest_r(model) == cap >= r
    assert f"the cap is r = {cap}, and the second arm is trained with r = {r}" in words
    assert f"in {model.layout().num_patches} patches" in words
    assert f"{study.base['epochs']} epochs" in words
    assert study.arms[1].fields == {"merge": f"r={r}"}
