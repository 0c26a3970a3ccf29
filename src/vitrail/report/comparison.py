"""``vitrail.compare``: two reports side by side, of two models, or of one model before and after."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vitrail._arguments import checked
from vitrail.analysis.result import Result, plain
from vitrail.errors import InvalidOption
from vitrail.report import verdict
from vitrail.report.page.blocks import Block, Columns, Figure, Key, Note, PageSection, Table, Text
from vitrail.report.page.charts import Distribution, Line, histogram, over_layers
from vitrail.report.page.formatting import number, percent
from vitrail.report.page.images import NormColors, photo_panel, photos
from vitrail.report.page.render import render
from vitrail.report.report import Report, Saved

QUANTITIES: dict[str, tuple[str, bool]] = {
    "norms.outlier_share": ("tokens above the threshold", True),
    "norms.threshold": ("threshold (norm)", False),
    "norms.typical": ("typical norm", False),
    "norms.ratio": ("norm of high-norm tokens over typical norm", False),
    "norms.onset": ("first layer with artifacts", False),
    "norms.images_with_outliers": ("images with high-norm tokens", False),
    "redundancy.similarity.auc": ("probability that high-norm tokens are more like their neighbors", True),
    "redundancy.foreground.auc": ("probability that high-norm tokens have more foreground", True),
    "probes.position.kinds.normal.accuracy.mean": ("position found, normal patches", True),
    "probes.position.kinds.outlier.accuracy.mean": ("position found, high-norm tokens", True),
    "probes.pixels.kinds.normal.r2.mean": ("pixel variance explained, normal patches", True),
    "probes.pixels.kinds.outlier.r2.mean": ("pixel variance explained, high-norm tokens", True),
    "probes.classes.kinds.class.accuracy.mean": ("class from the class token", True),
    "probes.classes.kinds.normal.accuracy.mean": ("class from a normal patch", True),
    "probes.classes.kinds.outlier.accuracy.mean": ("class from a high-norm token", True),
    "probes.classes.kinds.register 1.accuracy.mean": ("class from register 1", True),
    "discovery.keys.lost.corloc.share": ("objects found, LOST on keys", True),
    "discovery.keys.lost_sweep.best_of_sweep.share": ("objects found, LOST on keys with its best bias", True),
    "discovery.keys.tokencut.corloc.share": ("objects found, TokenCut on keys", True),
    "discovery.values.lost.corloc.share": ("objects found, LOST on values", True),
    "discovery.values.lost_sweep.best_of_sweep.share": ("objects found, LOST on values with its best bias", True),
    "discovery.values.tokencut.corloc.share": ("objects found, TokenCut on values", True),
    "discovery.whole_image.share": ("objects found by a box around the whole image", True),
}
"""Compared quantities: path in the JSON, name, and whether it is a share."""


@checked
def compare(a: Report | str | os.PathLike[str], b: Report | str | os.PathLike[str]) -> Comparison:
    """Compare two reports, given as objects or by their files.

    Args:
        a: the first report, such as that of the unchanged model.
        b: the second report, such as that of the same model with registers.

    Example:
        >>> vitrail.compare(before, after).save("comparison.html")   # doctest: +SKIP
    """
    for one in (a, b):
        if not isinstance(one, Report | str | os.PathLike):
            raise InvalidOption(f"compare takes two reports or their files; got {type(one).__name__}")
    first, second = (one if isinstance(one, Report) else Report.load(one) for one in (a, b))
    values = first.to_dict(), second.to_dict()
    differences = [Difference("norms.verdict", "verdict", first.norms["verdict"], second.norms["verdict"], None)]
    for key, (name, share) in QUANTITIES.items():
        left, right = (_look_up(one, key) for one in values)
        if left is not None or right is not None:
            change = right - left if left is not None and right is not None else None
            differences.append(Difference(key, name, left, right, change, share))
    return Comparison(first, second, differences, _remarks(first, second))


class Difference(Result):
    """One quantity in both reports; None where a report does not have it.

    Attributes:
        a, b: the values.
    """

    key: str  # path in the JSON of a report
    name: str  # display name
    a: float | str | None
    b: float | str | None
    change: float | None  # b − a, for numbers
    share: bool = False  # whether the values are shares between 0 and 1

    def cells(self) -> list[str]:
        """Return name, values and change as text."""
        write = percent if self.share else number
        a, b = (value if isinstance(value, str) else write(value) for value in (self.a, self.b))
        if self.change is None:
            return [self.name, a, b, ""]
        sign = "+" if self.change > 0 else "−" if self.change < 0 else "±"
        change = f"{100 * abs(self.change):.3g} points" if self.share else number(abs(self.change))
        return [self.name, a, b, f"{sign}{change}"]


class Comparison(Saved, eq=False):
    """Two reports and their differences.

    Attributes:
        a, b: the reports.
    """

    a: Report
    b: Report
    differences: list[Difference]  # quantities of both
    remarks: list[str]  # caveats, such as that the images are not the same

    @property
    def verdict(self) -> str:
        """The difference in one sentence."""
        return verdict.comparison_sentence(self.a.norms, self.b.norms)

    def to_dict(self) -> dict[str, Any]:
        """Return differences and both models as plain values; each report has its own file."""
        return {
            "verdict": self.verdict,
            "a": {"verdict": self.a.verdict, "model": self.a.model, "data": self.a.data},
            "b": {"verdict": self.b.verdict, "model": self.b.model, "data": self.b.data},
            "differences": plain(self.differences),
            "remarks": self.remarks,
        }

    def to_html(self) -> str:
        """Return the comparison as one page."""
        return render(
            "comparison.html",
            title=f"{self.a.model['name']} and {self.b.model['name']}: artifact tokens",
            photos=photos(self.a.images),
            verdict=self.verdict,
            reports=(self.a, self.b),
            badges=verdict.BADGES,
            remarks=[Note(remark) for remark in self.remarks],
            sections=self.page_sections(),
        )

    def page_sections(self) -> list[PageSection]:
        """Return the sections of the page."""
        caption = "Values measured in at least one report; a dash where one does not have it"
        table = Table(["", "A", "B", "B − A"], [one.cells() for one in self.differences], caption)
        return [
            PageSection("differences", "Differences", "", [table]),
            PageSection("norms", "Token norms", "", [_norm_charts(self.a.norms, self.b.norms)]),
            PageSection("images", "The same images in both", "", _norm_maps(self.a, self.b)),
        ]


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _remarks(a: Report, b: Report) -> list[str]:
    remarks = []
    if a.data["fingerprint"] != b.data["fingerprint"]:
        remarks.append("The reports are about different images, so small differences mean little.")
    if a.settings.get("seed") != b.settings.get("seed"):
        remarks.append("The reports have different seeds, so probes were tested on different images.")
    if a.layout["grid"] != b.layout["grid"]:
        remarks.append("The models have patch grids of different sizes; positions are harder to find in a finer one.")
    return remarks


def _norm_charts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Block:
    """Draw histograms, and norms over relative depth, of both models."""
    series = [Distribution(one["histogram"]["edges"], one["histogram"]["counts"], one["threshold"]) for one in (a, b)]
    layers = [one["per_layer"] for one in (a, b)]
    depths = [[place / max(1, len(some) - 1) for place in range(len(some))] for some in layers]
    places = sorted({*depths[0], *depths[1]})
    lines = []
    for place, some in enumerate(layers):
        for quantile, style in (("50", f"s{place}"), ("max", f"s{place} thin")):
            values = dict(zip(depths[place], (layer["quantiles"][quantile] for layer in some), strict=True))
            lines.append(Line(style, [values.get(depth) for depth in places]))
    keys = [Key("s0", "A"), Key("s1", "B")]
    left = histogram(series, "Histograms of token norms of both models.")
    right = over_layers(places, lines, "Median and largest norm by depth, of both models.", "norm", axis="depth")
    histogram_text = "Norms after the last layer; both areas have the same size. Both scales are logarithmic."
    layers_text = "Median (solid) and largest norm (dashed) by depth: 0 is the first layer, 1 the last."
    return Columns([Figure([left], histogram_text, keys), Figure([right], layers_text, keys)])


def _norm_maps(a: Report, b: Report) -> list[Block]:
    """Draw norm maps of the images that both reports show."""
    others = {(one.index, one.name): one for one in b.images}
    pairs = [(one, others[one.index, one.name]) for one in a.images if (one.index, one.name) in others]
    if not pairs:
        return [Note("The reports have no shown image in common.")]
    scales = [NormColors([pair[place] for pair in pairs]) for place in range(2)]
    figures = []
    for one, two in pairs:
        panels = [photo_panel(one, one.name)] if one.pixels is not None else []
        for letter, shown, scale in zip("AB", (one, two), scales, strict=True):
            panels.append(scale.panel(shown, f"Norms of {one.name} in {letter}", shown.norms, shown.outliers))
        figures.append(
            Figure(panels, f"{one.name}: {len(one.outliers)} high-norm tokens in A, {len(two.outliers)} in B")
        )
    return [
        Text("The image (if the report has it), then norms of patch tokens in A and in B, high-norm tokens marked."),
        *(scale.ramp(f"norm in {letter}") for letter, scale in zip("AB", scales, strict=True)),
        Columns(figures, "images"),
    ]
