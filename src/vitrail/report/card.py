"""The card of a report in a notebook: the verdict, figures, and the norms of a few images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitrail.drawing.notebook import bars, card, draw_map, picture
from vitrail.report.page.formatting import number, percent

if TYPE_CHECKING:
    from vitrail.report.report import Report

SHOWN = 3


def report_card(report: Report) -> str:
    """Return the card of a report."""
    norms = report.norms
    figures = {
        "images": f"{report.data['images']:,}",
        "tokens above the threshold": "none" if norms["threshold"] is None else percent(norms["outlier_share"]),
        "threshold (norm)": number(norms["threshold"]),
        "typical norm": number(norms["typical"]),
        "since layer": number(norms["onset"]),
    }
    pictures = []
    for one in report.images[:SHOWN]:
        values = np.array(one.norms, dtype=np.float64).reshape(one.grid)
        pictures.append(picture(draw_map(np.log(np.maximum(values, 1e-12))), f"{one.title}: norms"))
    typical = [layer["typical"] or 0.0 for layer in norms["per_layer"]]
    if typical:
        pictures.append(bars(typical, max(typical), "typical norm of each layer"))
    return card(report.model["name"], figures, pictures, f"{report.verdict} report.save('report.html') has the rest.")
