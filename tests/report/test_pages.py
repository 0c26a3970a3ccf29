"""Pages are whole, need nothing else, and let no name become markup; files are written whole or not at all."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.report.models import glance, look, pictures, planted, small
from vitrail.errors import InvalidOption, ReportError
from vitrail.report import Report, images
from vitrail.report.charts import Bars, Line, Scale, histogram, over_layers
from vitrail.report.markup import Html, tag, text
from vitrail.report.words import advice, number, percent, sure

HOSTILE = "<script>alert(1)</script>\"'&\x00\ud800"


class Page(HTMLParser):
    """Reads a page and complains where elements are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attrs)))
        if name not in ("meta", "br", "hr", "img"):
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open, f"</{name}> closes nothing"
        assert self.open.pop() == name


@pytest.fixture(scope="module")
def report() -> Report:
    found = look(planted(), pictures(), name=HOSTILE)
    for one in found.pictures:
        object.__setattr__(one, "name", HOSTILE)
    found.problems["skipped"] = [{"name": HOSTILE, "reason": HOSTILE}]
    found.problems["num_skipped"] = 1
    return found


def test_page_is_whole_and_needs_nothing_else(report: Report) -> None:
    page = report.to_html()
    read = Page(page)
    assert read.open == []
    assert "http://" not in page
    assert "https://" not in page
    names = {name for name, _ in read.tags}
    assert names.isdisjoint({"script", "link", "iframe", "object", "embed", "form"})
    for name, attrs in read.tags:
        for key in ("src", "href", "srcset", "poster", "action"):
            assert str(attrs.get(key, "#")).startswith(("#", "data:image/")), f"{name} {key}"
        assert not any(key.startswith("on") for key in attrs)
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [str(attrs["href"])[1:] for name, attrs in read.tags if name in ("a", "use")]
    assert set(links) <= set(ids)


def test_hostile_names_stay_text(report: Report) -> None:
    page = report.to_html()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x00" not in page
    page.encode()


def test_every_picture_says_what_it_is(report: Report) -> None:
    read = Page(report.to_html())
    drawn = [attrs for name, attrs in read.tags if name == "svg" and attrs.get("aria-hidden") != "true"]
    assert len(drawn) > 10
    assert all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in drawn)
    assert "prefers-color-scheme:dark" in report.to_html()


def test_page_is_small(report: Report) -> None:
    assert len(report.pictures) == 8
    assert len(report.to_html()) < 1_000_000


def test_outliers_of_the_first_layer_are_doubted(report: Report) -> None:
    values = report.to_dict()
    later, first = (
        " ".join(advice({**values, "norms": {**values["norms"], "verdict": "artifacts", "onset": onset}}))
        for onset in (2, 0)
    )
    assert "features from layer 1" in later
    assert "due to the pictures" not in later
    assert "features from layer" not in first
    assert "due to the pictures" in first


def test_verdict_comes_first_and_advice_fits_it(report: Report) -> None:
    page = report.to_html()
    assert page.index("This model has artifact tokens") < page.index('id="pictures"')
    assert "did not help on these pictures" in page
    clean = glance(small(), pictures())
    assert "Nothing needs to be done" in clean.to_html()


def test_saved_and_loaded(report: Report, tmp_path: Path) -> None:
    page, values = report.save(tmp_path / "report.html")
    assert page.read_text(encoding="utf-8") == report.to_html()
    assert json.loads(values.read_text(encoding="utf-8"))["norms"]["verdict"] == "artifacts"
    for path in (page, values):
        loaded = Report.load(path)
        assert loaded.to_dict() == json.loads(report.to_json())
        assert Page(loaded.to_html()).open == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_failing_write_leaves_the_old_files(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_bad_places_and_files_are_clear_errors(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"report\.html"):
        report.save(tmp_path / "report.pdf")
    with pytest.raises(ReportError, match=r"missing/report\.json could not be written"):
        report.save(tmp_path / "missing" / "report.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ReportError, match="folder"):
        report.save(tmp_path / "folder.html")
    with pytest.raises(ReportError, match="could not be read"):
        Report.load(tmp_path / "missing.json")
    other = tmp_path / "other.json"
    for content in ("{", "[]", '{"format": 1}', '{"format": 99}'):
        other.write_text(content, encoding="utf-8")
        with pytest.raises(ReportError):
            Report.load(other)


def test_comparison(report: Report, tmp_path: Path) -> None:
    clean = look(small(), pictures(), name=HOSTILE)
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
    assert Page(text).open == []
    assert "<script" not in text
    assert not re.search("https?://", text)
    assert json.loads(values.read_text(encoding="utf-8"))["verdict"] == found.verdict


def test_comparison_of_files_and_of_different_pictures(report: Report, tmp_path: Path) -> None:
    other = look(small(), pictures(5), seed=3, probes=False)
    report.save(tmp_path / "a.html")
    other.save(tmp_path / "b.html")
    found = vitrail.compare(tmp_path / "a.json", str(tmp_path / "b.html"))
    assert len(found.remarks) == 2
    assert Page(found.to_html()).open == []
    with pytest.raises(InvalidOption):
        vitrail.compare(report, 3)  # type: ignore[arg-type]


def test_same_verdicts_are_said_as_such(report: Report) -> None:
    assert vitrail.compare(report, report).verdict.startswith("Both models have artifact tokens: 3.1")


def test_markup_escapes_all_but_markup() -> None:
    assert text(["<", Html("<b>"), None, 3]) == "&lt;<b>3"
    assert tag("p", "a & b", class_='x"y', hidden=None) == '<p class="x&quot;y">a &amp; b</p>'
    assert tag("br") == "<br>"


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [(1, 1e9, True), (3.9, 101, True), (5, 5.2, True), (0, 2.04, False), (0, 1e-6, False), (7, 7, False)],
)
def test_ticks_are_few_and_inside(low: float, high: float, log: bool) -> None:
    ticks = Scale(low, high, 0, 100, log).ticks()
    assert 1 <= len(ticks) <= 9
    assert all(low * 0.99 - 1e-9 <= tick <= high * 1.01 + 1e-9 for tick in ticks)


def test_charts_of_nothing_say_so() -> None:
    assert "no finite norms" in histogram([Bars("", [1.0, 2.0], [0], None)], "")
    assert "nothing finite" in over_layers([0, 1], [Line("", "s0", [None, None])], "", "norm")
    assert "<svg" in over_layers([0], [Line("", "s0", [1.0])], "", "norm")


def test_maps_have_the_colours_of_their_values() -> None:
    values = np.linspace(0, 1, 12).reshape(3, 4)
    address = images.heat(values)
    drawn = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).convert("RGB")
    assert drawn.size == (4, 3)
    apart = np.abs(np.asarray(drawn).astype(int) - images.colours(values).astype(int))
    assert apart.max() <= 6  # half of one of 64 steps


def test_numbers_at_the_edge_of_a_chart_stay_inside() -> None:
    drawn = histogram([Bars("", [10.0, 2900.0], [5], None)], "")
    for place, words in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]+)</text>', drawn):
        assert float(place) + 3.5 * len(words) <= 420


def test_numbers_in_words() -> None:
    assert [number(value) for value in (None, float("nan"), 0, 12.345, 12345, 1e-7, -2)] == [
        *("–", "–", "0", "12.3", "12,345", "1.00e−07", "−2")
    ]
    assert [percent(value) for value in (None, 0, 0.0237, 0.5, 1)] == ["–", "0 %", "2.37 %", "50.0 %", "100 %"]
    assert sure(1.0) == "more than 99.9 %"
