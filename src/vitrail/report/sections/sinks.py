"""Attention sinks by layer: tokens that take much of a head's attention, and of which kind they are."""

from __future__ import annotations

from typing import Any

from vitrail.analysis.sinks import BROADCAST, NO_OP, SINK, HeadSinks, count_sinks, find_sinks
from vitrail.report.collect import run_hooked
from vitrail.report.context import Context, spread_evenly
from vitrail.report.page.blocks import Beside, Block, Details, Figure, Key, Table, Text
from vitrail.report.page.charts import Line, over_layers
from vitrail.report.page.formatting import count, number, percent
from vitrail.report.report import Report
from vitrail.report.sections.base import Section, Values
from vitrail.surgery.hooks import watch

IMAGES = 16
"""Images that are run again for the attention and the values of all layers."""


def compute(context: Context) -> Values:
    """Count the sinks of each layer, in a second pass over a few images."""
    images = spread_evenly(context.featured, IMAGES)
    hooks = watch(context.model, ("v", "attention"), None, context.queries)
    found: dict[int, list[HeadSinks]] = {}
    for batch in context.second_pass(images, 1).batches():
        (recorded,) = run_hooked(context.model, batch.images, hooks)
        for layer, rows in recorded.attention.items():
            found.setdefault(layer, []).append(find_sinks(rows.float(), recorded.v[layer].float()))
    layers = {layer: count_sinks(some, context.layout) for layer, some in found.items()}
    return {
        "images": len(images),
        "per_layer": [
            {"layer": layer, "share": sinks.share, **sinks.to_dict()} for layer, sinks in sorted(layers.items())
        ],
    }


def conclude(report: Report) -> str:
    """Return how many heads have a sink, and of which kind."""
    layers = _layers(report)
    heads = sum(one["heads"] for one in layers)
    share = {kind: sum(one[kind] for one in layers) / heads for kind in ("no_op", "broadcast", "other")}
    roles: dict[str, int] = {}
    for one in layers:
        for role, many in one["roles"].items():
            roles[role] = roles.get(role, 0) + many
    where = max(roles, key=lambda role: roles[role])
    some = sum(one["share"] > 0 for one in layers)
    return (
        f"{percent(sum(share.values()))} of the heads have a sink, in {some} of {count(len(layers), 'layer')}; "
        f"{percent(roles[where] / sum(roles.values()))} of these sinks are {where} tokens. "
        f"{percent(share['no_op'])} of the heads have a no-op sink, {percent(share['broadcast'])} a broadcast sink."
    )


def render(report: Report) -> list[Block]:
    """Show the share of heads with a sink by layer, unless there is none."""
    layers = _layers(report)
    if not any(one["share"] for one in layers):
        return []
    numbers = [one["layer"] for one in layers]

    def shares(kind: str) -> list[float | None]:
        return [100 * one[kind] / one["heads"] for one in layers]

    highest = max(layers, key=lambda one: one["share"])
    label = (
        f"Share of heads with a sink by layer: at most {percent(highest['share'])}, in layer {highest['layer']}; "
        f"no-op {percent(highest['no_op'] / highest['heads'])} and broadcast "
        f"{percent(highest['broadcast'] / highest['heads'])} there."
    )
    lines = [Line("s0", shares("no_op")), Line("s1", shares("broadcast")), Line("s2 thin", shares("other"))]
    chart = over_layers(numbers, lines, label, "heads, %", log=False)
    keys = [Key("s0", "no-op"), Key("s1", "broadcast"), Key("s2", "neither")]
    caption = f"Heads with a sink, {count(report.sinks['images'], report.noun)}, each head of each counted once."
    rows = [
        [
            one["layer"],
            percent(one["share"]),
            *(percent(one[kind] / one["heads"]) for kind in ("no_op", "broadcast", "other")),
            number(one["value_norm"]),
            percent(one["rank_one"]),
            ", ".join(f"{role} {percent(many / sum(one['roles'].values()))}" for role, many in one["roles"].items()),
        ]
        for one in layers
    ]
    head = ["layer", "heads with a sink", "no-op", "broadcast", "neither", "‖v‖ of the sink", "rank one", "token"]
    note = "‖v‖ relative to the median of the other tokens in the head; both columns are medians over sinks"
    return [
        Beside([Figure([chart], caption, keys)], [Text(text, "soft") for text in EXPLANATION]),
        Details("All layers in numbers", [Table(head, rows, note)]),
    ]


def _layers(report: Report) -> list[dict[str, Any]]:
    return report.sinks.get("per_layer") or []


EXPLANATION = (
    f"A sink is a token that takes {100 * SINK:g} % or more of a head's attention, as a mean over special tokens and "
    "some patches. Sinks are no artifacts by themselves: high-norm tokens are one kind of token that heads use so.",
    f"No-op: the value of the sink is near zero (at most {NO_OP:g} of the median ‖v‖), so a head that attends to it "
    "adds almost nothing. Heads do so when they have nothing to add.",
    f"Broadcast: the value is not small and {100 * BROADCAST:g} % or more of the head's output lies in one direction, "
    "so every token reads the same: the head shares information about the whole image.",
)
ABSENT = f"no head gives {100 * SINK:g} % or more of its attention to one token"
SECTION = Section(
    "sinks", "Attention sinks", "Sinks", "", render, compute, "sinks", conclude=conclude, absent=lambda report: ABSENT
)
