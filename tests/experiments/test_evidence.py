"""docs/evidence.md: every figure with an uncertainty is one that a study reports."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNCERTAIN = re.compile(r"\d[\d.]* ± [\d.]+|\([−+]?\d[\d.]* to [−+]?\d[\d.]*\)")


def figures(text: str) -> set[str]:
    return set(UNCERTAIN.findall(" ".join(text.split())))


def test_figures_are_those_of_the_studies() -> None:
    page = figures((ROOT / "docs" / "evidence.md").read_text(encoding="utf-8"))
    studies = [path.read_text(encoding="utf-8") for path in (ROOT / "experiments").rglob("README.md")]
    # Prose gives an interval as "0.6 points (0.2 to 0.9)", "0.7 to 1.3;" or "(0.1, −0.1 to +0.3)".
    reported = " ".join(" ".join(studies).split())
    assert len(page) > 20
    assert [figure for figure in sorted(page) if figure.strip("()") not in reported] == []


def test_every_study_and_plot_is_linked() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    links = re.findall(r"[(\"](\.\./experiments/[^)\"#]+)", page)
    assert all((ROOT / "docs" / link).exists() for link in links)
    linked = {Path(link).parts[2] for link in links}
    assert linked >= {path.parent.name for path in (ROOT / "experiments").glob("*/README.md")}
