"""``vitrail.compare``: two reports side by side, of two models, or of one before and after."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption
from vitrail.report.page import Page
from vitrail.report.report import Report


@dataclass(frozen=True)
class Difference(Result):
    """One quantity in both reports; None where a report does not have it.

    Attributes:
        key: where it stands in a report's values.
        name: the same in words.
        a, b: the values.
        change: b − a, for numbers.
        share: whether the values are shares between 0 and 1.
    """

    key: str
    name: str
    a: float | str | None
    b: float | str | None
    change: float | None
    share: bool = False


@dataclass(frozen=True, eq=False)
class Comparison(Page):
    """Two reports, and what differs.

    Attributes:
        a, b: the reports.
        differences: quantities of both.
        remarks: what to keep in mind, such as that the pictures were not the same.
    """

    a: Report
    b: Report
    differences: list[Difference]
    remarks: list[str]

    @property
    def verdict(self) -> str:
        """What differs, in one sentence."""
        found = {
            "artifacts": "has artifact tokens",
            "none": "has no artifact tokens",
            "uncertain": "gives no clear answer",
        }
        one, two = (found[report.norms["verdict"]] for report in (self.a, self.b))
        if self.a.norms["verdict"] == self.b.norms["verdict"] == "artifacts":
            left, right = (report.norms["outlier_share"] for report in (self.a, self.b))
            more = "as many" if left == right else "A has more" if left > right else "B has more"
            return f"Both models have artifact tokens: {left:.2%} of A's patch tokens, {right:.2%} of B's; {more}."
        if one == two:
            return {"none": "Neither model has artifact tokens."}.get(
                self.a.norms["verdict"], "Neither model gives a clear answer."
            )
        return f"Model A {one}; model B {two}."

    def to_dict(self) -> dict[str, Any]:
        """Give differences and both models as plain values; the reports have files of their own."""
        return {
            "verdict": self.verdict,
            "a": {key: value for key, value in self.a.to_dict().items() if key in ("verdict", "model", "data")},
            "b": {key: value for key, value in self.b.to_dict().items() if key in ("verdict", "model", "data")},
            "differences": [one.to_dict() for one in self.differences],
            "remarks": list(self.remarks),
        }

    def to_html(self) -> str:
        """Give both side by side as one page."""
        from vitrail.report.html_compare import comparison_page

        return comparison_page(self)


QUANTITIES: dict[str, tuple[str, bool]] = {
    "norms.outlier_share": ("tokens above the threshold", True),
    "norms.threshold": ("threshold (norm)", False),
    "norms.typical": ("typical norm", False),
    "norms.ratio": ("norm of outliers over typical norm", False),
    "norms.onset": ("first layer with artifacts", False),
    "norms.pictures_with_outliers": ("pictures with outliers", False),
    "redundancy.similarity.auc": ("outliers are more like their neighbours (chance)", True),
    "redundancy.foreground.auc": ("outliers hold more foreground (chance)", True),
    "probes.position.kinds.normal.accuracy.mean": ("position found, normal patches", True),
    "probes.position.kinds.outlier.accuracy.mean": ("position found, outliers", True),
    "probes.pixels.kinds.normal.r2.mean": ("pixel variance explained, normal patches", True),
    "probes.pixels.kinds.outlier.r2.mean": ("pixel variance explained, outliers", True),
    "probes.classes.kinds.class.accuracy.mean": ("class from the class token", True),
    "probes.classes.kinds.normal.accuracy.mean": ("class from a normal patch", True),
    "probes.classes.kinds.outlier.accuracy.mean": ("class from an outlier", True),
    "probes.classes.kinds.register 1.accuracy.mean": ("class from register 1", True),
    "discovery.keys.lost.corloc.share": ("objects found, LOST on keys", True),
    "discovery.keys.lost_sweep.best_of_sweep.share": ("objects found, LOST on keys with its best bias", True),
    "discovery.keys.tokencut.corloc.share": ("objects found, TokenCut on keys", True),
    "discovery.values.lost.corloc.share": ("objects found, LOST on values", True),
    "discovery.values.lost_sweep.best_of_sweep.share": ("objects found, LOST on values with its best bias", True),
    "discovery.values.tokencut.corloc.share": ("objects found, TokenCut on values", True),
    "discovery.whole_picture.share": ("objects found by a box around everything", True),
}
"""What is compared: where it stands, what it is called, whether it is a share."""


def compare(a: Report | str | os.PathLike[str], b: Report | str | os.PathLike[str]) -> Comparison:
    """Put two reports side by side, given as such or by their files.

    Args:
        a: the first report, such as that of a model as it is.
        b: the second one, such as that of the same model with registers.

    Example:
        >>> vitrail.compare(before, after).save("comparison.html")   # doctest: +SKIP
    """
    one, two = (_taken(given) for given in (a, b))
    values = one.to_dict(), two.to_dict()
    one_verdict, two_verdict = (both["norms"]["verdict"] for both in values)
    found = [Difference("norms.verdict", "verdict", one_verdict, two_verdict, None)]
    for key, (name, share) in QUANTITIES.items():
        left, right = (look_up(both, key.split(".")) for both in values)
        if left is not None or right is not None:
            change = right - left if left is not None and right is not None else None
            found.append(Difference(key, name, left, right, change, share))
    return Comparison(one, two, found, _remarks(one, two))


def look_up(values: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Find a value by its path; None where any part of the path is missing."""
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _taken(given: Any) -> Report:
    if isinstance(given, Report):
        return given
    if isinstance(given, str | os.PathLike):
        return Report.load(given)
    raise InvalidOption(f"compare takes two reports, or their files; got {type(given).__name__}")


def _remarks(a: Report, b: Report) -> list[str]:
    found = []
    if a.data["fingerprint"] != b.data["fingerprint"]:
        found.append("The reports are about different pictures, so that small differences say little.")
    if a.settings.get("seed") != b.settings.get("seed"):
        found.append("The reports have different seeds, so that probes were tested on different pictures.")
    if a.layout["grid"] != b.layout["grid"]:
        found.append("The models have grids of different sizes; positions are harder to find in a finer one.")
    return found
