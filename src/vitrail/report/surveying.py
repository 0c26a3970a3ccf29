"""A survey of several models on one page: when do artifacts appear?"""

from __future__ import annotations

from typing import Any

from vitrail.analysis.norms import Norms
from vitrail.analysis.result import plain
from vitrail.analysis.survey import Entry, NormMap, Survey
from vitrail.report.page.blocks import (
    Block,
    Columns,
    Details,
    Figure,
    Key,
    Legend,
    Note,
    PageSection,
    Strip,
    Table,
    Takeaway,
    Text,
)
from vitrail.report.page.charts import Bar, Line, bars, over_layers
from vitrail.report.page.formatting import count, number, percent
from vitrail.report.page.images import NormColors
from vitrail.report.page.render import render
from vitrail.report.report import Saved, ShownImage
from vitrail.report.verdict import BADGES, confidence_words

MOST_DRAWN = 8
"""Models whose norms by depth are drawn."""

CELL = 16
"""Pixels of a patch in a norm map."""

LONGEST = 16
"""Most characters of a model's name beside a bar."""


class SurveyReport(Saved, eq=False):
    """The result of ``vitrail survey``: a survey as a page and as JSON."""

    survey: Survey
    images: str  # what the images were

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        entries = self._measured()
        having = [entry for entry, norms in entries if norms.verdict == "artifacts"]
        if not having:
            return f"None of {count(len(entries), 'model')} has artifact tokens."
        start = "" if self.survey.first is None else f"; from {self.survey.first} on, all have"
        return f"{count(len(having), 'model')} of {len(entries)} have artifact tokens{start}."

    def to_dict(self) -> dict[str, Any]:
        """Return the survey as plain values."""
        return {"verdict": self.verdict, "images": self.images, **plain(self.survey)}

    @property
    def next_step(self) -> str:
        """What to do next, in one line; code is between backticks."""
        measured = self._measured()
        if self.survey.first is not None:
            return (
                f"Inspect `{self.survey.first}`, the first with artifacts from which on all have them: "
                f"`vitrail inspect {self.survey.first}` shows where they are and whether test-time registers help."
            )
        if any(norms.verdict == "artifacts" for _, norms in measured):
            return "Inspect the models that have artifact tokens with `vitrail inspect`."
        unclear = [entry.name for entry, norms in measured if norms.verdict == "uncertain"]
        if unclear:
            return f"Survey more images: there is no clear answer for {', '.join(unclear[:3])}."
        return "Nothing needs to be done about artifacts: use patch tokens as they are."

    def to_html(self) -> str:
        """Return the survey as one page."""
        return render(
            "survey.html",
            title="Artifact tokens of several models",
            photos=[],
            verdict=self.verdict,
            next=self.next_step,
            images=self.images,
            sections=[
                PageSection("models", "Models", "Models", self._table()),
                PageSection("series", "From model to model", "Series", self._series()),
                PageSection("norms", "Token norms by depth", "Norms", self._norms()),
                *(
                    [PageSection("maps", "The same images in all models", "Maps", maps)]
                    if (maps := self._maps())
                    else []
                ),
            ],
        )

    def _measured(self) -> list[tuple[Entry, Norms]]:
        """Return the models that did not fail, with their norms."""
        return [(entry, entry.norms) for entry in self.survey.entries if entry.norms is not None]

    def _table(self) -> list[Block]:
        head = ["model", "parameters", "verdict", "confidence", "threshold", "above it", "since layer"]
        rows = []
        for entry in self.survey.entries:
            norms = entry.norms
            cells = ["–"] * 5
            if norms is not None:
                share = None if norms.threshold is None else norms.outlier_share
                since = "–" if norms.onset is None else f"{norms.onset} of {entry.depth}"
                sure = confidence_words(norms.confidence, norms.num_images)
                cells = [BADGES[norms.verdict], sure, number(norms.threshold), percent(share), since]
            rows.append([entry.name, f"{entry.parameters:,}", *cells])
        caption = "Norms of patch tokens after the last layer, in the given order; layers are counted from 0"
        failed = [Note(f"{entry.name} failed: {entry.problem}") for entry in self.survey.entries if entry.problem]
        return [Table(head, rows, caption), *([Details("What failed", failed)] if failed else [])]

    def _series(self) -> list[Block]:
        """Draw the share of high-norm tokens, and the norms of the last layer, over the models."""
        measured = self._measured()
        if not measured:
            return [Note("No model could be measured.")]
        rows = []
        for entry, norms in measured:
            share = norms.outlier_share if norms.verdict == "artifacts" else 0.0
            multiple = f", {number(norms.ratio)} ×" if norms.verdict == "artifacts" else ""
            rows.append(Bar(_short(entry.name), share, percent(share) + multiple))
        label = "Share of artifact tokens: " + ", ".join(f"{row.name} {row.text}" for row in rows)
        shares = Figure(
            [bars(rows, label)], "Share of artifact tokens, and their norm in multiples of the typical one."
        )
        places = list(range(len(measured)))
        quantiles = [norms.per_layer[-1].quantiles for _, norms in measured]
        lines = [Line("s0", [one["50"] for one in quantiles]), Line("s1", [one["max"] for one in quantiles])]
        label = (
            f"Norms after the last layer, model by model: the median goes from {number(quantiles[0]['50'])} to "
            f"{number(quantiles[-1]['50'])}, the largest from {number(quantiles[0]['max'])} to "
            f"{number(quantiles[-1]['max'])}."
        )
        chart = over_layers(places, lines, label, "norm", axis="model, counted from 0")
        keys = [Key("s0", "median"), Key("s1", "largest")]
        return [
            Takeaway(self.verdict),
            Columns([shares, Figure([chart], "Norms after the last layer, in the order of the table.", keys)]),
        ]

    def _norms(self) -> list[Block]:
        measured = self._measured()
        if not measured:
            return []
        drawn = measured[:: max(1, -(-len(measured) // MOST_DRAWN))]
        figures: list[Block] = []
        for entry, norms in drawn:
            layers, depths = norms.per_layer, [place / max(1, entry.depth - 1) for place in range(entry.depth)]
            depths = depths[-len(layers) :]
            lines = [
                Line(style, [layer.quantiles[key] for layer in layers])
                for key, style in (("50", "s0"), ("max", "s1 thin"))
            ]
            label = (
                f"Norms by depth of {entry.name}: median {number(layers[-1].quantiles['50'])} and largest "
                f"{number(layers[-1].quantiles['max'])} in the last layer."
            )
            figures.append(Figure([over_layers(depths, lines, label, "norm", axis="depth")], entry.name))
        text = "Depth 0 is the first layer, 1 the last."
        if len(drawn) < len(measured):
            text += f" {len(drawn)} of {len(measured)} models are drawn, evenly spread."
        powers = [[entry.name, *_visible(norms.power)] for entry, norms in measured]
        head = ["model", *(f"{share} of the tokens" for share in ("0.1 %", "0.5 %", "2 %", "5 %"))]
        caption = "Smallest multiple of the norm at which artifacts would have been found (with a probability of 90 %)"
        return [
            Text(text, "soft"),
            Legend([Key("s0", "median"), Key("s1", "largest")]),
            Columns(figures),
            Details("What could have been seen", [Table(head, powers, caption)]),
        ]

    def _maps(self) -> list[Block]:
        """Draw the norm maps of the first images, one row for each model."""
        strips = []
        for entry, norms in self._measured():
            shown = [_shown(index, one, norms.threshold) for index, one in enumerate(entry.maps)]
            scale = NormColors(shown)
            panels = []
            for one in shown:
                many = count(len(one.outliers), "high-norm token")
                label = f"Norms of {one.name} in {entry.name}: largest {number(max(one.norms))}, {many}"
                panels.append((scale.panel(one, label, one.norms, one.outliers), f"{one.name}: {many}"))
            if panels:
                low, high = number(scale.low), number(scale.high)
                strips.append(Strip(panels, f"{entry.name}: norms from {low} to {high}"))
        if not strips:
            return []
        text = (
            "Norms of the patch tokens after the last layer, from the lowest (dark) to the row's highest (bright). "
            "Squares are tokens above the threshold of the model."
        )
        return [Text(text, "soft"), *strips]


def _shown(index: int, one: NormMap, threshold: float | None) -> ShownImage:
    outliers = [] if threshold is None else [place for place, norm in enumerate(one.norms) if norm > threshold]
    size = one.grid[0] * CELL, one.grid[1] * CELL
    return ShownImage(index, f"image {index}", None, one.grid, size, one.norms, outliers)


def _short(name: str) -> str:
    """Return the last part of a name, and its end if that is too long for a chart."""
    name = name.rpartition("/")[2]
    return name if len(name) <= LONGEST else "…" + name[1 - LONGEST :]


def _visible(power: dict[str, dict[str, float]]) -> list[str]:
    """Return the smallest visible multiple for each share."""
    cells = []
    for share in ("0.1%", "0.5%", "2%", "5%"):
        likely = [float(multiple) for multiple, value in power.get(share, {}).items() if value >= 0.9]
        cells.append(f"{min(likely):g}×" if likely else "could not have been seen")
    return cells
