"""Principal components of patch tokens, drawn as colors."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F

from vitrail.analysis.features import fit_pca, pca_maps
from vitrail.report.context import Context
from vitrail.report.page.blocks import Block, Columns, Figure, Text
from vitrail.report.page.formatting import count, percent
from vitrail.report.page.images import map_panel, photo_panel, rgb_uri
from vitrail.report.report import Report
from vitrail.report.sections.base import Section, Values


def compute(context: Context) -> Values:
    """Fit the components without outliers, and map the shown images to colors."""
    tokens = context.patch_tokens
    components = min(3, tokens.shape[2])
    pca = fit_pca(tokens, components=components, leave_out=context.outliers(context.featured))
    rows = [row for row, image in enumerate(context.featured) if image in context.chosen]
    outliers = context.outliers(context.chosen)
    if not outliers.all():  # otherwise there is no scale
        maps = pca_maps(tokens[rows], context.layout.grid, basis=pca, leave_out=outliers).cpu()
        maps = F.pad(maps, (0, 3 - components), value=0.5).flatten(1, 2)
        for one, colors in zip(context.shown, maps, strict=True):
            one.maps["pca"] = colors
    return {"images": len(tokens), **pca.to_dict()}


def render(report: Report) -> list[Block]:
    """Show the colors beside the images."""
    values = report.pca
    if "explained" not in values:
        return []
    figures = []
    for one in report.images:
        if "pca" in one.maps:
            label = f"Components of the patch tokens of {one.name}"
            panels = [photo_panel(one, one.title), map_panel(one, rgb_uri(np.asarray(one.maps["pca"])), label)]
            figures.append(Figure(panels, one.name))
    shares = ", ".join(percent(share) for share in values["explained"])
    left_out = f"; {count(values['left_out'], 'high-norm token')} left out" if values["left_out"] else ""
    summary = f"The directions explain {shares} of the variance, over {count(values['images'], report.noun)}{left_out}."
    return [Text(summary, "soft"), Columns(figures, "images")] if figures else []


def conclude(report: Report) -> str:
    """Return how much of the variance the three directions explain."""
    explained = report.pca["explained"]
    return f"{percent(sum(explained))} of the variance of patch tokens lies in {count(len(explained), 'direction')}."


INTRO = (
    "Patch tokens in false colors: red, green and blue are their three main directions of variation. Patches "
    "of the same color are alike to the model; a good map follows objects. All images share one scale."
)
SECTION = Section(
    "components", "Principal components of patch tokens", "Components", INTRO, render, compute, "pca", conclude=conclude
)
