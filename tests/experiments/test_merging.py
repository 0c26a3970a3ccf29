"""The merging study at its reduced size: measurements against merged models, the cap against brute force."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.common.datasets import reduced_images
from experiments.common.inputs import batches
from experiments.common.readme import section, write_readme
from experiments.common.results import rows_of, unpack
from experiments.common.runner import Runner
from experiments.common.study import Study
from experiments.merging import measure
from experiments.merging.measure import KINDS, MERGED, UNMERGED, largest_r, measure_merging, r_values, throughput, timed
from experiments.merging.report import row_at
from experiments.merging.study import PLAIN, STUDY, WITH, R
from experiments.merging.study import measure as measure_run
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import NotApplied
from vitrail.merging import Room
from vitrail.models import ViT, create_model
from vitrail.surgery import Merging, merge
from vitrail.training import Labels
from vitrail.training.config.syntax import read_tokens

pytestmark = pytest.mark.usefixtures("short_times")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    out = tmp_path_factory.mktemp("merging")
    study = replace(STUDY.at_reduced_size(), measure=partial(measure_run, seconds=1e-3), search=None)
    runner = Runner(study, out, device="cpu")
    runner.run()
    assert runner.failed == 0, (out / "results.jsonl").read_text()
    return study, out


def test_every_setting_is_measured(finished: tuple[Study, Path]) -> None:
    rows = rows_of(*finished)
    assert [(row["arm"], row["seed"]) for row in rows] == [(PLAIN, 0), (PLAIN, 1), (WITH, 0), (WITH, 1)]
    for row in rows:
        merges = [0, 4, 8, 13, 17, 21]  # 64 patches, 2 layers
        if row["arm"] == WITH:
            merges.insert(4, R)
        expected = [(UNMERGED, 0), *((kind, r) for kind in KINDS for r in merges if r or kind == MERGED)]
        assert [(one["kind"], one["r"]) for one in row["measured"]] == expected
        assert row["trained_with"] == ([MERGED, R] if row["arm"] == WITH else [UNMERGED, 0])
        assert 0 < row["epoch_seconds"] < row["seconds"]


def test_accuracy_equals_the_share_of_correct_predictions(finished: tuple[Study, Path]) -> None:
    for row in rows_of(*finished):
        assert row_at(row, (UNMERGED, 0))["accuracy"] == pytest.approx(row["accuracy"])
        for one in row["measured"]:
            for name, packed in one["correct"].items():
                assert unpack(packed, row["count"]).mean() == pytest.approx(one["accuracy"][name])


def test_r_0_changes_nothing_and_larger_r_costs_less(finished: tuple[Study, Path]) -> None:
    for row in rows_of(*finished):
        assert row_at(row, (MERGED, 0))["correct"] == row_at(row, (UNMERGED, 0))["correct"] == row["correct"]
        for one in row["measured"]:
            assert one["tokens"] == 65 - 2 * one["r"]
            assert one["gflops"] == row_at(row, (MERGED, one["r"]))["gflops"]
            assert (throughput(one) is not None) == (one["kind"] in measure.TIMED)
            assert one.get("failed", {}) == {}
        costs = [one["gflops"] for one in row["measured"] if one["kind"] == MERGED]
        assert costs == sorted(costs, reverse=True)


def test_readme_is_generated_from_the_rows(finished: tuple[Study, Path]) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    study, out = finished
    rows = rows_of(study, out)
    (out / "README.md").write_text("<!-- results -->\n<!-- /results -->\n")
    write_readme(study, out)
    page = (out / "README.md").read_text()
    assert section(study, rows) in page
    cells = {line.split(" | ")[0]: line.strip(" |").split(" | ") for line in page.splitlines() if line.startswith("|")}
    plain, merged = rows[:2], rows[2:]
    shares = [100 * (1 - own["epoch_seconds"] / base["epoch_seconds"]) for own, base in zip(merged, plain, strict=True)]
    mean = f"{np.mean(shares):.1f} ± {np.std(shares, ddof=1):.1f}".replace("-", "−")
    assert f"| {mean} |" in next(line for line in page.splitlines() if line.startswith(f"| {WITH} | 2 |"))
    accuracy = np.mean([100 * row_at(row, (MERGED, R))["accuracy"]["fused"] for row in merged])
    speeds = [throughput(one) for row in merged for one in row["measured"] if (one["kind"], one["r"]) == (MERGED, R)]
    base = [throughput(row["measured"][0]) for row in merged]
    line = next(line for line in page.splitlines() if line.startswith(f"| {WITH}: r = {R} | 2 |"))
    assert f"| {accuracy:.2f} ± " in line
    assert f"| {np.mean(speeds):,.0f} ± " in line
    assert f"| {np.mean(np.divide(speeds, base)):.2f} ± " in line
    against = [np.mean(right(row, (MERGED, R))) - np.mean(right(base, (UNMERGED, 0)))
               for row, base in zip(merged, plain, strict=True)]  # fmt: skip
    assert f"| {100 * np.mean(against):+.2f} (".replace("-", "−") in line
    pruned = [np.mean(right(row, ("pruned", 21))) - np.mean(right(row, (MERGED, 21))) for row in plain]
    assert cells[f"| {PLAIN}: r = 21"][-1].startswith(f"{100 * np.mean(pruned):+.2f} (".replace("-", "−"))
    for name in ("trade.png", "kinds.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def right(row: Mapping[str, Any], setting: tuple[str, int]) -> Any:
    return unpack(row_at(row, setting)["correct"]["fused"], row["count"])


def small_vit(tokens: str, depth: int = 3, patch: int = 8) -> ViT:
    torch.manual_seed(0)
    options = {"width": 32, "depth": depth, "heads": 2, "image_size": 32, "patch_size": patch, "num_classes": 6}
    model = create_model("vit_tiny_patch16", tokens=read_tokens(tokens, {}), **options).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.mark.parametrize(("depth", "patch"), [(1, 8), (2, 4), (3, 8), (12, 4)])
def test_cap_is_the_largest_r_with_enough_pairs_in_all_layers(depth: int, patch: int) -> None:
    model = small_vit("cls,distillation,register=4", depth, patch)
    patches = (32 // patch) ** 2
    room = Room(patches + 6, 6)
    expected = max(r for r in range(patches) if room.cap([r] * depth) == (r,) * depth)
    assert largest_r(model) == expected
    assert (r_values(model)[0], r_values(model)[-1]) == (0, expected)


def test_model_with_more_special_tokens_is_measured_and_not_changed() -> None:
    """Compare every prediction at every setting with the merged model; random merging is reproducible."""
    model, validation = small_vit("cls,distillation,register=4"), reduced_images().validation
    labels = Labels({"label": tuple(validation.classes["label"])}, InputSpec((32, 32), MEAN, STD))
    ((images, truth),) = batches(model, labels, validation)
    with torch.no_grad():  # center the logits, so that predictions depend on the image
        for name, logits in model.forward_output(images).by_role.items():
            model.heads.get_submodule(name).bias -= logits.mean(0)
    before = copy.deepcopy(model.state_dict())
    found = measure_merging(model, labels, validation, seconds=0)
    assert [one["r"] for one in found if one["kind"] == MERGED] == [0, 1, 2, 3, 4]
    torch.manual_seed(1)
    assert found == measure_merging(model, labels, validation, seconds=0)
    with pytest.raises(NotApplied):
        Merging.of(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    options: dict[str, dict[str, Any]] = {
        UNMERGED: {}, MERGED: {}, "sizes ignored": {"proportional": False}, "pruned": {"method": "prune"}
    }  # fmt: skip
    for one in found:
        assert one["accuracy"].keys() == {"fused", "cls", "distillation"}
        assert one["tokens"] == 16 + 6 - 3 * one["r"]
        assert "images_per_s" not in one
        if one["kind"] in options:
            with torch.no_grad(), merge(model, r=one["r"], **options[one["kind"]]):
                expected = model(images).argmax(1) == truth[:, 0]
            assert unpack(one["correct"]["fused"], len(truth)).tolist() == expected.tolist()
    by_kind = {kind: [one["correct"] for one in found if one["kind"] == kind and one["r"]] for kind in KINDS}
    assert all(one != other for one, other in combinations(by_kind.values(), 2))  # no kind equals another


def test_failed_mode_is_reported_and_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **options: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(
        measure, "timing_modes", lambda setting, device: ("blocks", "eager") if setting[1] else ("eager",)
    )
    found = timed(small_vit("cls"), [(UNMERGED, 0), (MERGED, 2)], torch.randn(2, 3, 32, 32), 1e-3)
    assert found[UNMERGED, 0].keys() == {"images_per_s", "failed"}
    assert found[UNMERGED, 0]["failed"] == {}
    assert list(found[MERGED, 2]["images_per_s"]) == ["eager"]
    assert found[MERGED, 2]["failed"] == {"blocks": "RuntimeError: no compiler here"}
    assert throughput(found[MERGED, 2]) == found[MERGED, 2]["images_per_s"]["eager"] > 0
    assert throughput({"images_per_s": {"graph": 2.0, "blocks-graph": 3.0}}) == 3
    assert throughput({}) is None
