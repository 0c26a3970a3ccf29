"""High-norm tokens one by one: the patch of each, its place and its norm."""

from __future__ import annotations

import torch

from vitrail.report.context import Context
from vitrail.report.page.blocks import Block, Columns, Figure, Text
from vitrail.report.page.formatting import count, number, percent
from vitrail.report.page.images import patch_panel
from vitrail.report.report import Report
from vitrail.report.sections.base import Section, Values

EACH = 6
"""Most tokens of one image."""

MOST = 32
"""Most tokens that are listed."""

AROUND = 2
"""Patches that a crop shows to each side."""


def compute(context: Context) -> Values:
    """List the strongest high-norm tokens of the images that are shown."""
    steps, height, width = context.layout.grid
    found = []
    for image, marked in zip(context.chosen, context.outliers(context.chosen), strict=True):
        norms = torch.where(marked, image.norms, -torch.inf)
        for place in norms.argsort(descending=True, stable=True)[: min(EACH, int(marked.sum()))].tolist():
            step, row, column = place // (height * width), place // width % height, place % width
            found.append(
                {
                    "image": image.index,
                    "name": image.name,
                    "patch": place,
                    "step": step if steps > 1 else None,
                    "row": row,
                    "column": column,
                    "norm": float(image.norms[place]),
                    "ratio": float(image.norms[place]) / context.norms.typical,
                    "similarity": float(image.similarity[place]),
                    "border": row in (0, height - 1) or column in (0, width - 1),
                }
            )
    found.sort(key=lambda one: (-one["norm"], one["image"], one["patch"]))
    border = 1 - max(0, height - 2) * max(0, width - 2) / (height * width)
    return {"tokens": found[:MOST], "border_share": border}


def conclude(report: Report) -> str:
    """Return the largest norm, and how many of the tokens lie at the border."""
    tokens = report.high_norm_tokens["tokens"]
    at_border = sum(one["border"] for one in tokens)
    return (
        f"The largest norm is {number(tokens[0]['norm'])}, {number(tokens[0]['ratio'])} times the typical one. "
        f"{at_border} of the {count(len(tokens), 'token')} below lie at the border of the image, where "
        f"{percent(report.high_norm_tokens['border_share'])} of all patches are."
    )


def render(report: Report) -> list[Block]:
    """Draw a crop around each of the tokens."""
    tokens = report.high_norm_tokens.get("tokens") or []
    images = {one.index: one for one in report.images}
    panels = []
    for one in tokens:
        step = "" if one["step"] is None else f"step {one['step']}, "
        where = f"{step}row {one['row']}, column {one['column']}"
        image = images[one["image"]]
        label = f"Patch of a high-norm token in {image.name}: {where}, norm {number(one['norm'])}"
        alike = "" if one["similarity"] is None else f", cosine {number(one['similarity'])}"
        caption = f"{number(one['norm'])} ({number(one['ratio'])} ×){alike}; {where} of {image.name}"
        panels.append(Figure([patch_panel(image, one["patch"], label, AROUND)], caption))
    if not panels:
        return []
    text = (
        f"Each crop shows a patch and its neighbors; the square is the patch. Below it: norm (and its multiple of the "
        f"typical norm), cosine with the four neighbors at the patch embedding, image and place, counted from 0. At "
        f"most {EACH} of each shown image are listed, in the order of their norms."
    )
    return [Text(text, "soft"), Columns(panels, "images small")]


SECTION = Section(
    "tokens",
    "High-norm tokens one by one",
    "Tokens",
    "",
    render,
    compute,
    "high_norm_tokens",
    conclude=conclude,
    absent=lambda report: "no token of the shown images is above the threshold",
)
