"""The page's part about the cure: what test-time registers do to the artifacts, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.report.compare import look_up
from vitrail.report.html_pictures import (
    map_panel,
    norm_map,
    norm_scale,
    outlier_marks,
    photo_panel,
    ramp,
    strip,
    title,
    weight_panel,
)
from vitrail.report.markup import Html, note, table, tag
from vitrail.report.shown import Shown
from vitrail.report.words import count, cure_words, number, percent

Values = Mapping[str, Any]
PICTURES = 4
"""Pictures that are shown before and after: those with the most artifacts."""


def cure_part(pictures: Sequence[Shown], found: Values) -> list[Html]:
    """Show artifacts before and after, beside the control."""
    words = tag(
        "p",
        "Test-time registers need no training: the neurons that fire where artifacts are write onto an extra token "
        "instead, which is taken away at the end. As many random neurons of the same layers are the control: they "
        "should change nothing.",
    )
    if "effect" not in found:
        return [words, note(found.get("note"))]
    layers = ", ".join(f"layer {layer}: {count(len(some), 'neuron')}" for layer, some in found["neurons"].items())
    return [
        words,
        tag("p", tag("strong", cure_words(found))),
        _table(found),
        tag("p", f"Moved were {count(found['num_neurons'], 'neuron')} ({layers}).", class_="soft"),
        *_pictures(pictures, found),
    ]


def _table(found: Values) -> Html:
    states = [found["before"], found["after"], found["control"]]

    def row(name: str, write: Any, *keys: str) -> list[Any]:
        return [name, *(write(look_up(state, keys)) for state in states)]

    rows = [
        row(f"tokens above {number(found['threshold'])}", percent, "outlier_share"),
        row("pictures with such tokens", number, "pictures_with_outliers"),
        row("verdict", lambda value: value or "–", "verdict"),
        row("largest norm", number, "largest"),
        row("median norm", number, "typical"),
    ]
    for name in found["before"]["on_places"]:
        rows.append(row(f"attention of {name} on those places", percent, "on_places", name))
    for name in found["after"]["similarity"]:
        who = "other patch tokens" if name == "normal" else f"{name} token"
        rows.append(row(f"{who}: cosine with before", number, "similarity", name))
    caption = f"The same {count(found['pictures'], 'picture')} without and with test-time registers"
    return table(["", "before", "with registers", "with random neurons"], rows, caption)


def _pictures(pictures: Sequence[Shown], found: Values) -> list[Html]:
    chosen = sorted((one for one in pictures if one.cured is not None), key=lambda one: -len(one.outliers))[:PICTURES]
    if not chosen:
        return []
    low, high = norm_scale(chosen)
    parts = [ramp(number(low), number(high), "norm")]
    for one in chosen:
        assert one.cured is not None
        after = [place for place, norm in enumerate(one.cured) if norm > found["threshold"]]
        panels: list[tuple[Html, Any]] = [(photo_panel(one, title(one)), title(one))] if one.image is not None else []
        for when, norms, marked in (("before", one.norms, one.outliers), ("after", one.cured, after)):
            label = f"Norms of the patch tokens of {one.name}, {when}: {count(len(marked), 'outlier')}"
            panel = map_panel(one, norm_map(one, low, high, norms), label, outlier_marks(one, marked))
            panels.append((panel, f"norms {when}: {count(len(marked), 'outlier')}"))
        name = _token(one)
        for when, maps in (("before", one.attention), ("after", one.cured_attention)):
            if name in maps:
                label = f"Attention of {name}, {one.name}, {when}"
                panels.append((weight_panel(one, maps[name], label), f"attention of {name} {when}"))
        parts.append(strip(panels))
    return parts


def _token(one: Shown) -> str:
    """Name the token whose attention is shown: the class token, or else the first one."""
    return next((name for name in one.attention if name.startswith("class")), next(iter(one.attention), ""))
