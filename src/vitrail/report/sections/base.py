"""The interface of a section: compute values, render blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitrail.analysis.result import plain
from vitrail.errors import VitrailError
from vitrail.report.context import Context
from vitrail.report.page.blocks import Block, Note, Takeaway, Text
from vitrail.report.report import Report

Values = dict[str, Any]

TURNED_OFF = "turned off by an option"


@dataclass(frozen=True)
class Section:
    """One section of a report.

    Attributes:
        anchor, title, link: id on the page, heading, and text in the navigation (empty for no link).
        render: return the blocks of the page, from the values of a report; the conclusion, the introduction and the
            ``note`` of the values come before them. A section without blocks is left out of the page.
        compute: return the values, and add maps to ``context.shown``; None if there is nothing to compute.
    """

    anchor: str
    title: str
    link: str
    intro: str  # introduction, for readers who do not know the method
    render: Callable[[Report], list[Block]]
    compute: Callable[[Context], Values] | None = None
    key: str = ""  # key of the values in the JSON; empty if the section has no values of its own
    option: str | None = None  # argument of :func:`vitrail.inspect` that turns the section off
    conclude: Callable[[Report], str] = lambda report: ""  # what the values show, in one or two sentences
    absent: Callable[[Report], str] = lambda report: ""  # why there are no blocks, if the values have no note

    def note(self, report: Report) -> str | None:
        """Return why values are missing, if they are."""
        return report.sections[self.key].get("note") if self.key else None

    def blocks(self, report: Report) -> list[Block]:
        """Return the conclusion, the introduction, the note, and what ``render`` returns; nothing if that is empty."""
        rendered = self.render(report)
        if not rendered:
            return []
        return [Takeaway(self.conclude(report)), Text(self.intro, "soft"), Note(self.note(report)), *rendered]


def attempt(compute: Callable[[], Values]) -> Values:
    """Compute values; an error becomes their ``note``, and other values are computed all the same."""
    try:
        return {str(key): plain(value) for key, value in compute().items()}
    except VitrailError as error:
        return {"note": str(error)}
    except (ArithmeticError, ImportError, LookupError, MemoryError, RuntimeError, ValueError) as error:
        return {"note": f"failed with {type(error).__name__}: {str(error).strip() or 'no message'}"}
