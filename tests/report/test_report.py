"""Reports are saved completely or not at all, load again, and work without jinja2."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from pathlib import Path

import pytest

import vitrail
from tests.report.models import inspect, inspect_quickly, planted, random_images, small
from tests.report.test_page import HOSTILE, Page
from vitrail.errors import InvalidOption, ReportError
from vitrail.report import Report

OLD = Path(__file__).with_name("format-1.json")
"""A report that version 0.2.0 wrote."""


@pytest.fixture(scope="module")
def report() -> Report:
    return inspect(planted(), random_images(), name=HOSTILE)


def test_saved_and_loaded(report: Report, tmp_path: Path) -> None:
    page, values = report.save(tmp_path / "report.html")
    assert page.read_text(encoding="utf-8") == report.to_html()
    for path in (page, values):
        loaded = Report.load(path)
        assert loaded.to_dict() == json.loads(report.to_json())
        Page(loaded.to_html())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_json_alone(report: Report, tmp_path: Path) -> None:
    assert report.save(tmp_path / "report.json") == (tmp_path / "report.json",)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert Report.load(tmp_path / "report.json").verdict == report.verdict


def test_without_jinja(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    report.save(tmp_path / "report.json")
    with pytest.raises(ReportError, match=r"jinja2.*vitrail\[report\]"):
        report.save(tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_reports_of_older_versions_load_and_compare(report: Report) -> None:
    old = Report.load(OLD)
    text = OLD.read_text(encoding="utf-8")
    values = json.loads(re.sub(r'picture([a-z_]*":)', r"image\1", text))  # keys of format 1
    assert values["norms"]["num_images"] == json.loads(text)["norms"]["num_pictures"]
    added = {key: {"note": "not part of this report"} for key in ("high_norm_tokens", "sinks")}
    assert old.to_dict() == {**values, **added, "format": 2}
    with pytest.warns(DeprecationWarning, match="images"):
        assert old.pictures == old.images
    assert "has artifact tokens" in old.verdict
    Page(old.to_html())
    found = {one.key: one for one in vitrail.compare(old, report).differences}
    assert found["norms.outlier_share"].a == values["norms"]["outlier_share"]
    values = old.to_dict()
    del values["cure"]
    assert "note" in Report.from_dict(values).cure


def test_sections_are_attributes(report: Report) -> None:
    assert report.attention is report.sections["attention"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = report.nothing
    assert pickle.loads(pickle.dumps(report)).verdict == report.verdict


def test_failing_write_leaves_existing_files(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, values = tmp_path / "report.html", tmp_path / "report.json"
    page.write_text("old page", encoding="utf-8")
    values.write_text("old values", encoding="utf-8")
    calls: list[int] = []

    def fail(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ReportError, match="No space left"):
        report.save(page)
    assert page.read_text(encoding="utf-8") == "old page"
    assert values.read_text(encoding="utf-8") == "old values"
    assert len(list(tmp_path.iterdir())) == 2


def test_bad_paths_and_files_are_clear_errors(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"report\.html"):
        report.save(tmp_path / "report.pdf")
    with pytest.raises(ReportError, match=r"missing/report\.json"):
        report.save(tmp_path / "missing" / "report.html")
    (tmp_path / "directory.html").mkdir()
    with pytest.raises(ReportError, match="directory"):
        report.save(tmp_path / "directory.html")
    with pytest.raises(ReportError, match=r"missing\.json"):
        Report.load(tmp_path / "missing.json")
    other = tmp_path / "other.json"
    for content in ("{", "[]", '{"format": 1}', '{"format": 99}'):
        other.write_text(content, encoding="utf-8")
        with pytest.raises(ReportError):
            Report.load(other)


def test_comparison(report: Report, tmp_path: Path) -> None:
    clean = inspect_quickly(small(), random_images(), name=HOSTILE)
    found = vitrail.compare(clean, report)
    assert found.verdict == "Model A has no artifact tokens; model B has artifact tokens."
    by_key = {one.key: one for one in found.differences}
    share = by_key["norms.outlier_share"]
    assert (share.a, share.b) == (0, report.norms["outlier_share"])
    assert share.change == share.b
    assert by_key["norms.threshold"].change is None
    assert found.remarks == []
    page, values = found.save(tmp_path / "both.html")
    text = page.read_text(encoding="utf-8")
    Page(text)
    assert "<script" not in text
    assert 'href="#photo' in text
    assert json.loads(values.read_text(encoding="utf-8"))["verdict"] == found.verdict
    assert vitrail.compare(report, report).verdict.startswith("Both models have artifact tokens: 3.1")


def test_comparison_of_files_and_of_different_images(report: Report, tmp_path: Path) -> None:
    other = inspect_quickly(small(), random_images(5), seed=3)
    report.save(tmp_path / "a.html")
    other.save(tmp_path / "b.html")
    found = vitrail.compare(tmp_path / "a.json", str(tmp_path / "b.html"))
    assert len(found.remarks) == 2
    Page(found.to_html())
    with pytest.raises(InvalidOption):
        vitrail.compare(report, 3)  # type: ignore[arg-type]
