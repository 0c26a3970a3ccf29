"""The studies of registers at their reduced size, the long run, and what is measured by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import vitrail
from experiments.__main__ import study_called
from experiments.common.data import imagenette
from experiments.common.pages import write_pages
from experiments.common.rows import RESULTS, read_rows, unpack
from experiments.common.running import Runner
from experiments.common.study import Study
from experiments.common.tables import rows_of
from experiments.registers import long, tail
from experiments.registers.looking import cured, dense, examine, power
from experiments.registers.scenes import few_and_shapes, imagenette_and_pets
from experiments.registers.seen import Seen
from experiments.registers.showing import by_count, draw, left, longest, told
from experiments.registers.study import STUDY
from tests.report.models import plant
from vitrail.analysis.downstream import evaluate_segmentation
from vitrail.analysis.statistics import split_images
from vitrail.data.spec import MEAN, STD, Preprocessing
from vitrail.models import ViT, ViTConfig
from vitrail.tokens import Role, TokenSpec
from vitrail.training import Labels, read_log

LABELS = Labels({"label": ("a", "b")}, Preprocessing((32, 32), MEAN, STD))
TOKENS = (TokenSpec("cls", Role.CLASS), TokenSpec("register", Role.REGISTER, 2))
LONG = typer.Typer()
LONG.command()(long.main)


def model_of(**options: Any) -> ViT:
    torch.manual_seed(0)
    config = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, num_classes=6, tokens=TOKENS)
    return ViT(replace(config, **options)).eval()


def trained(name: str, out: Path, arms: str) -> tuple[Study, Path]:
    study = replace(study_called(name).small(), seeds=(0,))
    runner = Runner(study, out, device="cpu")
    runner.run(arms)
    assert runner.failed == 0, read_rows(out / RESULTS)
    return study, out


@pytest.fixture(scope="module")
def by_labels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    return trained("registers", tmp_path_factory.mktemp("labels"), "^(0|1) ")


def test_rows_tell_norms_tokens_and_cost(by_labels: tuple[Study, Path]) -> None:
    study, out = by_labels
    none, one = rows_of(study, out)
    assert (none["arm"], one["arm"]) == ("0 registers", "1 registers")
    assert one["flops"] - none["flops"] == none["flops_per_token"]
    for row in (none, one):
        assert len(row["layers"]) == 2
        assert row["layers"][-1]["max"] == pytest.approx(longest(row) * row["layers"][-1]["50"])
        assert [line["epoch"] for line in row["over_training"]] == [1, 2]
        assert row["power"].keys() == {"0.005", "0.02"}
        assert row["dense"]["whole_picture"] == 0  # shapes are small
        assert 0 < row["dense"]["miou"] <= 1
    assert (told(none, "register"), none["registers"]) == (None, [])
    assert len(one["registers"]) == 1
    assert told(one, "register") == 100 * one["registers"][0]["class_probe"]["balanced_accuracy"]["mean"]
    assert left(none, "after") is None


def test_plots_are_drawn(by_labels: tuple[Study, Path]) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    study, out = by_labels
    write_pages(study, out, evidence=None)
    for name in ("norms.png", "registers.png", "each_register.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_models_without_labels_are_scored_by_their_neighbours(tmp_path: Path) -> None:
    """Two ways to count: `evaluate` over batches, and every picture by itself."""
    _, out = trained("registers_dino", tmp_path, "^2 ")
    (row,) = read_rows(out / RESULTS)
    assert row["fields"]["recipe"] == "dino"
    assert row["accuracy"].keys() == row["correct"].keys() == {"neighbours"}
    assert unpack(row["correct"]["neighbours"], row["count"]).mean() == pytest.approx(row["accuracy"]["neighbours"])
    assert len(row["registers"]) == 2


def test_both_studies_differ_in_the_recipe_and_its_optimiser_alone() -> None:
    other = study_called("registers_dino")
    changed = {name for name in other.base if other.base[name] != STUDY.base.get(name)}
    assert changed == {"recipe", "optimizer", "epochs", "batch_size"}
    assert [arm.name for arm in STUDY.arms] == [f"{count} registers" for count in (0, 1, 2, 4, 8, 16)]
    for study in (STUDY, other):
        for arm in study.arms:
            tokens = study.fields(arm)["tokens"]
            count = sum(spec.count for spec in tokens if spec.role is Role.REGISTER)
            assert arm.name == f"{count} registers"


def test_boxes_of_drawn_scenes_are_tight() -> None:
    batch = next(few_and_shapes().scenes().batches(Preprocessing((32, 32), MEAN, STD), 60))
    assert batch.masks is not None
    assert batch.boxes is not None
    for mask, boxes in zip(batch.masks, batch.boxes, strict=True):
        x0, y0, x1, y1 = (int(value) for value in boxes[0])
        assert mask.sum() == mask[y0:y1, x0:x1].sum() > 0
        assert all(edge.any() for edge in (mask[y0, :], mask[y1 - 1, :], mask[:, x0], mask[:, x1 - 1]))


def test_dense_figures_are_those_of_the_toolkit() -> None:
    model, scenes = model_of(), few_and_shapes().scenes()
    seen = Seen.by(model, LABELS, scenes)
    found = dense(seen)
    images = torch.cat([batch.images for batch in scenes.batches(Preprocessing((32, 32), MEAN, STD), 7)])
    tokens = vitrail.record(model, images, layers=[-1]).tokens[1]
    torch.testing.assert_close(seen.tokens, tokens[:, 3:])
    split = split_images(60, test_share=0.5, seed=0)
    expected = evaluate_segmentation(tokens[:, 3:].double(), seen.masks, (4, 4), split)
    assert found["miou"] == pytest.approx(expected.miou, abs=0.01)
    report = vitrail.inspect(model, scenes, probes=False, batch_size=16)
    assert report is not None
    for name in ("keys", "values"):
        share = report.discovery[name]["lost"]["corloc"]["share"]
        assert found[name]["fixed"] == pytest.approx(share, abs=2 / 60)  # what is kept for a report is halved


def test_power_is_high_for_narrow_norms_and_low_for_wide_ones() -> None:
    draw = np.random.default_rng(0)
    narrow, wide = (torch.from_numpy(np.exp(width * draw.standard_normal((60, 196)))) for width in (0.1, 0.5))
    assert power(narrow)["0.02"] == {"3": 1.0, "5": 1.0, "10": 1.0}
    found = power(wide)
    assert found["0.02"]["3"] == found["0.005"]["5"] == 0.0


def test_artifacts_are_found_and_a_cure_is_tried(tmp_path: Path) -> None:
    model, scenes = model_of(), few_and_shapes().scenes()
    plant(model.blocks[0], places=(5,), special=3, factor=20.0)
    row = examine(model, LABELS, scenes)
    assert row["norms"]["verdict"] == "artifacts"
    assert row["norms"]["outlier_share"] == pytest.approx(1 / 16)
    assert [layer["verdict"] for layer in row["layers"]] == ["artifacts", "artifacts"]
    assert told(row, "outlier") is not None
    assert left(row, "after") is not None
    assert row["cure"]["dense"].keys() == {"test-time registers", "random neurons"}
    pytest.importorskip("matplotlib", reason="plots need it")
    draw(STUDY, [{**row, "arm": "2 registers", "seed": 0, "over_training": [{"epoch": 1, "typical": 1.0}]}], tmp_path)
    assert (tmp_path / "cure.png").read_bytes().startswith(b"\x89PNG")


def test_values_by_count_are_those_that_all_seeds_have() -> None:
    def row(seed: int, x: float | None) -> dict[str, Any]:
        return {"seed": seed, "x": x, "y": None}

    arms = {"0 registers": [row(0, 1.0), row(1, 2.0)], "4 registers": [row(1, 4.0), row(0, 3.0), row(2, 9.0)]}
    assert by_count(arms, {"x": lambda row: row["x"], "y": lambda row: row["y"]}) == {
        "x": [[(0.0, 1.0), (4.0, 3.0)], [(0.0, 2.0), (4.0, 4.0)]]
    }
    arms["8 registers"] = [row(0, None), row(1, 5.0)]
    assert by_count(arms, {"x": lambda row: row["x"]}) == {}


def test_a_cure_leaves_the_model_as_it_was() -> None:
    model, scenes = model_of(), few_and_shapes().scenes()
    before = Seen.by(model, LABELS, scenes)
    found = cured(model, LABELS, scenes, {"0": [1, 2, 3]})
    after = Seen.by(model, LABELS, scenes)
    assert torch.equal(before.tokens, after.tokens)
    assert found["test-time registers"].keys() == dense(before).keys()
    with vitrail.test_time_registers(model, neurons={0: [1, 2, 3]}):
        moved = Seen.by(model, LABELS, scenes)
    assert moved.tokens.shape == before.tokens.shape
    assert not torch.equal(moved.tokens, before.tokens)
    assert dense(moved) == found["test-time registers"]


def test_the_longest_tokens_are_named_with_their_places_and_what_they_hold() -> None:
    seen = Seen.by(model_of(), LABELS, few_and_shapes().scenes())
    tokens = torch.nn.functional.normalize(seen.tokens, dim=-1)
    tokens[:, 6, 0] += 2 * (seen.classes == 1)  # patch 6 tells one class, and is long there
    tokens[3, 9] *= 9
    tokens[8, 14] *= 7
    planted = replace(seen, tokens=tokens)
    found = tail.of(planted, share=2 / tokens[..., 0].numel())
    first, second = found["tokens"]
    assert (first["picture"], first["row"], first["column"]) == ("shape 3", 2, 1)
    assert (second["picture"], second["row"], second["column"]) == ("shape 8", 3, 2)
    assert (first["over_median"], second["over_median"]) == pytest.approx((9, 7), rel=1e-3)
    mask = seen.masks[3, 16:24, 8:16]
    assert first["covered"] == pytest.approx((mask == 1).float().mean().item())
    assert found["places"]["outliers"] == 2
    assert found["places"]["border_distance"]["outlier"]["mean"] == pytest.approx(0.5)  # one inside, one at the border
    similar = seen.similarity[[3, 8], [9, 14]]
    assert found["places"]["similarity"]["outlier"]["mean"] == pytest.approx(similar.mean().item())
    assert tail.cells(found)[:5] == ["2", "2 or more", "2", "2", "0.50"]
    more = tail.of(replace(planted, classes=(seen.classes == 1).long()), share=0.1)
    line = dict(zip(tail.HEAD, tail.cells(more), strict=True))
    assert line["longest tokens"] == f"{len(more['tokens'])}" == "96"
    assert line["above twice the median"] == f"{(tokens.norm(dim=-1) > 2 * tokens.norm(dim=-1).median()).sum()}" != "96"
    kinds = more["classes"]["kinds"]
    assert kinds["longest"]["balanced_accuracy"]["mean"] > 0.95 > kinds["random"]["balanced_accuracy"]["mean"]


@pytest.mark.parametrize(
    ("recipe", "patches", "answer"), [("labels", 0.0, "fused"), ("dino", 1.0, "neighbours")], ids=["labels", "dino"]
)
def test_the_long_run_stops_in_time_and_goes_on(recipe: str, patches: float, answer: str, tmp_path: Path) -> None:
    data, study = few_and_shapes(), STUDY.small()
    asked = long.Asked(recipe, registers=1, epochs=2, patches=patches)
    wanted = asked.fields(study)
    others = [asked, replace(asked, patches=0.5), replace(asked, epochs=3), replace(asked, registers=2)]
    assert len({one.folder for one in others}) == 4
    assert replace(asked, patches=0.5).name != asked.name
    assert not any(" " in one.folder for one in others)
    assert (wanted["model"], wanted["save_every"]) == ("vit_base_patch16", 1)
    assert long.go_on(tmp_path / "run", wanted, data, 1e-9, "cpu") is None
    assert not (tmp_path / "run" / "last").exists()
    assert long.go_on(tmp_path / "run", wanted, data, float("inf"), "cpu") is not None
    row = long.row_of(tmp_path / "run", asked.name, data, "cpu")
    *_, before, last = (one["epoch"] for one in row["over_training"])
    assert (before, last, row["epochs"], row["since"]) == (1, 2, 2, None)
    assert row["over_training"][-1]["layers"] == row["layers"]  # the last checkpoint is the last model
    assert row["over_training"][-1]["norms"] == row["norms"]
    assert row["tail"]["tokens"][0]["over_median"] == pytest.approx(longest(row), rel=0.01)
    learned = read_log(tmp_path / "run" / "log.jsonl", "epoch")[-1]
    assert ("patches" in learned["losses"]) == bool(patches)
    assert row["losses"][-1] == learned["losses"]
    page = long.section([{**row, "device": "a machine", "commit": "abc"}])
    name = f"ViT-B, {recipe}{' + patches' if patches else ''}, AdamW, 1 registers"
    line = next(line for line in page.splitlines() if line.startswith(f"| {name} | 2 |"))
    assert "on a machine, commit abc." in page
    assert f"| {100 * row['accuracy'][answer]:.2f} |" in line
    pytest.importorskip("matplotlib", reason="plots need it")
    long.draw([row], tmp_path)
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--recipe", "foo"], "expected one of labels, dino"),
        (["--optimizer", "sgd"], "expected one of adamw, muon"),
        (["--patches", "1"], "--patches 1 is for --recipe dino; got --recipe labels"),
        (["--registers", "-1"], "Invalid value for '--registers'"),
        (["--epochs", "0"], "Invalid value for '--epochs'"),
        (["--data", "nowhere"], "Name the folder of the data sets"),
    ],
)
def test_wrong_words_for_the_long_run_are_told(
    given: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long, "STUDY", long.STUDY if "--data" in given else long.STUDY.small())
    monkeypatch.setenv("VITRAIL_DATA", "")
    imagenette.cache_clear()
    imagenette_and_pets.cache_clear()
    files = ["--out", str(tmp_path / "runs"), "--rows", str(tmp_path / "rows.jsonl"), "--device", "cpu"]
    said = CliRunner().invoke(LONG, [*given, *files])
    words = " ".join(said.output.replace("│", "").split())
    assert (said.exit_code, told in words) == (2, True), said.output
    assert not list(tmp_path.iterdir())


def test_the_page_says_what_the_long_rows_say() -> None:
    page = (long.HERE / "README.md").read_text(encoding="utf-8")
    assert f"<!-- long -->\n{long.section(read_rows(long.ROWS))}\n<!-- /long -->" in page


def test_rows_of_others_are_shown_beside_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    ours = (long.HERE / "README.md").read_bytes()
    rows = tmp_path / "rows.jsonl"
    said = CliRunner().invoke(LONG, ["--plot", "--rows", str(rows)])
    assert (said.exit_code, f"{rows} has no rows" in said.output) == (2, True), said.output
    rows.write_text('{"arm": "x"}\n')
    said = CliRunner().invoke(LONG, ["--plot", "--rows", str(rows)])
    assert (said.exit_code, f"{rows}, line 1: expected a row with epochs" in said.output) == (2, True), said.output
    rows.write_text(long.ROWS.read_text(encoding="utf-8").splitlines()[-1], encoding="utf-8")
    said = CliRunner().invoke(LONG, ["--plot", "--rows", str(rows)])
    assert said.exit_code == 0, said.output
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert long.section(read_rows(rows), "norms.png") in page
    assert "![norms by layer and epoch](norms.png)" in page
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")
    assert (long.HERE / "README.md").read_bytes() == ours


def test_what_cannot_be_noted_is_known_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "STUDY", long.STUDY.small())
    (tmp_path / "file").touch()
    files = ["--out", str(tmp_path / "runs"), "--rows", str(tmp_path / "file" / "rows.jsonl"), "--device", "cpu"]
    said = CliRunner().invoke(LONG, files)
    assert (said.exit_code, "file" in said.output) == (2, True), said.output
    assert not (tmp_path / "runs").exists()
