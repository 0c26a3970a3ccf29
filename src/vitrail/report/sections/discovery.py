"""Object discovery without labels: LOST and TokenCut on the keys and the values of the last layer.

Which of both suits a model depends on its training, and the model does not tell, so both are computed. Boxes that are
drawn are those of the keys, as in both papers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vitrail.analysis.discovery import Discovery, corloc, lost_batch, suggest_biases, sweep_lost, tokencut_batch
from vitrail.report.collect import OBJECT_FEATURES
from vitrail.report.context import Context
from vitrail.report.page.blocks import Beside, Block, Columns, Figure, Key, Legend, Note, Table, Text
from vitrail.report.page.formatting import interval, percent
from vitrail.report.page.images import box_marks, photo_panel
from vitrail.report.report import Report
from vitrail.report.sections.base import Section, Values, attempt

METHODS: dict[str, tuple[str, Callable[..., list[Discovery]]]] = {
    "lost": ("LOST", lost_batch),
    "tokencut": ("TokenCut", tokencut_batch),
}
"""Methods by key, each with its name."""

NO_TRUTH = "there are no true boxes, so it is unknown how often these are right"


def compute(context: Context) -> Values:
    """Find one box per image with each method and feature; with true boxes, compute CorLoc."""
    truth = [image.features.boxes for image in context.with_objects]
    known = any(one is not None and len(one) for one in truth)
    values: Values = {"images": len(context.with_objects)}
    for feature in OBJECT_FEATURES:
        values[feature] = {name: attempt(partial(_method, context, feature, name, truth, known)) for name in METHODS}
        if known:
            values[feature]["lost_sweep"] = attempt(partial(_sweep, context, feature, truth))
    if known:
        # Objects that fill their images are "found" by a box around everything: the baseline.
        height, width = context.image_size
        everything = (0.0, 0.0, float(width), float(height))
        values["whole_image"] = corloc([everything] * len(truth), truth).to_dict()
    return values


def _method(context: Context, feature: str, name: str, truth: list[Any], known: bool) -> Values:
    found = METHODS[name][1](context.object_features(feature), context.layout.grid)
    boxes = [one.pixels(context.patch_size, context.image_size) for one in found]
    if feature == "keys":
        by_index = {image.index: box for image, box in zip(context.with_objects, boxes, strict=True)}
        for one in context.shown:
            if one.index in by_index:
                one.boxes[name] = by_index[one.index]
    return {"corloc": corloc(boxes, truth).to_dict()} if known else {"note": NO_TRUTH}


def _sweep(context: Context, feature: str, truth: list[Any]) -> Values:
    features = context.object_features(feature)
    grids, biases = [context.layout.grid] * len(truth), suggest_biases(features)
    return sweep_lost(features, grids, truth, biases=biases, patch=context.patch_size).to_dict()


def render(report: Report) -> list[Block]:
    """Show how often boxes are right, and the boxes."""
    values = report.discovery
    scores: dict[str, Values] = {}
    notes = []
    for feature in OBJECT_FEATURES:
        some, remarks = _scores(values.get(feature) or {}, feature)
        scores |= some
        notes += remarks
    if scores and values.get("whole_image"):
        scores["the whole image as the box"] = values["whole_image"]
    rows = [
        [name, interval(score, percent, "share"), f"{score['hits']} of {score['images']}"]
        for name, score in scores.items()
    ]
    caption = "CorLoc: boxes that overlap a true one with IoU ≥ 0.5. The last row is the baseline"
    boxes = _box_blocks(report)
    if not rows and not boxes:
        return []
    table, others = Table(["method", "right", "images"], rows, caption), [note for note in notes if note != NO_TRUTH]
    if not rows and not others:
        return [Text(EXPLANATION, "soft"), *boxes]
    return [Beside([table, *map(Note, dict.fromkeys(others))], [Text(EXPLANATION, "soft")]), *boxes]


def absent(report: Report) -> str:
    """Return why there are neither scores nor boxes."""
    notes = [note for feature in OBJECT_FEATURES for note in _scores(report.discovery.get(feature) or {}, feature)[1]]
    return "; ".join(dict.fromkeys(notes))


def conclude(report: Report) -> str:
    """Return which method finds most objects, beside the baseline; nothing without true boxes."""
    scores: dict[str, Values] = {}
    for feature in OBJECT_FEATURES:
        scores |= _scores(report.discovery.get(feature) or {}, feature)[0]
    fair = {name: one for name, one in scores.items() if "upper bound" not in name}
    if not fair:
        return "Boxes are drawn, but nothing is known about how often they are right: there are no true boxes."
    best = max(fair, key=lambda name: fair[name]["share"])
    whole = report.discovery.get("whole_image") or {}
    baseline = f"; a box around the whole image finds {percent(whole['share'])}" if whole else ""
    return f"{best} finds {percent(fair[best]['share'])} of the objects{baseline}."


def _scores(values: Values, feature: str) -> tuple[dict[str, Values], list[str]]:
    """Return CorLoc of each method with one kind of features, and notes."""
    scores: dict[str, Values] = {}
    notes = []
    for key, (name, _) in METHODS.items():
        one = values.get(key) or {}
        if one.get("corloc") and one["corloc"]["share"] is not None:
            scores[f"{name} on {feature}"] = one["corloc"]
        elif one.get("note"):
            notes.append(one["note"] if "no true boxes" in one["note"] else f"{name} on {feature}: {one['note']}")
    sweep = values.get("lost_sweep") or {}
    if sweep.get("best_of_sweep"):
        scores[f"LOST on {feature}, bias chosen on other images"] = sweep["held_out"]
        scores[f"LOST on {feature}, best bias (an upper bound)"] = sweep["best_of_sweep"]
    return scores, notes


def _box_blocks(report: Report) -> list[Block]:
    figures = []
    for one in report.images:
        if one.boxes and one.pixels is not None:
            boxes = {f"truth {place}": box for place, box in enumerate(one.truth)} | dict(one.boxes)
            panel = photo_panel(one, f"Boxes found in {one.title}", box_marks(one, boxes))
            figures.append(Figure([panel], one.title))
    if not figures:
        return []
    keys = [Key(f"k-{key}", f"{name} on keys") for key, (name, _) in METHODS.items()]
    if any(one.truth for one in report.images):
        keys.append(Key("k-truth", "true box"))
    return [Legend(keys), Columns(figures, "images small")]


EXPLANATION = (
    "LOST and TokenCut find one object per image from patch features alone, without training. Artifacts "
    "mislead them. Which features of the last layer suit a model depends on its training: keys for DINO and "
    "DINOv2, values for DeiT-III and OpenCLIP. Both are tried."
)
SECTION = Section(
    "objects", "Object discovery", "Objects", "", render, compute, "discovery", "discovery", conclude, absent
)
