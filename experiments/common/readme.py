"""Generated sections of a study's README: tables and plots, written from the rows by ``--plot``."""

from __future__ import annotations

import re
from pathlib import Path

from experiments.common.plots import description
from experiments.common.results import RESULTS, by_arm, finished, rows_of
from experiments.common.study import Rows, Study
from experiments.common.tables import NOT_MEASURED, result_table
from vitrail._atomic_files import write_bytes
from vitrail.errors import InvalidOption


def section(study: Study, rows: Rows) -> str:
    """Return the results of a study: its tables, and how they were measured."""
    if not rows:
        return NOT_MEASURED
    table = (study.table or result_table)(study, rows)
    return f"{table}\n\n{provenance(rows, has_intervals=re.search(r'[(].+ to .+[)]', table) is not None)}"


def provenance(rows: Rows, *, has_intervals: bool) -> str:
    """Return a sentence with the seeds, the number of runs, the machine, versions, commits and training time."""
    devices = sorted({row["device"] for row in rows})
    commits = sorted({row["commit"] or "unknown" for row in rows})
    torch = sorted({row["versions"]["torch"] for row in rows})
    seeds = sorted({row["seed"] for row in rows})
    arms, minutes = len(by_arm(rows)), sum(row["seconds"] for row in rows) / 60
    return (
        f"Mean ± standard deviation over seeds {', '.join(map(str, seeds))}"
        f"{'; in brackets: 95 % confidence interval over seeds and samples' if has_intervals else ''}. "
        f"{len(rows)} runs of {arms} arm{'s' if arms > 1 else ''} on {', '.join(devices)}, torch {', '.join(torch)}, "
        f"commit {', '.join(commits)}; {minutes:.0f} minutes of training in total (parallel runs added up)."
    )


def with_plots(text: str, folder: Path) -> str:
    """Append the plots of a folder to a text."""
    return "\n\n".join([text, *(f"![{description(path)}]({path.name})" for path in sorted(folder.glob("*.png")))])


def write_readme(study: Study, out: Path) -> int:
    """Draw the plots from the rows and rewrite the results section of the README; return the number of rows.

    A folder without a README gets one. Nothing is written if all rows are of other settings or a table fails.
    """
    rows = rows_of(study, out)
    if not rows and (others := len(finished(out / RESULTS))):
        raise InvalidOption(
            f"{out}: all {others} rows are of other settings than those of {study.name}. "
            "Show rows of --reduced with --reduced"
        )
    readme, text = out / "README.md", section(study, rows)
    if rows and study.plot is not None:
        study.plot(study, rows, out)
    if rows or readme.exists():
        blank = f"# {study.name}\n\n{study.question}\n\n<!-- results -->\n<!-- /results -->\n"
        page = replace_section(readme, with_plots(text, out) if rows else text, blank=blank)
        write_bytes(readme, page.encode())
    return len(rows)


def replace_section(path: Path, text: str, name: str = "results", *, blank: str = "") -> str:
    """Return a page (``blank`` if it is new) with ``text`` between ``<!-- name -->`` and ``<!-- /name -->``."""
    page = path.read_text(encoding="utf-8") if path.exists() else blank
    marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
    if len(marks.findall(page)) != 1:
        raise InvalidOption(f"{path}: expected the markers <!-- {name} --> and <!-- /{name} --> exactly once")
    return marks.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)
