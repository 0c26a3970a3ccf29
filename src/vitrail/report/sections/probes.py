"""Probes: position, pixels and class of the image, read from a single token."""

from __future__ import annotations

from functools import partial

import torch

from vitrail.analysis.probes import cut_patches, one_token_each, probe_classes, probe_pixels, probe_positions
from vitrail.report.context import Context
from vitrail.report.page.blocks import Beside, Block, Figure, Heading, Note, Table, Text
from vitrail.report.page.charts import Bar, bars
from vitrail.report.page.formatting import interval, number, percent
from vitrail.report.report import Report
from vitrail.report.sections.base import Section, Values, attempt

PROBE_WORK = 1.5e9
"""Tokens × channels × positions that one fit of the position probe may take on a CPU."""


NAMES = {"outlier": "high-norm", "normal": "normal"}
"""Kinds of patches on the page, by their keys in the JSON."""


def compute(context: Context) -> Values:
    """Fit the three probes."""
    return {
        "position": attempt(lambda: _position(context)),
        "pixels": attempt(lambda: _pixels(context)),
        "classes": attempt(lambda: _classes(context)),
        "images": len(context.featured),
    }


def _position(context: Context) -> Values:
    tokens = context.patch_tokens
    most = 20_000 if tokens.is_cuda else int(max(4000, min(20_000, PROBE_WORK / tokens[0].numel())))
    outliers = context.outliers(context.featured)
    return probe_positions(tokens, outliers, context.layout.grid, seed=context.seed, max_tokens=most).to_dict()


def _pixels(context: Context) -> Values:
    images = torch.stack([image.features.pixels for image in context.featured])
    patches = cut_patches(images.float() / 255, context.patch_size)
    outliers = context.outliers(context.featured)
    return probe_pixels(context.patch_tokens, outliers, patches, seed=context.seed).to_dict()


def _classes(context: Context) -> Values:
    labels = {row: image.label for row, image in enumerate(context.featured) if image.label is not None}
    if not labels:
        return {"note": "the images have no labels, so there is no class to predict"}
    rows = list(labels)
    tokens, outliers = context.tokens[rows], context.outliers(context.featured)[rows]
    draw = partial(one_token_each, tokens, context.layout, outliers)
    return probe_classes(lambda seed: draw(seed=seed), torch.tensor(list(labels.values())), seed=context.seed).to_dict()


def render(report: Report) -> list[Block]:
    """Show scores by kind of token, if there are any."""
    blocks = _blocks(report)
    return blocks if any(not isinstance(block, Heading | Note) for block in blocks) else []


def absent(report: Report) -> str:
    """Return why no probe has a score."""
    notes = [block.text for block in _blocks(report) if isinstance(block, Note) and block.text]
    return "; ".join(dict.fromkeys(notes))


def _blocks(report: Report) -> list[Block]:
    values = report.probes
    blocks: list[Block] = []
    if "position" in values:
        local = _local_blocks(values["position"], values.get("pixels") or {})
        blocks += [Heading("Position and pixels"), *local] if local else []
    if "classes" in values:
        classes = _class_blocks(values["classes"])
        blocks += [Heading("Class of the image"), *classes] if classes else []
    return blocks


def conclude(report: Report) -> str:
    """Return what normal patches and high-norm tokens know of their position, and which token knows the class best."""
    position, classes = report.probes.get("position") or {}, report.probes.get("classes") or {}
    sentences = []
    kinds = position.get("kinds") or {}
    found = {kind: one["accuracy"]["mean"] for kind, one in kinds.items() if one and one.get("accuracy")}
    if "normal" in found:
        more = f", a high-norm token in {percent(found['outlier'])}" if "outlier" in found else ""
        sentences.append(
            f"A normal patch knows its position in {percent(found['normal'])} of cases{more} (chance "
            f"{percent(position['chance_accuracy'])})."
        )
    known = {name: one["accuracy"] for name, one in (classes.get("kinds") or {}).items() if one["accuracy"]}
    if known:
        best = max(known, key=lambda name: float(known[name]["mean"]))
        majority = classes["kinds"][best]["majority"] or 0.0
        gain = "" if known[best]["low"] > majority else ", not clearly more"
        sentences.append(
            f"The class is read best from {NAMES.get(best, best)} tokens: {interval(known[best], percent)} of images"
            f"{gain} (naming the most common class: {percent(majority)})."
        )
    return " ".join(sentences)


def _local_blocks(position: Values, pixels: Values) -> list[Block]:
    notes = [f"{name}: {one['note']}" for name, one in (("position", position), ("pixels", pixels)) if "note" in one]
    rows, remarks = [], []
    for kind in ("normal", "outlier"):
        place, pixel = ((one.get("kinds") or {}).get(kind) or {} for one in (position, pixels))
        if place.get("accuracy") or pixel.get("l2"):
            cells = [interval(place.get("accuracy"), percent), interval(place.get("distance"))]
            rows.append([f"{NAMES[kind]} patches", *cells, interval(pixel.get("l2")), interval(pixel.get("r2"))])
        remarks += [one["note"] for one in (place, pixel) if one.get("note")]
    if not rows:
        return [*map(Note, notes), *map(Note, dict.fromkeys(remarks))]
    if "chance_accuracy" in position:
        rows.append(["chance", percent(position["chance_accuracy"]), number(position["chance_distance"]), "–", "–"])
    head = ["", "position found", "distance, in patches", "pixel error (L2)", "pixel variance explained"]
    table = Table(head, rows, "Position and pixels from one token; pixels between 0 and 1; 95 % confidence intervals")
    return [*map(Note, notes), table, *map(Note, dict.fromkeys(remarks))]


def _class_blocks(values: Values) -> list[Block]:
    if "kinds" not in values:
        return [Note(values.get("note"))]
    known = {name: one for name, one in values["kinds"].items() if one["accuracy"] is not None}
    notes = dict.fromkeys(one["note"] for one in values["kinds"].values() if one["accuracy"] is None)
    blocks: list[Block] = [Note("; ".join(notes))] if notes else []
    if known:
        rows = []
        for name, one in known.items():
            mean, low, high = (one["accuracy"][key] for key in ("mean", "low", "high"))
            rows.append(Bar(NAMES.get(name, name), mean, percent(mean), low, high))
        majority = list(known.values())[-1]["majority"]
        reference = None if majority is None else (majority, f"most common class {percent(majority)}")
        label = "Accuracy from one token: " + ", ".join(f"{row.name} {row.text}" for row in rows)
        caption = (
            f"Share of held-out images whose class (of {values['classes']}) is predicted from one token; lines are "
            "95 % confidence intervals."
        )
        return [Beside([Figure([bars(rows, label, reference)])], [Text(caption, "soft"), *blocks])]
    return blocks


INTRO = (
    "A probe is a small linear model that predicts one property from a single token, tested on held-out images. "
    "Normal patches should know their position and their pixels; artifacts often know less about these and "
    "more about the whole image, like a class token."
)
SECTION = Section("probes", "What tokens know", "Probes", INTRO, render, compute, "probes", "probes", conclude, absent)
