"""The report of an inspection: plain values, a verdict, and pages."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.errors import ReportError
from vitrail.report.page import Page
from vitrail.report.shown import Shown
from vitrail.report.words import verdict

FORMAT = 1
"""Number of the format of the JSON; raised when a key changes its meaning."""


@dataclass(frozen=True, eq=False)
class Report(Page):
    """What an inspection found. ``docs/report.md`` explains every value.

    Each section is a dictionary of plain values; an analysis that could not be done has a ``note`` that says why.

    Attributes:
        model: name, class, size, precision of the model.
        data: what was looked at.
        layout: which tokens the model has.
        norms: norms of patch tokens by layer, threshold, verdict: whether there are artifacts, and since when.
        redundancy: where outliers sit.
        attention: what each role attends to in the last layer, and which pictures are shown layer by layer.
        registers: each register by itself.
        pca: principal components of the patch features.
        probes: what tokens know of position, pixels, class.
        discovery: objects found without labels.
        cure: what test-time registers do to the artifacts.
        problems: pictures that could not be read, numbers that are not finite, notes.
        settings: options and seeds.
        versions: what it ran on.
        pictures: the few pictures that are shown.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    layout: dict[str, Any]
    norms: dict[str, Any]
    redundancy: dict[str, Any]
    attention: dict[str, Any]
    registers: dict[str, Any]
    pca: dict[str, Any]
    probes: dict[str, Any]
    discovery: dict[str, Any]
    cure: dict[str, Any]
    problems: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, Any]
    pictures: list[Shown] = field(default_factory=list, repr=False)

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        return verdict(self.norms)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, less pixels and maps."""
        return {"format": FORMAT, "verdict": self.verdict, **super().to_dict()}

    def to_html(self) -> str:
        """Give the report as one page."""
        from vitrail.report.html import report_page

        return report_page(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report from its JSON, or from the JSON beside its page; pixels and maps are not in it."""
        file = Path(path)
        if file.suffix.lower() in (".html", ".htm"):
            file = file.with_suffix(".json")
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ReportError(
                f"{file} could not be read ({error.strerror or error}); expected a report's JSON"
            ) from error
        except ValueError as error:
            raise ReportError(f"{file} is not JSON ({error}); expected the file beside a report's page") from error
        return cls.from_dict(values, str(file))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the values") -> Report:
        """Take what :meth:`to_dict` gave."""
        names = [name for name in cls.__dataclass_fields__ if name != "pictures"]
        missing = [name for name in names if not isinstance(values, Mapping) or not isinstance(values.get(name), dict)]
        if missing or values.get("format") != FORMAT:
            got = f"without {', '.join(missing)}" if missing else f"of format {values.get('format')!r}"
            raise ReportError(f"{where} is no report of format {FORMAT}: it is one {got}. Inspect the model again")
        try:
            shown = [Shown.from_dict(one) for one in values.get("pictures", [])]
        except (KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"{where} has pictures that are damaged ({error}). Inspect the model again") from error
        return cls(**{name: values[name] for name in names}, pictures=shown)
