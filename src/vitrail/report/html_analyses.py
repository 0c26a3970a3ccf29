"""The page's parts about places, attention, components, probes and objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitrail.report import images
from vitrail.report.charts import Bar, bars
from vitrail.report.html_pictures import box_marks, map_panel, photo_panel, title
from vitrail.report.markup import Html, figure, key, note, table, tag
from vitrail.report.shown import Shown
from vitrail.report.words import count, number, percent

Values = Mapping[str, Any]
NAMES = {"lost": "LOST", "tokencut": "TokenCut"}


def between(value: Values | None, write: Any = number, mean: str = "mean") -> str:
    """Write a number with its interval; a dash where there is none."""
    if value is None or value.get(mean) is None:
        return "–"
    low, high = value.get("low"), value.get("high")
    if low is None or high is None:
        return str(write(value[mean]))
    ends = f"{write(low)} to {write(high)}".replace(" % to", " to")
    return f"{write(value[mean])} ({ends})"


def places_part(found: Values) -> list[Html]:
    """Say where outliers sit."""
    words = tag(
        "p",
        "Artifacts like dull places: patches that look like their neighbours, often in the background. The last column "
        "is the chance that an outlier has the larger value of the two: 50 % means no difference.",
    )
    if "similarity" not in found:
        return [words, note(found.get("note"))]
    kinds = {
        "similarity": "similarity to the four neighbours (cosine, at the patch embedding)",
        "border_distance": "distance from the border, in patches",
        "foreground": "share of foreground (from masks)",
    }
    rows = []
    for kind, name in kinds.items():
        one = found.get(kind)
        if one is not None:
            chance = {"mean": one["auc"], "low": one["auc_low"], "high": one["auc_high"]}
            rows.append([name, between(one["outlier"]), between(one["normal"]), between(chance, percent)])
    head = ["", f"outliers ({found['outliers']:,})", "other patches", "outlier larger"]
    caption = f"Outliers beside other patches, {count(found['pictures'], 'picture')}; intervals at 95 %"
    return [words, note(found.get("note")), table(head, rows, caption)]


def registers_part(found: Values) -> list[Html]:
    """Show each register by itself."""
    words = tag(
        "p",
        "Registers are extra tokens that a model was given as scratch paper, so that it need not use patches for it.",
    )
    rows = []
    for one in found.get("tokens") or []:
        probe = one["class_probe"]
        rows.append(
            [
                one["name"],
                number(one["norm"]),
                f"{number(one['norm_ratio'])} ×",
                number(one["effective_patches"]),
                between((probe or {}).get("accuracy"), percent),
            ]
        )
    head = ["token", "norm", "of a typical patch", "patches looked at", "class from it alone"]
    return [words, note(found.get("note")), table(head, rows, "Registers in the last layer") if rows else Html("")]


def pca_part(pictures: Sequence[Shown], found: Values) -> list[Html]:
    """Show principal components as colours."""
    words = tag(
        "p",
        "Patch tokens in false colours: their three main directions of variation are red, green and blue. Patches of "
        "the same colour mean the same to the model; a good map follows objects. All pictures share one scale.",
    )
    if "explained" not in found:
        return [words, note(found.get("note"))]
    drawn = [
        figure(
            tag(
                "div",
                photo_panel(one, title(one)),
                map_panel(one, images.colour(np.asarray(one.pca)), f"Components of the patch tokens of {one.name}"),
                class_="panels",
            ),
            one.name,
        )
        for one in pictures
        if one.pca is not None
    ]
    shares = ", ".join(percent(share) for share in found["explained"])
    left = f"; {count(found['left_out'], 'outlier')} left out" if found["left_out"] else ""
    measured = f"The directions hold {shares} of the variance, over {count(found['pictures'], 'picture')}{left}."
    return [words, tag("p", measured, class_="soft"), tag("div", drawn, class_="pictures")]


def probes_part(found: Values) -> list[Html]:
    """Show what probes read from tokens."""
    parts = [
        tag(
            "p",
            "A probe is a small linear model that is asked to read one thing from a single token, and tested on "
            "pictures that it did not see. Normal patches should know their place and their pixels; artifacts often "
            "know less of these and more about the whole picture, like a class token.",
        ),
        note(found.get("note")),
    ]
    local = [found.get("position") or {}, found.get("pixels") or {}]
    if "position" in found:
        parts += [tag("h3", "Where am I, and what do I look like?"), *_local_probes(*local)]
    if "classes" in found:
        parts += [tag("h3", "What is in the picture?"), *_class_probe(found["classes"])]
    return parts


def _local_probes(position: Values, pixels: Values) -> list[Html]:
    parts = [
        note([name, ": ", one["note"]]) for name, one in (("position", position), ("pixels", pixels)) if "note" in one
    ]
    rows: list[list[Any]] = []
    remarks: dict[str, None] = {}
    for kind in ("normal", "outlier"):
        places = (position.get("kinds") or {}).get(kind) or {}
        dots = (pixels.get("kinds") or {}).get(kind) or {}
        if places.get("accuracy") or dots.get("l2"):
            accuracy, distance = places.get("accuracy"), places.get("distance")
            cells = [between(accuracy, percent), between(distance), between(dots.get("l2")), between(dots.get("r2"))]
            rows.append([f"{kind} patches", *cells])
        remarks |= {one["note"]: None for one in (places, dots) if one.get("note")}
    if rows and "chance_accuracy" in position:
        rows.append(["guessing", percent(position["chance_accuracy"]), number(position["chance_distance"]), "–", "–"])
    if rows:
        head = ["", "position found", "distance, in patches", "pixel error (L2)", "pixel variance explained"]
        parts.append(table(head, rows, "Local probes; pixels between 0 and 1; intervals at 95 %"))
    return [*parts, *(note(remark) for remark in remarks)]


def _class_probe(found: Values) -> list[Html]:
    if "kinds" not in found:
        return [note(found.get("note"))]
    rows, remarks, majority = [], [], None
    for name, one in found["kinds"].items():
        if one["accuracy"] is None:
            remarks.append(one["note"])
            continue
        accuracy = one["accuracy"]
        majority = one["majority"]
        rows.append(Bar(name, accuracy["mean"], accuracy["low"], accuracy["high"], percent(accuracy["mean"])))
    parts: list[Html] = [note(remark) for remark in dict.fromkeys(remarks)]
    if rows:
        label = "Accuracy from one token: " + ", ".join(f"{row.name} {row.words}" for row in rows)
        chart = bars(rows, label, None if majority is None else (majority, f"commonest class {percent(majority)}"))
        words = f"Share of test pictures whose class (of {found['classes']}) one token tells; lines are 95 % intervals."
        parts.insert(0, figure(chart, words))
    return parts


def discovery_part(pictures: Sequence[Shown], found: Values) -> list[Html]:
    """Show boxes, and how often they are right."""
    parts = [
        tag(
            "p",
            "LOST and TokenCut read one object out of a picture's patch features alone, without any training. "
            "Artifacts mislead them. Which features of the last layer suit a model depends on its training: keys for "
            "DINO and DINOv2, values for DeiT-III and OpenCLIP. Both are tried.",
        ),
        note(found.get("note")),
    ]
    rows: list[list[Any]] = []
    remarks: dict[str, None] = {}
    for feature in ("keys", "values"):
        some, notes = _discovery_rows(found.get(feature) or {}, feature)
        rows += some
        remarks |= notes
    if rows and found.get("whole_picture"):
        whole = found["whole_picture"]
        rows.append(
            ["the whole picture as box", between(whole, percent, "share"), f"{whole['hits']} of {whole['pictures']}"]
        )
    if rows:
        head = ["method", "right", "pictures"]
        parts.append(
            table(
                head,
                rows,
                "CorLoc: boxes that overlap a true one by half or more (IoU ≥ 0.5). The last row finds nothing",
            )
        )
    parts += [note(remark) for remark in remarks]
    drawn = []
    for one in pictures:
        marks = {f"truth {place}": box for place, box in enumerate(one.truth)} | dict(one.boxes)
        if one.boxes and one.image is not None:
            drawn.append(figure(photo_panel(one, f"Boxes found in {title(one)}", box_marks(one, marks)), title(one)))
    if drawn:
        keys = [key(f"k-{style}", f"{name} on keys") for style, name in NAMES.items()]
        truth = any(one.truth for one in pictures)
        parts.append(tag("p", keys, key("k-truth", "true box") if truth else None, class_="soft"))
        parts.append(tag("div", drawn, class_="pictures small"))
    return parts


def _discovery_rows(found: Values, feature: str) -> tuple[list[list[Any]], dict[str, None]]:
    """Give how often each method was right with one kind of features, and what there is to remark."""
    scores: dict[str, Values] = {}
    remarks: dict[str, None] = {}
    for method, name in NAMES.items():
        one = found.get(method) or {}
        if one.get("corloc") and one["corloc"]["share"] is not None:
            scores[f"{name} on {feature}"] = one["corloc"]
        elif one.get("note"):
            remarks[f"{'' if 'no true boxes' in one['note'] else f'{name} on {feature}: '}{one['note']}"] = None
    sweep = found.get("lost_sweep") or {}
    if sweep.get("best_of_sweep"):
        scores[f"LOST on {feature}, bias chosen on other pictures"] = sweep["held_out"]
        scores[f"LOST on {feature}, best bias (an upper bound)"] = sweep["best_of_sweep"]
    rows = [
        [name, between(score, percent, "share"), f"{score['hits']} of {score['pictures']}"]
        for name, score in scores.items()
    ]
    return rows, remarks
