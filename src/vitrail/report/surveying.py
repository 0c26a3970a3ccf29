"""A survey of several models on one page: when do artifacts appear?"""

from __future__ import annotations

from typing import Any

from vitrail.analysis.result import plain
from vitrail.analysis.survey import Survey
from vitrail.report.page.blocks import Block, Details, Figure, Key, Note, PageSection, Table, Text
from vitrail.report.page.charts import Line, over_layers
from vitrail.report.page.formatting import confidence, count, number, percent
from vitrail.report.page.render import render
from vitrail.report.report import Saved
from vitrail.report.verdict import BADGES

MOST_LINES = 6
"""Models whose norms are drawn; more lines cannot be told apart."""


class SurveyReport(Saved, eq=False):
    """The result of ``vitrail survey``: a survey as a page and as JSON."""

    survey: Survey
    images: str  # what the images were

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        entries = [entry for entry in self.survey.entries if entry.norms is not None]
        having = [entry for entry in entries if entry.norms is not None and entry.norms.verdict == "artifacts"]
        if not having:
            return f"None of {count(len(entries), 'model')} has artifact tokens."
        start = "" if self.survey.first is None else f"; from {self.survey.first} on, all have"
        return f"{count(len(having), 'model')} of {len(entries)} have artifact tokens{start}."

    def to_dict(self) -> dict[str, Any]:
        """Return the survey as plain values."""
        return {"verdict": self.verdict, "images": self.images, **plain(self.survey)}

    def to_html(self) -> str:
        """Return the survey as one page."""
        return render(
            "survey.html",
            title="Artifact tokens of several models",
            photos=[],
            verdict=self.verdict,
            images=self.images,
            sections=[
                PageSection("models", "Models", "", [self._table()]),
                PageSection("norms", "Token norms by depth", "", self._norms()),
            ],
        )

    def _table(self) -> Table:
        head = ["model", "parameters", "verdict", "confidence", "threshold", "above it", "since layer", "problem"]
        rows = []
        for entry in self.survey.entries:
            norms = entry.norms
            cells = ["–"] * 5
            if norms is not None:
                share = None if norms.threshold is None else norms.outlier_share
                since = "–" if norms.onset is None else f"{norms.onset} of {entry.depth}"
                cells = [BADGES[norms.verdict], confidence(norms.confidence), number(norms.threshold), percent(share)]
                cells.append(since)
            rows.append([entry.name, f"{entry.parameters:,}", *cells, entry.problem])
        return Table(head, rows, "Norms of patch tokens after the last layer, in the given order of models")

    def _norms(self) -> list[Block]:
        measured = [entry for entry in self.survey.entries if entry.norms is not None]
        if not measured:
            return [Note("No model could be measured.")]
        drawn = measured[:: max(1, -(-len(measured) // MOST_LINES))]
        depths = {entry.name: [place / max(1, entry.depth - 1) for place in range(entry.depth)] for entry in drawn}
        places = sorted({depth for own in depths.values() for depth in own})
        figures: list[Block] = []
        for place, entry in enumerate(drawn):
            assert entry.norms is not None
            layers = entry.norms.per_layer
            lines = []
            for quantile, style in (("50", "s0"), ("max", "s1 thin")):
                values = [layer.quantiles[quantile] for layer in layers]
                known = dict(zip(depths[entry.name], values, strict=True))
                lines.append(Line(style, [known.get(depth) for depth in places]))
            chart = over_layers(places, lines, f"Norms by depth of {entry.name}.", "norm", depths=True)
            keys = [Key("s0", "median"), Key("s1", "largest")] if not place else []
            figures.append(Figure([chart], entry.name, keys))
        text = "Depth 0 is the first layer, 1 the last."
        if len(drawn) < len(measured):
            text += f" {len(drawn)} of {len(measured)} models are drawn, evenly spread."
        powers = [[entry.name, *_visible(entry.norms.power)] for entry in measured if entry.norms is not None]
        head = ["model", *(f"{share} of the tokens" for share in ("0.1 %", "0.5 %", "2 %", "5 %"))]
        caption = "Smallest multiple of the norm at which artifacts would have been found (with a probability of 90 %)"
        return [Text(text), *figures, Details("What could have been seen", [Table(head, powers, caption)])]


def _visible(power: dict[str, dict[str, float]]) -> list[str]:
    """Return the smallest visible multiple for each share."""
    cells = []
    for share in ("0.1%", "0.5%", "2%", "5%"):
        likely = [float(multiple) for multiple, value in power.get(share, {}).items() if value >= 0.9]
        cells.append(f"{min(likely):g}×" if likely else "could not have been seen")
    return cells
