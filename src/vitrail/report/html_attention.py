"""The page's part about attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.report.charts import Bar, bars
from vitrail.report.html_closer import closer_parts
from vitrail.report.html_pictures import photo_panel, strip, title, weight_panel
from vitrail.report.markup import Html, figure, note, table, tag
from vitrail.report.shown import Shown
from vitrail.report.words import count, number, percent

Values = Mapping[str, Any]
SMALL = 4
"""Pictures whose attention is drawn token by token."""


def attention_part(pictures: Sequence[Shown], found: Values) -> list[Html]:
    """Show what each role attends to."""
    parts = [
        tag(
            "p",
            "In each layer every token gathers information from all tokens, by weights that sum to one: its attention. "
            "Unless said otherwise this is the last layer, the mean over heads.",
        ),
        note(found.get("note")),
    ]
    parts += _attention_maps([one for one in pictures if one.attention])
    parts += closer_parts(pictures, found)
    if "mass" not in found:
        return parts
    mass = found["mass"]
    rows = [
        [f"{who} gives", *(percent(share) for share in row)]
        for who, row in zip(mass["queries"], mass["mass"], strict=True)
    ]
    rows.append(["even attention would give", *(percent(share) for share in mass["fair"])])
    parts.append(tag("h3", "From role to role"))
    caption = (
        f"Attention by role, {count(found['pictures'], 'picture')} (patches: {found['patch_rows']} of each picture)"
    )
    parts.append(table(["", *(f"to {name}" for name in mass["keys"])], rows, caption))
    if found.get("on_outliers"):
        parts.append(_outlier_bars(found["on_outliers"]))
    parts += _spread_tables(found)
    return parts


def _attention_maps(pictures: Sequence[Shown]) -> list[Html]:
    """Draw a map of each special token: beside each picture where there is one, in rows where there are several."""
    if not pictures:
        return []
    words = "Each map runs from nothing (dark) to its own largest weight (bright); an even map is bright all over."
    parts = [tag("h3", "Maps of the special tokens"), tag("p", words, class_="soft")]
    rows = []
    for one in pictures:
        panels = [(photo_panel(one, title(one)), one.name)]
        for name, weights in one.attention.items():
            panels.append((weight_panel(one, weights, f"Attention of {name}, {one.name}"), name))
        rows.append(panels)
    if all(len(panels) == 2 for panels in rows):
        pairs = [
            figure(tag("div", [panel for panel, _ in panels], class_="panels"), f"{panels[0][1]}: {panels[1][1]} token")
            for panels in rows
        ]
        return [*parts, tag("div", pairs, class_="pictures")]
    return [*parts, *(strip(panels) for panels in rows[:SMALL])]


def _outlier_bars(found: Values) -> Html:
    rows = [Bar(name, share, None, None, percent(share)) for name, share in found["mass"].items()]
    label = "Share of attention that goes to outliers: " + ", ".join(f"{row.name} {row.words}" for row in rows)
    chart = bars(rows, label, (found["fair"], f"fair share {percent(found['fair'])}"))
    words = (
        f"How much of each token's attention goes to outlier patches, in the {count(found['pictures'], 'picture')} "
        "that have some. The dashed line is their share among all tokens."
    )
    return figure(chart, words)


def _spread_tables(found: Values) -> list[Html]:
    parts: list[Html] = []
    if "spread" in found:
        spread = found["spread"]
        rows = [
            [name, number(wide), number(bits)]
            for name, wide, bits in zip(found["tokens"], spread["effective"], spread["entropy"], strict=True)
        ]
        head = ["token", f"patches looked at (of {spread['patches']})", "entropy, bits"]
        parts += [tag("h3", "How widely they look"), table(head, rows, "An even map over n patches counts as n")]
    if "overlap" in found:
        cosine = found["overlap"]["cosine"]
        rows = [[name, *(number(one) for one in row)] for name, row in zip(found["tokens"], cosine, strict=True)]
        parts.append(tag("h3", "Do they look at the same?"))
        parts.append(
            table(["", *found["tokens"]], rows, "Similarity of maps (cosine): 1 the same, 0 nothing in common")
        )
    return parts
