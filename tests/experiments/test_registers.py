"""The register studies at their reduced size, large models, and their measurements."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import vitrail
from experiments.__main__ import load_study
from experiments.common.datasets import imagenette
from experiments.common.readme import write_readme
from experiments.common.results import RESULTS, read_rows, rows_of, unpack
from experiments.common.runner import Runner
from experiments.common.study import Study
from experiments.registers import large_models
from experiments.registers.high_norm_tokens import HEADINGS, high_norm_tokens, table_cells
from experiments.registers.measure import dense_tasks, dense_tasks_with_registers, detector_power, measure_model
from experiments.registers.report import by_count, class_probe, highest_norm, outliers_left, plot
from experiments.registers.scene_features import SceneFeatures
from experiments.registers.scenes import imagenette_and_pets, reduced_images_and_shapes
from experiments.registers.study import STUDY
from tests.report.models import plant
from vitrail.analysis.downstream import evaluate_segmentation
from vitrail.analysis.statistics import split_images
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.models import ViT, ViTConfig
from vitrail.tokens import Role, TokenSpec
from vitrail.training import Labels, read_log

LABELS = Labels({"label": ("a", "b")}, InputSpec((32, 32), MEAN, STD))
TOKENS = (TokenSpec("cls", Role.CLASS), TokenSpec("register", Role.REGISTER, 2))
LONG = typer.Typer()
LONG.command()(large_models.main)


def model_of(**options: Any) -> ViT:
    torch.manual_seed(0)
    config = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, num_classes=6, tokens=TOKENS)
    return ViT(replace(config, **options)).eval()


def trained(name: str, out: Path, arms: str) -> tuple[Study, Path]:
    study = replace(load_study(name).at_reduced_size(), seeds=(0,))
    runner = Runner(study, out, device="cpu")
    runner.run(arms)
    assert runner.failed == 0, read_rows(out / RESULTS)
    return study, out


@pytest.fixture(scope="module")
def by_labels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    return trained("registers", tmp_path_factory.mktemp("labels"), "^(0|1) ")


def test_rows_have_norms_probes_and_cost(by_labels: tuple[Study, Path]) -> None:
    study, out = by_labels
    none, one = rows_of(study, out)
    assert (none["arm"], one["arm"]) == ("0 registers", "1 registers")
    assert one["flops"] - none["flops"] == none["flops_per_token"]
    for row in (none, one):
        assert len(row["layers"]) == 2
        assert row["layers"][-1]["max"] == pytest.approx(highest_norm(row) * row["layers"][-1]["50"])
        assert [line["epoch"] for line in row["over_training"]] == [1, 2]
        assert row["power"].keys() == {"0.005", "0.02"}
        assert row["dense"]["whole_picture"] == 0  # shapes are small
        assert 0 < row["dense"]["miou"] <= 1
    assert (class_probe(none, "register"), none["registers"]) == (None, [])
    assert len(one["registers"]) == 1
    assert class_probe(one, "register") == 100 * one["registers"][0]["class_probe"]["balanced_accuracy"]["mean"]
    assert outliers_left(none, "after") is None


def test_plots_are_written(by_labels: tuple[Study, Path]) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    study, out = by_labels
    write_readme(study, out)
    for name in ("norms.png", "registers.png", "each_register.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_models_without_labels_are_evaluated_by_nearest_neighbors(tmp_path: Path) -> None:
    """The accuracy of `evaluate` equals the share of correct predictions."""
    _, out = trained("registers_dino", tmp_path, "^2 ")
    (row,) = read_rows(out / RESULTS)
    assert row["fields"]["recipe"] == "dino"
    assert row["accuracy"].keys() == row["correct"].keys() == {"neighbours"}
    assert unpack(row["correct"]["neighbours"], row["count"]).mean() == pytest.approx(row["accuracy"]["neighbours"])
    assert len(row["registers"]) == 2


def test_both_studies_differ_only_in_recipe_and_optimizer() -> None:
    other = load_study("registers_dino")
    changed = {name for name in other.base if other.base[name] != STUDY.base.get(name)}
    assert changed == {"recipe", "optimizer", "epochs", "batch_size"}
    assert [arm.name for arm in STUDY.arms] == [f"{count} registers" for count in (0, 1, 2, 4, 8, 16)]
    for study in (STUDY, other):
        for arm in study.arms:
            tokens = study.fields(arm)["tokens"]
            count = sum(spec.count for spec in tokens if spec.role is Role.REGISTER)
            assert arm.name == f"{count} registers"


def test_boxes_of_rendered_scenes_are_tight() -> None:
    batch = next(reduced_images_and_shapes().scenes().batches(InputSpec((32, 32), MEAN, STD), 60))
    assert batch.masks is not None
    assert batch.boxes is not None
    for mask, boxes in zip(batch.masks, batch.boxes, strict=True):
        x0, y0, x1, y1 = (int(value) for value in boxes[0])
        assert mask.sum() == mask[y0:y1, x0:x1].sum() > 0
        assert all(edge.any() for edge in (mask[y0, :], mask[y1 - 1, :], mask[:, x0], mask[:, x1 - 1]))


def test_dense_tasks_agree_with_the_toolkit() -> None:
    model, scenes = model_of(), reduced_images_and_shapes().scenes()
    features = SceneFeatures.of(model, LABELS, scenes)
    found = dense_tasks(features)
    images = torch.cat([batch.images for batch in scenes.batches(InputSpec((32, 32), MEAN, STD), 7)])
    tokens = vitrail.record(model, images, layers=[-1]).tokens[1]
    torch.testing.assert_close(features.tokens, tokens[:, 3:])
    split = split_images(60, test_share=0.5, seed=0)
    expected = evaluate_segmentation(tokens[:, 3:].double(), features.masks, (4, 4), split)
    assert found["miou"] == pytest.approx(expected.miou, abs=0.01)
    report = vitrail.inspect(model, scenes, probes=False, batch_size=16)
    assert report is not None
    for name in ("keys", "values"):
        share = report.discovery[name]["lost"]["corloc"]["share"]
        assert found[name]["fixed"] == pytest.approx(share, abs=2 / 60)  # a report keeps half precision


def test_power_is_high_for_narrow_norms_and_low_for_wide_ones() -> None:
    draw = np.random.default_rng(0)
    narrow, wide = (torch.from_numpy(np.exp(width * draw.standard_normal((60, 196)))) for width in (0.1, 0.5))
    assert detector_power(narrow)["0.02"] == {"3": 1.0, "5": 1.0, "10": 1.0}
    found = detector_power(wide)
    assert found["0.02"]["3"] == found["0.005"]["5"] == 0.0


def test_planted_artifacts_are_found_and_treated(tmp_path: Path) -> None:
    model, scenes = model_of(), reduced_images_and_shapes().scenes()
    plant(model.blocks[0], places=(5,), special=3, factor=20.0)
    row = measure_model(model, LABELS, scenes)
    assert row["norms"]["verdict"] == "artifacts"
    assert row["norms"]["outlier_share"] == pytest.approx(1 / 16)
    assert [layer["verdict"] for layer in row["layers"]] == ["artifacts", "artifacts"]
    assert class_probe(row, "outlier") is not None
    assert outliers_left(row, "after") is not None
    assert row["cure"]["dense"].keys() == {"test-time registers", "random neurons"}
    pytest.importorskip("matplotlib", reason="plots need it")
    plot(STUDY, [{**row, "arm": "2 registers", "seed": 0, "over_training": [{"epoch": 1, "typical": 1.0}]}], tmp_path)
    assert (tmp_path / "test_time_registers.png").read_bytes().startswith(b"\x89PNG")


def test_values_by_count_need_all_seeds() -> None:
    def row(seed: int, x: float | None) -> dict[str, Any]:
        return {"seed": seed, "x": x, "y": None}

    arms = {"0 registers": [row(0, 1.0), row(1, 2.0)], "4 registers": [row(1, 4.0), row(0, 3.0), row(2, 9.0)]}
    assert by_count(arms, {"x": lambda row: row["x"], "y": lambda row: row["y"]}) == {
        "x": [[(0.0, 1.0), (4.0, 3.0)], [(0.0, 2.0), (4.0, 4.0)]]
    }
    arms["8 registers"] = [row(0, None), row(1, 5.0)]
    assert by_count(arms, {"x": lambda row: row["x"]}) == {}


def test_treatment_does_not_change_the_model() -> None:
    model, scenes = model_of(), reduced_images_and_shapes().scenes()
    before = SceneFeatures.of(model, LABELS, scenes)
    found = dense_tasks_with_registers(model, LABELS, scenes, {"0": [1, 2, 3]})
    after = SceneFeatures.of(model, LABELS, scenes)
    assert torch.equal(before.tokens, after.tokens)
    assert found["test-time registers"].keys() == dense_tasks(before).keys()
    with vitrail.test_time_registers(model, neurons={0: [1, 2, 3]}):
        moved = SceneFeatures.of(model, LABELS, scenes)
    assert moved.tokens.shape == before.tokens.shape
    assert not torch.equal(moved.tokens, before.tokens)
    assert dense_tasks(moved) == found["test-time registers"]


def test_high_norm_tokens_with_positions_and_probes() -> None:
    features = SceneFeatures.of(model_of(), LABELS, reduced_images_and_shapes().scenes())
    tokens = torch.nn.functional.normalize(features.tokens, dim=-1)
    tokens[:, 6, 0] += 2 * (features.classes == 1)  # patch 6 encodes one class, with a high norm
    tokens[3, 9] *= 9
    tokens[8, 14] *= 7
    planted = replace(features, tokens=tokens)
    found = high_norm_tokens(planted, share=2 / tokens[..., 0].numel())
    first, second = found["tokens"]
    assert (first["picture"], first["row"], first["column"]) == ("shape 3", 2, 1)
    assert (second["picture"], second["row"], second["column"]) == ("shape 8", 3, 2)
    assert (first["over_median"], second["over_median"]) == pytest.approx((9, 7), rel=1e-3)
    mask = features.masks[3, 16:24, 8:16]
    assert first["covered"] == pytest.approx((mask == 1).float().mean().item())
    assert found["places"]["outliers"] == 2
    assert found["places"]["border_distance"]["outlier"]["mean"] == pytest.approx(0.5)  # one inside, one at the border
    similar = features.similarity[[3, 8], [9, 14]]
    assert found["places"]["similarity"]["outlier"]["mean"] == pytest.approx(similar.mean().item())
    assert table_cells(found)[:5] == ["2", "2 or more", "2", "2", "0.50"]
    more = high_norm_tokens(replace(planted, classes=(features.classes == 1).long()), share=0.1)
    line = dict(zip(HEADINGS, table_cells(more), strict=True))
    assert line["tokens"] == f"{len(more['tokens'])}" == "96"
    assert line["above twice the median"] == f"{(tokens.norm(dim=-1) > 2 * tokens.norm(dim=-1).median()).sum()}" != "96"
    kinds = more["classes"]["kinds"]
    assert kinds["longest"]["balanced_accuracy"]["mean"] > 0.95 > kinds["random"]["balanced_accuracy"]["mean"]


@pytest.mark.parametrize(
    ("recipe", "patches", "answer"), [("labels", 0.0, "fused"), ("dino", 1.0, "neighbours")], ids=["labels", "dino"]
)
def test_large_run_stops_in_time_and_resumes(recipe: str, patches: float, answer: str, tmp_path: Path) -> None:
    data, study = reduced_images_and_shapes(), STUDY.at_reduced_size()
    large = large_models.LargeRun(recipe, registers=1, epochs=2, patches=patches)
    options = large.fields(study)
    others = [large, replace(large, patches=0.5), replace(large, epochs=3), replace(large, registers=2)]
    assert len({one.folder for one in others}) == 4
    assert replace(large, patches=0.5).name != large.name
    assert not any(" " in one.folder for one in others)
    assert (options["model"], options["save_every"]) == ("vit_base_patch16", 1)
    assert large_models.resume_training(tmp_path / "run", options, data, 1e-9, "cpu") is None
    assert not (tmp_path / "run" / "last").exists()
    assert large_models.resume_training(tmp_path / "run", options, data, float("inf"), "cpu") is not None
    row = large_models.measure_run(tmp_path / "run", large.name, data, "cpu")
    *_, before, last = (one["epoch"] for one in row["over_training"])
    assert (before, last, row["epochs"], row["since"]) == (1, 2, 2, None)
    assert row["over_training"][-1]["layers"] == row["layers"]  # the last checkpoint is the last model
    assert row["over_training"][-1]["norms"] == row["norms"]
    assert row["tail"]["tokens"][0]["over_median"] == pytest.approx(highest_norm(row), rel=0.01)
    learned = read_log(tmp_path / "run" / "log.jsonl", "epoch")[-1]
    assert ("patches" in learned["losses"]) == bool(patches)
    assert row["losses"][-1] == learned["losses"]
    page = large_models.section([{**row, "device": "a machine", "commit": "abc"}])
    name = f"ViT-B, {recipe}{' + patches' if patches else ''}, AdamW, 1 registers"
    line = next(line for line in page.splitlines() if line.startswith(f"| {name} | 2 |"))
    assert "on a machine, commit abc." in page
    assert f"| {100 * row['accuracy'][answer]:.2f} |" in line
    pytest.importorskip("matplotlib", reason="plots need it")
    large_models.plot_norms([row], tmp_path)
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--recipe", "foo"], "expected one of labels, dino"),
        (["--optimizer", "sgd"], "expected one of adamw, muon"),
        (["--patches", "1"], "--patches 1 needs --recipe dino; got --recipe labels"),
        (["--registers", "-1"], "Invalid value for '--registers'"),
        (["--epochs", "0"], "Invalid value for '--epochs'"),
        (["--data", "nowhere"], "Set the folder of the datasets"),
    ],
)
def test_invalid_options_of_large_runs(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        large_models, "STUDY", large_models.STUDY if "--data" in given else large_models.STUDY.at_reduced_size()
    )
    monkeypatch.setenv("VITRAIL_DATA", "")
    imagenette.cache_clear()
    imagenette_and_pets.cache_clear()
    files = ["--out", str(tmp_path / "runs"), "--rows", str(tmp_path / "rows.jsonl"), "--device", "cpu"]
    result = CliRunner().invoke(LONG, [*given, *files])
    words = " ".join(result.output.replace("│", "").split())
    assert (result.exit_code, message in words) == (2, True), result.output
    assert not list(tmp_path.iterdir())


def test_readme_agrees_with_the_rows_of_large_models() -> None:
    page = (large_models.HERE / "README.md").read_text(encoding="utf-8")
    assert f"<!-- long -->\n{large_models.section(read_rows(large_models.ROWS))}\n<!-- /long -->" in page


def test_other_rows_are_listed_next_to_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    ours = (large_models.HERE / "README.md").read_bytes()
    rows = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(LONG, ["--plot", "--rows", str(rows)])
    assert (result.exit_code, f"{rows} has no rows" in result.output) == (2, True), result.output
    rows.write_text('{"arm": "x"}\n')
    result = CliRunner().invoke(LONG, ["--plot", "--rows", str(rows)])
    assert (result.exit_code, f"{rows}, line 1: expected a row with epochs" in result.output) == (2, True), (
        result.output
    )
    rows.write_text(large_models.ROWS.read_text(encoding="utf-8").splitlines()[-1], encoding="utf-8")
    result = CliRunner().invoke(LONG, ["--plot", "--rows", str(rows)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert large_models.section(read_rows(rows), "norms.png") in page
    assert "is 1.90](norms.png)" in page  # the highest norm over the median at the end
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")
    assert (large_models.HERE / "README.md").read_bytes() == ours


def test_unwritable_rows_are_reported_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_models, "STUDY", large_models.STUDY.at_reduced_size())
    (tmp_path / "file").touch()
    files = ["--out", str(tmp_path / "runs"), "--rows", str(tmp_path / "file" / "rows.jsonl"), "--device", "cpu"]
    result = CliRunner().invoke(LONG, files)
    assert (result.exit_code, "file" in result.output) == (2, True), result.output
    assert not (tmp_path / "runs").exists()
