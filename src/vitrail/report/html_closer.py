"""The page's part about attention layer by layer, rollout, and single heads, of a few pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.report.html_pictures import photo_panel, strip, title, weight_panel
from vitrail.report.markup import Html, note, tag
from vitrail.report.shown import MOST_TOKENS, Shown

HEADS = 1
"""Pictures whose heads are drawn one by one: 12 heads of 5 tokens are 60 maps."""


def closer_parts(pictures: Sequence[Shown], found: Mapping[str, Any]) -> list[Html]:
    """Show what each special token looks at in some layers, and what it holds after all of them."""
    section = found.get("closer")
    if section is None:
        return []
    parts = [tag("h3", "Layer by layer, and rollout"), note(section.get("note"))]
    chosen = [one for one in pictures if one.closer is not None]
    if not chosen:
        return parts
    names = list(found.get("tokens") or [])[:MOST_TOKENS]
    words = "The mean over heads in some layers, from the first to the last."
    if section["rollout"]:
        words += (
            " Rollout follows attention back through all layers, each with half of its weight on the token itself: "
            "which input patches a token is made of in the end."
        )
    parts.append(tag("p", words, " Artifacts show as single bright spots that stay in place."))
    for one in chosen:
        parts += [_token_strip(one, place, name) for place, name in enumerate(names)]
    heads = [
        tag("div", tag("h4", f"{name} token, {title(one)}"), _head_strip(one, place, name), class_="token")
        for one in chosen[:HEADS]
        for place, name in enumerate(names)
    ]
    return [*parts, tag("details", tag("summary", "Each head of the last layer"), heads)]


def _token_strip(one: Shown, place: int, name: str) -> Html:
    """Draw the maps of one token: layers, then rollout; the photograph stands before the first token's."""
    assert one.closer is not None
    panels = [(photo_panel(one, title(one)), "the picture")]
    for layer, maps in one.closer.layers.items():
        label = f"Attention of {name} in layer {layer}, {one.name}"
        panels.append((weight_panel(one, maps[place], label), f"layer {layer}"))
    if one.closer.rollout is not None:
        label = f"Rollout of {name}, {one.name}"
        panels.append((weight_panel(one, one.closer.rollout[place], label), "rollout"))
    return tag("div", tag("h4", f"{name} token, {title(one)}"), strip(panels), class_="token")


def _head_strip(one: Shown, place: int, name: str) -> Html:
    assert one.closer is not None
    panels = [
        (weight_panel(one, head[place], f"Attention of {name}, head {number}, {one.name}"), f"head {number}")
        for number, head in enumerate(one.closer.heads)
    ]
    return strip(panels)
