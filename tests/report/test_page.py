"""Pages are valid, self-contained, and escape every name; charts and maps show their values."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from tests.report.models import PLANTED, inspect, inspect_quickly, planted, random_images, small
from vitrail.report import Report
from vitrail.report.context import Context
from vitrail.report.page import images
from vitrail.report.page.blocks import Bullets, Note, Svg, Table, Text
from vitrail.report.page.charts import Distribution, Line, Scale, histogram, over_layers
from vitrail.report.page.formatting import confidence, number, percent
from vitrail.report.page.render import render
from vitrail.report.sections import SECTIONS, Section, section_keys
from vitrail.report.verdict import recommendations

HOSTILE = "<script>alert(1)</script>\"'&\x00\ud800"


class Page(HTMLParser):
    """Parse a page, and fail if elements are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attrs)))
        if name != "meta":
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open, f"</{name}> closes nothing"
        assert self.open.pop() == name


@pytest.fixture(scope="module")
def report() -> Report:
    found = inspect(planted(), random_images(), name=HOSTILE)
    for one in found.images:
        one.name = HOSTILE
    found.problems["skipped"] = [{"name": HOSTILE, "reason": HOSTILE}]
    found.problems["num_skipped"] = 1
    return found


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return report.to_html()


def test_page_is_valid_and_self_contained(page: str) -> None:
    tags = Page(page).tags
    assert not re.search("https?://", page)
    assert {name for name, _ in tags}.isdisjoint({"script", "link", "iframe", "object", "embed", "form"})
    for name, attrs in tags:
        for key in ("src", "href", "srcset", "poster", "action"):
            assert str(attrs.get(key, "#")).startswith(("#", "data:image/")), f"{name} {key}"
        assert not any(key.startswith("on") for key in attrs)
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {str(attrs["href"])[1:] for name, attrs in tags if name in ("a", "use")} <= set(ids)
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 1_000_000


def test_hostile_names_stay_text(page: str) -> None:
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x00" not in page
    page.encode()


def test_every_drawing_has_a_label(page: str) -> None:
    drawn = [attrs for name, attrs in Page(page).tags if name == "svg" and attrs.get("aria-hidden") != "true"]
    assert len(drawn) > 10
    assert all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in drawn)


def test_page_has_every_section_and_the_verdict_first(page: str, report: Report) -> None:
    assert len(report.images) == 8
    assert set(report.sections) == set(section_keys())
    empty = {"registers", "sinks"}
    places = [page.index(f'id="{section.anchor}"') for section in SECTIONS if section.anchor not in empty]
    assert not any(f'id="{anchor}"' in page for anchor in empty)
    assert "Registers: the model has no register tokens" in page[page.index('id="absent"') :]
    assert page.index("This model has artifact tokens") < places[0]
    assert places == sorted(places)


def test_what_to_do_next_is_one_line_on_top(page: str, report: Report) -> None:
    first = recommendations(report.norms, report.registers, report.cure)[0]
    assert report.next_step == first
    assert page.index("What to do next:") < page.index(first) < page.index("<nav")


def test_sections_conclude_from_their_values(report: Report) -> None:
    sentences = {
        section.key or section.anchor: section.conclude(report) for section in SECTIONS if section.blocks(report)
    }
    assert sentences["images"] == "24 images of 24 have artifact tokens."
    assert sentences["layers"] == "Every layer from layer 2 on has artifacts."
    assert sentences["redundancy"].startswith("High-norm tokens ")
    assert f"{number(max(one['norm'] for one in report.high_norm_tokens['tokens']))}, " in sentences["high_norm_tokens"]
    assert sentences["attention"].startswith("High-norm tokens get")
    assert sentences["probes"].startswith("A normal patch knows its position in")


def test_high_norm_tokens_are_listed_with_their_patches(page: str, report: Report) -> None:
    tokens = report.high_norm_tokens["tokens"]
    assert [one["norm"] for one in tokens] == sorted((one["norm"] for one in tokens), reverse=True)
    assert {(one["row"], one["column"]) for one in tokens} == {divmod(place, 8) for place in PLANTED}
    norms = {one.index: one.norms for one in report.images}
    assert all(one["norm"] == pytest.approx(norms[one["image"]][one["patch"]], rel=1e-4) for one in tokens)
    assert all(one["border"] == (one["row"] in (0, 7) or one["column"] in (0, 7)) for one in tokens)
    assert report.high_norm_tokens["border_share"] == pytest.approx(28 / 64)
    assert page.count("Patch of a high-norm token in") == len(tokens) == 16


