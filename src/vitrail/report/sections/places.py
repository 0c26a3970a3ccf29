"""Where high-norm tokens sit: on patches like their neighbors, near the border, in the background?"""

from __future__ import annotations

import torch

from vitrail.analysis.redundancy import redundancy
from vitrail.report.context import Context
from vitrail.report.page.blocks import Beside, Block, Table, Text
from vitrail.report.page.formatting import count, interval, percent
from vitrail.report.report import Report
from vitrail.report.sections.base import Section, Values

QUANTITIES = {
    "similarity": "similarity to the four neighbors (cosine)",
    "border_distance": "distance from the border (patches)",
    "foreground": "share of foreground (masks)",
}


def compute(context: Context) -> Values:
    """Compare outliers with the other patches."""
    images = [image for image in context.images if bool(image.similarity.isfinite().all())]
    if not images:
        return {"note": "a grid of one patch has no neighbors"}
    outliers = context.outliers(images)
    shares = [image.foreground for image in images]
    unknown = torch.full((context.layout.num_patches,), torch.nan)
    masks = torch.stack([unknown if one is None else one for one in shares])
    values = redundancy(
        torch.stack([image.similarity for image in images]),
        outliers,
        context.layout.grid,
        masks=None if all(one is None for one in shares) else masks,
        seed=context.seed,
    ).to_dict()
    if not outliers.any():
        values["note"] = "there are no outliers to compare with the other patches"
    elif context.norms.verdict == "content":
        values["note"] = "the patches above the threshold are no artifacts: content explains their norms"
    elif context.norms.verdict != "artifacts":
        values["note"] = (
            "it is uncertain whether the patches above the threshold are artifacts; they are compared anyway"
        )
    return values


def render(report: Report) -> list[Block]:
    """Show the comparison as a table."""
    values = report.redundancy
    if not values.get("outliers"):
        return []
    rows = []
    for key, name in QUANTITIES.items():
        one = values.get(key)
        if one is not None:
            auc = {"mean": one["auc"], "low": one["auc_low"], "high": one["auc_high"]}
            rows.append([name, interval(one["outlier"]), interval(one["normal"]), interval(auc, percent)])
    head = ["", f"high-norm ({values['outliers']:,})", "other patches", "high-norm larger"]
    caption = f"High-norm tokens and other patches, {count(values['images'], report.noun)}; 95 % confidence intervals"
    return [Beside([Table(head, rows, caption)], [Text(one, "soft") for one in EXPLANATION])]


def conclude(report: Report) -> str:
    """Return in which quantities high-norm tokens differ, beyond the interval of the sample."""
    words = {
        "similarity": ("more like their neighbors", "less like their neighbors"),
        "border_distance": ("farther from the border", "closer to the border"),
        "foreground": ("more often on the object", "more often in the background"),
    }
    found = []
    for key, (more, less) in words.items():
        one = report.redundancy.get(key)
        if one is not None and one["auc_low"] is not None and not one["auc_low"] <= 0.5 <= one["auc_high"]:
            larger = one["auc"] > 0.5
            found.append(f"{more if larger else less} ({percent(one['auc'] if larger else 1 - one['auc'])} of pairs)")
    if not found:
        return "High-norm tokens sit on patches like the others, as far as these images can show."
    return f"High-norm tokens are {', '.join(found)} than other patches."


EXPLANATION = (
    "Artifacts prefer uninformative places: patches that look like their neighbors, often in the background.",
    "The last column is the probability that a high-norm token has the larger value: 50 % means no difference.",
)
SECTION = Section(
    "places", "Where high-norm tokens sit", "Places", "", render, compute, "redundancy", conclude=conclude
)
