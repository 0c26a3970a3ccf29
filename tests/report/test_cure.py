"""Test-time registers are tried if there are artifacts, are measured correctly, and leave the model unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.report.models import inspect_quickly, planted, random_images, small
from tests.surgery.test_registers import LAYER, NEURONS, SPOTS
from tests.surgery.test_registers import planted as planted_by_neurons
from vitrail.errors import NotApplied
from vitrail.report import Report
from vitrail.report.sections.cure import effect


def curable() -> tuple[nn.Module, Tensor]:
    """A model in which two neurons make artifacts, and 48 images that have them."""
    model, images = planted_by_neurons()
    noise = torch.randn(48, 3, 64, 64, generator=torch.Generator().manual_seed(5)).double()
    return model, images.repeat(8, 1, 1, 1) + 0.01 * noise


@pytest.fixture(scope="module")
def found() -> tuple[nn.Module, Tensor, Report]:
    model, images = curable()
    before = model(images[:4]).detach()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    report = inspect_quickly(model, images)
    assert torch.equal(model(images[:4]), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    with pytest.raises(NotApplied):
        vitrail.TestTimeRegisters.of(model)
    return model, images, report


def test_artifacts_of_neurons_disappear(found: tuple[nn.Module, Tensor, Report]) -> None:
    cure = found[2].cure
    assert cure["effect"] == "gone"
    assert set(NEURONS) <= set(cure["neurons"][str(LAYER)])
    assert cure["num_neurons"] == sum(len(some) for some in cure["neurons"].values()) == 10
    assert cure["tried"] == {"10": 0.0}
    assert cure["before"]["outlier_share"] == cure["control"]["outlier_share"] == len(SPOTS) / 16
    assert cure["after"]["outlier_share"] == 0
    assert (cure["before"]["verdict"], cure["control"]["verdict"]) == ("artifacts", "artifacts")
    assert cure["after"]["similarity"]["normal"] > 0.99


def test_values_equal_those_of_a_recording(found: tuple[nn.Module, Tensor, Report]) -> None:
    model, images, report = found
    cure = report.cure
    plain = vitrail.record(model, images, ("norms", "tokens", "attention"), layers=-1)
    neurons = {int(layer): some for layer, some in cure["neurons"].items()}
    with vitrail.test_time_registers(model, neurons=neurons):
        cured = vitrail.record(model, images, ("norms", "tokens", "attention"), layers=-1, queries="class")
    before, after = plain.norms[3][:, 1:], cured.norms[3][:, 2:]
    places = before > cure["threshold"]
    assert cure["images"] == 48
    for when, norms in (("before", before), ("after", after)):
        assert cure[when]["outlier_share"] == pytest.approx(float((norms > cure["threshold"]).double().mean()))
        assert cure[when]["largest"] == pytest.approx(float(norms.max()), rel=1e-4)
        assert cure[when]["typical"] == pytest.approx(float(norms.median()), rel=1e-4)
    for when, rows in (("before", plain.attention[3][:, :, 0, 1:]), ("after", cured.attention[3][:, :, 0, 2:])):
        mass = (rows * places[:, None]).sum(-1).mean()
        assert cure[when]["on_places"]["class"] == pytest.approx(float(mass), rel=2e-3)
    cosine = torch.nn.functional.cosine_similarity(plain.tokens[3][:, 0], cured.tokens[3][:, 0], dim=-1).mean()
    assert cure["after"]["similarity"]["class"] == pytest.approx(float(cosine), abs=1e-4)
    for one in report.images:
        assert one.cured == pytest.approx(after[one.index].tolist(), rel=1e-4)
        rows = cured.attention[3][one.index, :, 0, 2:]
        expected = (rows / rows.sum(-1, keepdim=True)).mean(0).reshape(4, 4)
        assert torch.allclose(one.maps["cured_attention"]["class"].double(), expected, atol=1e-5)


def test_the_page_has_the_section(found: tuple[nn.Module, Tensor, Report]) -> None:
    report = found[2]
    page = report.to_html()
    assert "Test-time registers work here" in page
    assert "vitrail.test_time_registers(model, images, neurons=10)" in page
    assert "norms before: 2 high-norm tokens" in page
    assert "norms after: 0 high-norm tokens" in page
    assert "attention of class after" in page
    loaded = Report.from_dict(report.to_dict())
    assert "norms after: 0 high-norm tokens" in loaded.to_html()
    assert loaded.to_dict() == report.to_dict()


def test_artifacts_from_elsewhere_stay_and_more_neurons_are_tried() -> None:
    report = inspect_quickly(planted(), random_images())
    assert report.cure["effect"] == "none"
    assert list(report.cure["tried"]) == ["10", "50"]
    assert report.cure["num_neurons"] == 10
    assert "do not work here" in report.to_html()
    assert "did not help" in report.to_html()


def test_no_registers_are_tried_without_artifacts() -> None:
    clean = inspect_quickly(small(), random_images())
    assert "no artifacts" in clean.cure["note"]
    assert all(one.cured is None for one in clean.images)
    turned_off = inspect_quickly(planted(), random_images(), cure=False)
    assert "turned off" in turned_off.cure["note"]
    assert turned_off.settings["cure"] is False
    assert "It was not tried here" in turned_off.to_html()


def test_models_that_are_already_changed() -> None:
    model, images = curable()
    with vitrail.test_time_registers(model, neurons={0: [3]}) as handle:
        report = inspect_quickly(model, images)
        assert handle.is_active
    assert report.norms["verdict"] == "artifacts"
    assert "already has test-time registers" in report.cure["note"]


def test_an_iterator_has_no_second_pass() -> None:
    model, images = curable()
    report = inspect_quickly(model, iter(images.split(8)))
    assert report.norms["verdict"] == "artifacts"
    assert "runs once" in report.cure["note"]


def test_a_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = curable()
    before = model(images[:2]).detach()

    def fail(*_: Any) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr("vitrail.report.sections.cure._trial", fail)
    report = inspect_quickly(model, images)
    assert "RuntimeError: lost" in report.cure["note"]
    assert torch.equal(model(images[:2]), before)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize(
    ("after", "control", "expected"),
    [(0, 4, "gone"), (0.4, 4, "gone"), (1, 4, "fewer"), (3, 4, "none"), (0, 1.9, "unspecific"), (0, None, "gone")],
)
def test_effect(after: float, control: float | None, expected: str) -> None:
    control_values = {"note": "too few"} if control is None else {"outlier_share": control}
    assert effect({"outlier_share": 4}, {"outlier_share": after}, control_values) == expected