@pytest.mark.parametrize(("patch", "corner"), [(0, (0, 0)), (9, (0, 0)), (27, (16, 16)), (63, (48, 48))])
def test_a_crop_stays_inside_the_image(report: Report, patch: int, corner: tuple[int, int]) -> None:
    crop = images.patch_panel(report.images[0], patch, "", 2)
    assert (crop.left, crop.top) == corner
    assert (crop.width, crop.height) == (80, 80)


def test_few_images_are_a_first_impression_without_a_confidence() -> None:
    page = inspect_quickly(small(), random_images(6)).to_html()
    assert "Only 6 images" in page
    assert "Confidence:" not in page


def test_a_section_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(context: Context) -> dict[str, float]:
        return {"largest": float(context.special_norms.max())}

    section = Section(
        anchor="special",
        title="Norms of special tokens",
        link="",
        intro="",
        render=lambda report: [Text(f"The largest norm is {report.special['largest']:.1f}.")],
        key="special",
        compute=compute,
    )
    monkeypatch.setattr("vitrail.report.sections.SECTIONS", (*SECTIONS, section))
    report = inspect_quickly(small(), random_images(2))
    assert report.special["largest"] > 0
    assert f"The largest norm is {report.special['largest']:.1f}." in report.to_html()
    assert Report.from_dict(report.to_dict()).special == report.special


def test_recommendations_fit_the_verdict(report: Report) -> None:
    def advice(onset: int) -> str:
        return " ".join(recommendations({**report.norms, "onset": onset}, report.registers, report.cure))

    assert "features from layer 1" in advice(2)
    assert "first layer already" not in advice(2)
    assert "features from layer" not in advice(0)
    assert "first layer already" in advice(0)
    assert "did not help" in advice(2)
    assert "Nothing needs to be done" in inspect_quickly(small(), random_images()).to_html()


def test_blocks_escape_text_and_skip_what_is_empty() -> None:
    header = {"title": "", "photos": [], "verdict": "<b>", "reports": [], "badges": {}, "sections": []}
    blocks = [Note(None), Table(["a"], [], "empty"), Bullets(["`code <x>` & text"])]
    page = render("comparison.html", **header, remarks=blocks)
    Page(page)
    assert "&lt;b&gt;" in page
    assert "<li><code>code &lt;x&gt;</code> &amp; text</li>" in page
    assert 'class="note"' not in page
    assert "<table" not in page


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [(1, 1e9, True), (3.9, 101, True), (5, 5.2, True), (0, 2.04, False), (0, 1e-6, False), (7, 7, False)],
)
def test_ticks_are_few_and_inside(low: float, high: float, log: bool) -> None:
    ticks = Scale(low, high, 0, 100, log).ticks()
    assert 1 <= len(ticks) <= 9
    assert all(low * 0.99 - 1e-9 <= tick <= high * 1.01 + 1e-9 for tick in ticks)


def test_charts_without_values_are_notes() -> None:
    assert isinstance(histogram([Distribution([1.0, 2.0], [0], None)], ""), Note)
    assert isinstance(over_layers([0, 1], [Line("s0", [None, None])], "", "norm"), Note)
    assert isinstance(over_layers([0], [Line("s0", [1.0])], "", "norm"), Svg)


def test_tick_labels_stay_inside_the_chart() -> None:
    chart = histogram([Distribution([10.0, 2900.0], [5], None)], "")
    assert isinstance(chart, Svg)
    for shape in chart.shapes:
        if shape.attributes.get("text-anchor") == "middle" and shape.attributes["class"] is None:
            assert float(shape.attributes["x"]) + 3.5 * len(shape.text) <= chart.width


def test_maps_have_the_colors_of_their_values() -> None:
    values = np.linspace(0, 1, 12).reshape(3, 4)
    uri = images.map_uri(values)
    drawn = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")
    assert drawn.size == (4, 3)
    difference = np.abs(np.asarray(drawn).astype(int) - images.colors(values).astype(int))
    assert difference.max() <= 6  # half of one of 64 steps


def test_numbers_as_text() -> None:
    assert [number(value) for value in (None, float("nan"), 0, 12.345, 12345, 1e-7, -2)] == [
        *("–", "–", "0", "12.3", "12,345", "1.00e−07", "−2")
    ]
    assert [percent(value) for value in (None, 0, 0.0237, 0.5, 1)] == ["–", "0 %", "2.37 %", "50.0 %", "100 %"]
    assert confidence(1.0) == "more than 99.9 %"
