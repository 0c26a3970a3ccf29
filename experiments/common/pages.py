"""What a study's rows become: the table in its README, its line in ``docs/evidence.md``, its plots."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from experiments.common.rows import RESULTS, finished
from experiments.common.study import Rows, Study
from experiments.common.tables import NOTHING, by_arm, result_table, rewritten, rows_of
from vitrail.errors import InvalidOption
from vitrail.models.saving import write_whole

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence.md"


def section(study: Study, rows: Rows, *, details: bool = True) -> str:
    """Write the results of a study: its table or tables, with or without details, and on what it was measured."""
    if not rows:
        return NOTHING
    shown = tuple(column for column in study.columns if details or not column.detail)
    table = (study.table or result_table)(replace(study, columns=shown), rows)
    return f"{table}\n\n{measured_on(rows, compares=re.search(r'[(].+ to .+[)]', table) is not None)}"


def measured_on(rows: Rows, *, compares: bool) -> str:
    """Say on what machine, with what versions and in what state of the code rows were made, and what brackets are."""
    devices = sorted({row["device"] for row in rows})
    commits = sorted({row["commit"] or "unknown" for row in rows})
    torch = sorted({row["versions"]["torch"] for row in rows})
    seeds = sorted({row["seed"] for row in rows})
    arms, minutes = len(by_arm(rows)), sum(row["seconds"] for row in rows) / 60
    return (
        f"Mean ± standard deviation over seeds {', '.join(map(str, seeds))}"
        f"{'; in brackets, the 95 % interval over seeds and pictures' if compares else ''}. {len(rows)} runs of "
        f"{arms} arm{'s' if arms > 1 else ''} on {', '.join(devices)}, torch {', '.join(torch)}, "
        f"commit {', '.join(commits)}; {minutes:.0f} minutes of training, runs side by side counted one by one."
    )


def with_plots(text: str, folder: Path) -> str:
    """Put the plots of a folder under the results, as the study's own page has them."""
    return "\n\n".join([text, *(f"![{path.stem}]({path.name})" for path in sorted(folder.glob("*.png")))])


def write_pages(study: Study, out: Path, *, evidence: Path | None = EVIDENCE) -> int:
    """Draw the plots from the rows, and rewrite the marked sections; give the number of rows.

    A folder of rows that has no page gets one. Where all rows are of other settings, or a table cannot be made, nothing
    is written.
    """
    rows = rows_of(study, out)
    if not rows and (others := len(finished(out / RESULTS))):
        raise InvalidOption(
            f"{out}: {others} rows are there, all of other settings than {study.name} has. Expected some of its own; "
            "rows of --reduced are shown with --reduced"
        )
    readme, results = out / "README.md", section(study, rows)
    pages: dict[Path, str] = {}
    if evidence is not None:
        pages[evidence] = rewritten(evidence, section(study, rows, details=False), f"results {study.name}")
    if rows and study.draw is not None:
        study.draw(study, rows, out)
    if rows or readme.exists():
        blank = f"# {study.name}\n\n{study.question}\n\n<!-- results -->\n<!-- /results -->\n"
        pages[readme] = rewritten(readme, with_plots(results, out) if rows else results, blank=blank)
    for page, text in pages.items():
        write_whole(page, text.encode())
    return len(rows)
