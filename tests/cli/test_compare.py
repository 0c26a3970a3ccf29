"""``vitrail compare``: reports are loaded, models are inspected on the same images, mistakes are explained."""

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from tests.cli.reports import FakeReports, Report
from tests.cli.words import one_line
from vitrail.cli import app

MODEL, OTHER = "timm:vit_tiny_patch16_224", "timm:vit_small_patch32_224"
TINY = ("--size", "32", "--random-weights", "--device", "cpu")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *(str(argument) for argument in arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with two reports: `a` of three images and `b` of four."""
    for number, name in enumerate("ab"):
        Report(name, 3 + number, []).save(tmp_path / f"{name}.html")
    return tmp_path


def test_two_reports(reports: FakeReports, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    result = run("a.json", "b.html", "-o", "compare.html")
    assert result.exit_code == 0, result.output
    text = one_line(result.stdout)
    assert text.index("a has artifact tokens.") < text.index("b has artifact tokens.") < text.index("a against b.")
    assert "b.html, b" in text
    assert text.endswith("Comparison: compare.html, with its values in compare.json")
    assert "different images" in result.stderr
    assert (saved / "compare.html").read_text(encoding="utf-8") == "a against b."
    assert reports.calls == []


def test_two_models_see_the_same_images(reports: FakeReports, tmp_path: Path) -> None:
    for number in range(4):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / f"{number}.png")
    out = tmp_path / "compare.html"
    result = run(MODEL, OTHER, tmp_path, *TINY, "-o", out, "--limit", "3", "--no-probes")
    assert result.exit_code == 0, result.output
    assert [(call["name"], call["probes"]) for call in reports.calls] == [(MODEL, False), (OTHER, False)]
    assert reports.sizes == [(3, 3, 32, 32)] * 2
    assert out.read_text(encoding="utf-8") == f"{MODEL} against {OTHER}."
    assert "different images" not in result.stderr


def test_a_report_and_a_model(reports: FakeReports, saved: Path) -> None:
    result = run(MODEL, saved / "b.json", *TINY, "-o", saved / "compare.html")
    assert result.exit_code == 0, result.output
    assert (saved / "compare.html").read_text(encoding="utf-8") == f"{MODEL} against b."
    assert reports.sizes == [(3, 3, 32, 32)]
    assert "different images" in result.stderr


def test_the_help_has_examples() -> None:
    assert "before.json after.json" in one_line(CliRunner().invoke(app, ["compare", "-h"]).stdout)


MISTAKES = {
    "one": (("a.json",), "Missing argument 'B'"),
    "no such report": (("a.json", "missing.json"), "missing.json"),
    "no such model": (("a.json", "timm:no_such_model", "--random-weights"), "no_such_model"),
    "neither": (("a.json", "vit_tiny_patch16_224"), "Did you mean timm:vit_tiny_patch16_224?"),
    "images for reports": (("a.json", "b.json", "c.png"), "images are for models"),
    "over a report": (("a.json", "b.json", "-o", "a.html"), "would be overwritten"),
    "over the values of a page": (("a.html", "b.json", "-o", "a.htm"), "would be overwritten"),
    "no page": (("a.json", "b.json", "-o", "out.pdf"), "expected the name of a page"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained_and_nothing_is_written(
    name: str, reports: FakeReports, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    arguments, answer = MISTAKES[name]
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert answer in one_line(result.stderr)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_an_interrupted_run_leaves_the_existing_page(reports: FakeReports, saved: Path) -> None:
    (saved / "compare.html").write_text("old", encoding="utf-8")
    reports.error = KeyboardInterrupt()
    result = run(MODEL, saved / "b.json", *TINY, "-o", saved / "compare.html")
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr
    assert (saved / "compare.html").read_text(encoding="utf-8") == "old"
