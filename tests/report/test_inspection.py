"""``vitrail.inspect`` finds planted artifacts, and notes what it cannot compute."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import vitrail
from tests.report.models import PLANTED, SINCE, inspect, plant, planted, random_images, small, write_images
from vitrail.errors import ImageError, InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.report import Report
from vitrail.report.collect import HalfTensor, keep_slot
from vitrail.report.sections.base import TURNED_OFF


@pytest.fixture(scope="module")
def found() -> Report:
    return inspect(planted(), random_images(), labels=[number % 2 for number in range(24)])


def test_planted_artifacts_are_found_where_and_since_when_they_were_planted(found: Report) -> None:
    assert found.norms["verdict"] == "artifacts"
    assert found.norms["onset"] == SINCE
    assert found.norms["outlier_share"] == pytest.approx(len(PLANTED) / 64)
    assert [layer["verdict"] for layer in found.norms["per_layer"]] == ["none", "none", "artifacts", "artifacts"]
    assert found.images
    assert all(one.outliers == list(PLANTED) for one in found.images)
    assert found.verdict.startswith("This model has artifact tokens: 3.1")
    assert "from layer 2 on" in found.verdict


def test_values_have_their_documented_keys(found: Report) -> None:
    values = found.to_dict()
    documented = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    for name, section in values.items():
        assert f"`{name}`" in documented
        for key in section if isinstance(section, dict) and name not in ("versions", "settings") else ():
            assert f"`{key}`" in documented, f"{name}.{key} is not documented"
    inside = [values["attention"]["closer"], *(values["cure"][when] for when in ("before", "after", "control"))]
    for key in {key for section in inside for key in section}:
        assert f"`{key}`" in documented, f"{key} is not documented"
    assert {"threshold", "outlier_share", "verdict", "per_layer"} <= set(values["norms"])
    assert len(values["norms"]["per_layer"]) == 4
    assert {"threshold", "outlier_share", "verdict", "layer"} <= set(values["norms"]["per_layer"][0])
    json.dumps(values, allow_nan=False)


def test_sections_are_about_the_planted_tokens(found: Report) -> None:
    assert found.redundancy["outliers"] == 24 * len(PLANTED)
    assert found.attention["tokens"] == ["class"]
    assert sum(found.attention["mass"]["mass"][0]) == pytest.approx(1, abs=1e-3)
    assert set(found.attention["on_outliers"]["mass"]) == {"class", "patch"}
    assert found.pca["left_out"] == 24 * len(PLANTED)
    assert found.probes["position"]["chance_accuracy"] == pytest.approx(1 / 64)
    assert 0 <= found.probes["position"]["kinds"]["normal"]["accuracy"]["mean"] <= 1
    assert "at least" in found.probes["position"]["kinds"]["outlier"]["note"]
    assert "at least 50" in found.probes["classes"]["kinds"]["class"]["note"]
    for feature in ("keys", "values"):
        assert found.discovery[feature]["lost"]["note"].startswith("there are no true boxes")
    assert "no register" in found.registers["note"]


def test_clean_model_has_none() -> None:
    report = inspect(small(), random_images(), probes=False, discovery=False)
    assert report.norms["verdict"] == "none"
    assert report.norms["threshold"] is None
    assert report.probes == report.discovery == {"note": TURNED_OFF}
    assert report.verdict.startswith("No artifact tokens were found")
    assert all(one.outliers == [] for one in report.images)


def test_model_is_left_as_it_was() -> None:
    model = small().train()
    before = model(random_images(1)).detach()
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    inspect(model, random_images(2), probes=False)
    assert model.training
    assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()) == hooks
    assert torch.equal(model(random_images(1)), before)


def test_numbers_that_are_not_finite_are_counted_and_named() -> None:
    images = random_images()
    images[3, 0, 0, 0] = torch.nan
    report = inspect(planted(), images, batch_size=5)
    problems = report.problems
    assert problems["num_not_finite_images"] == 1
    assert problems["num_not_finite_tokens"] > 0
    assert all(place["name"].endswith(" 3") for place in problems["not_finite"])
    assert report.norms["verdict"] == "artifacts"
    assert report.data["images"] == 24
    assert report.data["kept"]["features"] == 23
    assert "not finite" in report.to_html()


def test_no_finite_values_still_make_a_report() -> None:
    report = inspect(small(), torch.full((2, 3, 128, 128), torch.nan))
    assert report.norms["verdict"] == "uncertain"
    assert "finite" in report.attention["note"]
    assert report.to_html()


def test_one_image_alone() -> None:
    report = inspect(small(), random_images(1))
    assert report.data["images"] == 1
    assert "images are needed" in report.probes["position"]["kinds"]["normal"]["note"]
    assert "no labels" in report.probes["classes"]["note"]
    assert "Only 1 image" in report.to_html()


def test_registers_without_a_class_token() -> None:
    model = small("vit_medium_patch16_reg4_gap_256")
    report = inspect(model, random_images(60), labels=[number % 2 for number in range(60)])
    assert [one["name"] for one in report.registers["tokens"]] == [f"register {number}" for number in range(1, 5)]
    assert all(one["norm"] > 0 and one["effective_patches"] >= 1 for one in report.registers["tokens"])
    assert all(one["class_probe"]["accuracy"] for one in report.registers["tokens"])
    assert report.attention["mass"]["queries"] == ["register", "patch"]
    assert list(report.images[0].maps["attention"]) == report.attention["tokens"]


def test_model_without_special_tokens() -> None:
    report = inspect(small(class_token=False, global_pool="avg"), random_images(4), probes=False)
    assert "no class or register token" in report.attention["note"]
    assert report.attention["mass"]["queries"] == ["patch"]
    assert report.to_html()


def test_appended_registers_are_inspected() -> None:
    model = small(img_size=256)  # too many patches to keep the attention of each
    with vitrail.test_time_registers(model, neurons={1: [3, 5]}, registers=2):
        report = inspect(model, random_images(2, 256), probes=False)
    assert [token["name"] for token in report.registers["tokens"]] == ["register 1", "register 2"]
    assert report.attention["tokens"] == ["class", "register 1", "register 2"]
    assert report.layout["num_tokens"] == 1 + 2 + 256


def test_merged_model_can_be_inspected() -> None:
    model = small()
    with vitrail.merge(model, r=8):
        report = inspect(model, random_images(4), probes=False)
    assert report.norms["num_tokens"] == 4 * 64
    assert report.attention["patch_rows"] == 16


def test_transformers_model_with_registers() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_register_tokens": 2}
    model = hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**sizes, image_size=112, patch_size=14)).eval()
    plant(model.layers[1] if hasattr(model, "layers") else model.encoder.layer[1], special=3)
    report = inspect(model, random_images(24, 112), probes=False)
    assert report.layout["grid"] == [1, 8, 8]
    assert report.norms["onset"] == 1
    assert report.images[0].outliers == list(PLANTED)
    assert report.attention["tokens"] == ["class", "register 1", "register 2"]


def test_directory_with_classes_and_a_broken_image(tmp_path: Path) -> None:
    events: list[tuple[str, int, int | None]] = []
    report = inspect(small(), write_images(tmp_path, 60), progress=lambda *step: events.append(step))
    assert report.data["labelled"] == 60
    assert report.data["classes"] == ["class-0", "class-1"]
    assert report.problems["num_skipped"] == 1
    assert "broken.png" in report.problems["skipped"][0]["name"]
    assert report.probes["classes"]["kinds"]["class"]["accuracy"]["mean"] > 0.7
    assert events[-1][1] == events[-1][2]
    assert max(done for what, done, _ in events if what.startswith("running")) == 60


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"not an image")
    with pytest.raises(ImageError):
        vitrail.inspect(small(), tmp_path)


@pytest.mark.parametrize("data", [[], iter(())])
def test_no_images_is_an_error(data: Any) -> None:
    with pytest.raises((UnsupportedInput, ImageError), match=r"no image"):
        vitrail.inspect(small(), data)


def test_model_that_is_no_vit_is_an_error() -> None:
    with pytest.raises(UnsupportedModel):
        vitrail.inspect(nn.Linear(3, 3), random_images(2))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (random_images(2), {"batch_size": 0}),
        (random_images(2), {"limit": 0}),
        (random_images(2), {"seed": "a"}),
        (random_images(2).byte(), {}),
        (random_images(2), {"labels": [1]}),
        (random_images(2), {"labels": ["cat", "dog"]}),
        (random_images(2)[0], {}),
        ([torch.zeros(3)], {}),
        (7, {}),
    ],
)
def test_bad_arguments_are_clear_errors(data: Any, options: dict[str, Any]) -> None:
    with pytest.raises((InvalidOption, UnsupportedInput)):
        vitrail.inspect(small(), data, **options)


def test_batches_give_the_same_as_a_tensor() -> None:
    model, images = planted(), random_images()
    labels = torch.arange(24) % 2
    whole = inspect(model, images, labels=labels, batch_size=6, probes=False).to_dict()
    parts = inspect(model, [(images[i : i + 6], labels[i : i + 6]) for i in range(0, 24, 6)], probes=False).to_dict()
    for name in ("norms", "redundancy", "attention", "pca", "problems", "images"):
        assert whole[name] == parts[name]
    assert parts["data"]["labelled"] == 24


def test_limit_and_batches_that_run_once() -> None:
    report = inspect(small(), (images for images in random_images(12).split(5)), limit=7, probes=False)
    assert report.data["images"] == 7
    assert "runs once" in report.attention["closer"]["note"]
    assert "Layer by layer" in report.to_html()


def test_images_of_several_sizes() -> None:
    model = small(dynamic_img_size=True)
    report = inspect(model, [random_images(4), random_images(4, 96)], probes=False)
    assert report.data["images"] == 8
    assert report.data["kept"]["features"] == 4
    assert "another patch grid" in report.problems["notes"][0]


@pytest.mark.parametrize(("most", "total"), [(5, 17), (200, 200), (7, 8), (600, 3669), (3, None)])
def test_kept_images_are_spread_evenly(most: int, total: int | None) -> None:
    places = [index for index in range(total or 20) if keep_slot(index, most, total) is not None]
    assert len(places) == most
    assert [keep_slot(index, most, total) for index in places] == list(range(most))
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) - min(gaps) <= 1


def test_half_precision_does_not_overflow() -> None:
    values = torch.tensor([1e6, -3.0, 0.5])
    packed = HalfTensor.pack(values)
    assert packed.values.dtype == torch.float16
    assert torch.allclose(packed.values.float() * packed.scale, values, rtol=1e-3, atol=0.05)
    assert HalfTensor.pack(torch.ones(2)).scale == 1.0


def test_memory_does_not_grow_with_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.report.collect.FEATURES", 6)
    monkeypatch.setattr("vitrail.report.collect.OBJECTS", 3)
    monkeypatch.setattr("vitrail.report.collect.PLACES", 10)
    report = inspect(planted(), random_images(), probes=False)
    assert report.data["kept"]["features"] == 6
    assert report.data["kept"]["objects"] == 3
    assert report.data["kept"]["places"] <= 16
    assert report.norms["num_images"] == 24
    assert len(report.images) == 3
