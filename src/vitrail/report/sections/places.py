"""Where outliers sit: on patches like their neighbors, near the border, in the background?"""

from __future__ import annotations

import torch

from vitrail.analysis.redundancy import redundancy
from vitrail.report.context import Context
from vitrail.report.page.blocks import Block, Table
from vitrail.report.page.formatting import count, interval, percent
from vitrail.report.report import Report
from vitrail.report.sections.base import Section, Values

QUANTITIES = {
    "similarity": "similarity to the four neighbors (cosine, at the patch embedding)",
    "border_distance": "distance from the border, in patches",
    "foreground": "share of foreground (from masks)",
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
    if "similarity" not in values:
        return []
    rows = []
    for key, name in QUANTITIES.items():
        one = values.get(key)
        if one is not None:
            auc = {"mean": one["auc"], "low": one["auc_low"], "high": one["auc_high"]}
            rows.append([name, interval(one["outlier"]), interval(one["normal"]), interval(auc, percent)])
    head = ["", f"outliers ({values['outliers']:,})", "other patches", "outlier larger"]
    caption = f"Outliers and other patches, {count(values['images'], 'image')}; 95 % confidence intervals"
    return [Table(head, rows, caption)]


INTRO = (
    "Artifacts prefer uninformative places: patches that look like their neighbors, often in the background. "
    "The last column is the probability that an outlier has the larger value: 50 % means no difference."
)
SECTION = Section("places", "Where outliers sit", "Places", INTRO, render, compute, "redundancy")
