"""The interface of a section: compute values, render blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitrail.analysis.result import plain
from vitrail.errors import VitrailError
from vitrail.report.context import Context
from vitrail.report.page.blocks import Block
from vitrail.report.report import Report

Values = dict[str, Any]

TURNED_OFF = "turned off by an option"


@dataclass(frozen=True)
class Section:
    """One section of a report.

    Attributes:
        anchor: id of the section on the page.
        title: heading.
        render: return the blocks of the page, from the values of a report.
        link: text in the navigation; empty for no link.
        key: key of the values in the JSON; empty if the section has no values of its own.
        compute: return the values, and add maps to ``context.shown``; None if there is nothing to compute.
        option: argument of :func:`vitrail.inspect` that turns the section off.
    """

    anchor: str
    title: str
    render: Callable[[Report], list[Block]]
    link: str = ""
    key: str = ""
    compute: Callable[[Context], Values] | None = None
    option: str | None = None


def attempt(compute: Callable[[], Values]) -> Values:
    """Compute values; an error becomes their ``note``, and other values are computed all the same."""
    try:
        return {str(key): plain(value) for key, value in compute().items()}
    except VitrailError as error:
        return {"note": str(error)}
    except (ArithmeticError, ImportError, LookupError, MemoryError, RuntimeError, ValueError) as error:
        return {"note": f"failed with {type(error).__name__}: {str(error).strip() or 'no message'}"}
