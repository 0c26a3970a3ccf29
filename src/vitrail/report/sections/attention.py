"""Attention: role to role and to outliers in the last layer; maps of special tokens by layer, by head, and by rollout.

Rollout needs the attention of every token in every layer. It is accumulated while the model runs, so that the attention
of one layer and one image is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.analysis.attention import Rollout, alike_maps, map_quality, overlap, role_mass, spread, token_maps
from vitrail.report.collect import run_hooked
from vitrail.report.context import Context, spread_evenly
from vitrail.report.page.blocks import Beside, Block, Columns, Details, Figure, Heading, Note, Strip, Svg, Table, Text
from vitrail.report.page.charts import Bar, bars
from vitrail.report.page.formatting import count, number, percent
from vitrail.report.page.images import photo_panel, weight_panel
from vitrail.report.report import Report, ShownImage
from vitrail.report.sections.base import Section, Values, attempt
from vitrail.runtime.checks import merged_trunk
from vitrail.surgery.hooks import watch
from vitrail.tokens import TokenLayout

MAX_TOKENS = 9
"""Special tokens whose attention is drawn."""

CLOSER_IMAGES, CLOSER_LAYERS = 3, 6
"""Images and layers that are drawn layer by layer; the first and the last layer are among them."""

ROLLOUT_BYTES = 2**31
"""Most memory that the attention of one layer may take for rollout."""

MORE = 1.1
"""Multiple of their share of the attention from which on tokens get more than that."""

STRIP_IMAGES, HEAD_IMAGES = 4, 1
"""Images that are drawn token by token, and head by head: 12 heads of 5 tokens are 60 maps."""


def compute(context: Context) -> Values:
    """Compute attention by role in the last layer, its spread, the share of outliers, and maps."""
    rows, layout = context.attention, context.layout
    special = len([token for token in context.queries if token < layout.num_special])
    values: Values = {
        "images": len(rows),
        "tokens": list(context.special_names),
        "patch_rows": len(context.queries) - special,
        "mass": role_mass(rows, layout, queries=context.queries).to_dict(),
        "on_outliers": _on_outliers(context, special),
    }
    if not special:
        return {**values, "note": "the model has no class or register token; this is the attention of some patches"}
    maps = token_maps(rows[:, :, :special], layout)
    values["spread"] = spread(maps).to_dict()
    values["quality"] = map_quality(maps, _object_share(context)).to_dict()
    if special > 1:
        values["overlap"] = overlap(maps).to_dict()
    place = {image.index: row for row, image in enumerate(context.featured)}
    for one in context.shown:
        drawn = maps[place[one.index], :, :MAX_TOKENS].mean(0).flatten(-3, -2)
        one.maps["attention"] = dict(zip(context.special_names, drawn, strict=False))
    values["closer"] = attempt(lambda: _closer(context))
    return values


def _object_share(context: Context) -> Tensor | None:
    """Return the object's share of each patch (B, P) of the featured images; None if no image has a mask."""
    shares = [image.foreground for image in context.featured]
    if all(share is None for share in shares):
        return None
    unknown = torch.full((context.layout.num_patches,), torch.nan)
    return torch.stack([unknown if share is None else share for share in shares])


def _on_outliers(context: Context, special: int) -> Values | None:
    """Return the share of attention that outliers get from each special token and from patches, and a fair share."""
    outliers = context.outliers(context.featured)
    has_some = outliers.any(1)
    if not has_some.any():
        return None
    rows = context.attention[has_some][..., context.layout.patches].float()
    mass = (rows * outliers[has_some][:, None, None].float()).sum(-1).mean(1).double()  # (B, Q)
    shares = {name: float(mass[:, place].mean()) for place, name in enumerate(context.special_names)}
    if mass.shape[1] > special:
        shares["patch"] = float(mass[:, special:].mean())
    fair = float(outliers[has_some].double().sum(1).mean()) / context.layout.num_tokens
    return {"images": int(has_some.sum()), "mass": shares, "fair": fair}


class CloserMaps(NamedTuple):
    """Attention maps of S special tokens of one image; each sums to one.

    Maps of some layers (S, h, w) are means over heads, those of heads (H, S, h, w) are of the last layer. Rollout
    (S, h, w) is the share of each input patch in a token after all layers; None if not computed.
    """

    layers: dict[int, Tensor]
    heads: Tensor
    rollout: Tensor | None


def drawn_layers(depth: int, most: int = CLOSER_LAYERS) -> tuple[int, ...]:
    """Return layers evenly spread from the first to the last.

    >>> drawn_layers(12), drawn_layers(4)
    ((0, 2, 4, 7, 9, 11), (0, 1, 2, 3))
    """
    most = min(depth, most)
    return tuple(round(place * (depth - 1) / max(most - 1, 1)) for place in range(most))


def _closer(context: Context) -> Values:
    """Compute maps layer by layer for a few of the shown images, in a second pass."""
    layers = drawn_layers(len(find(context.model).blocks))
    values: Values = {"layers": list(layers), "rollout": False}
    size = 4 * context.attention.shape[1] * context.layout.num_tokens**2
    if merged_trunk(context.model) is not None:
        values["note"] = "rollout follows single tokens, and those of this model are merged"
    elif size > ROLLOUT_BYTES:
        values["note"] = f"no rollout: the attention of one layer and one image would take {size / 2**30:.1f} GiB"
    else:
        values["rollout"] = True
    found: dict[int, CloserMaps] = {}
    for batch in context.second_pass(spread_evenly(context.chosen, CLOSER_IMAGES), 1).batches():
        for index, image in zip(batch.indices, batch.images, strict=True):
            found[index] = _closer_maps(context.model, image.unsqueeze(0), context.layout, layers, values["rollout"])
    for one in context.shown:
        if one.index in found:
            one.maps["closer"] = found[one.index]
    return {"images": sorted(found), **values}


@torch.no_grad()
def _closer_maps(
    model: nn.Module, image: Tensor, layout: TokenLayout, layers: Sequence[int], with_rollout: bool
) -> CloserMaps:
    special, rollout = layout.num_special, Rollout()

    def keep(rows: Tensor) -> Tensor:
        if with_rollout:
            rollout.add(rows)
        return rows[:, :, :special].float().cpu()

    queries = range(layout.num_tokens if with_rollout else special)
    hooks = watch(model, ("attention",), None if with_rollout else list(layers), queries, keep)
    (recorded,) = run_hooked(model, image, hooks)
    rows = recorded.by_layer["attention"]

    def maps(layer_rows: Tensor) -> Tensor:
        return token_maps(layer_rows, layout)[0].flatten(-3, -2)

    return CloserMaps(
        {layer: maps(rows[layer]).mean(0) for layer in layers},
        maps(rows[layers[-1]]),
        maps(rollout.result[:, None, :special])[0].cpu() if with_rollout else None,
    )


def conclude(report: Report) -> str:
    """Return how much of the attention high-norm tokens get, or how widely special tokens attend."""
    values = report.attention
    found = values.get("on_outliers")
    if found:
        name, share = max(found["mass"].items(), key=lambda item: item[1])
        much = f"up to {number(share / found['fair'])} times" if share > MORE * found["fair"] else "no more than"
        return (
            f"High-norm tokens get {much} their share of the attention: {percent(share)} of that of {name} tokens, "
            f"and {percent(found['fair'])} of the tokens are such."
        )
    if "spread" not in values:
        return ""
    name, patches = values["tokens"][0], values["spread"]["effective"][0]
    return f"The {name} token attends to about {number(patches)} of {values['spread']['patches']} patches."


def render(report: Report) -> list[Block]:
    """Show maps, then numbers."""
    values = report.attention
    return [
        *_map_blocks([one for one in report.images if one.maps.get("attention")]),
        *_closer_blocks(report.images, values),
        *(_number_blocks(values, report.noun) if "mass" in values else ()),
    ]


def _map_blocks(images: Sequence[ShownImage]) -> list[Block]:
    """Draw a map of each special token: beside the image if there is one token, as strips if there are several."""
    if not images:
        return []
    text = (
        "Each map runs from zero (dark) to its own largest weight (bright); a uniform map is bright all over. Tokens "
        "with maps alike (cosine 0.98 or more) share one."
    )
    blocks: list[Block] = [Heading("Maps of the special tokens"), Text(text, "soft")]
    rows: list[list[tuple[Svg, str]]] = []
    for one in images:
        panels = [
            (_weight_panel(one, one.maps["attention"][name], name, "last layer"), _with_alike(name, alike))
            for name, alike in alike_maps(one.maps["attention"]).items()
        ]
        rows.append([(photo_panel(one, one.title), one.name), *panels])
    if any(len(panels) > 2 for panels in rows):
        return [*blocks, *(Strip(panels) for panels in rows[:STRIP_IMAGES])]
    figures = [Figure([photo, drawn], f"{name}: {token}") for (photo, name), (drawn, token) in rows]
    return [*blocks, Columns(figures, "images")]


def _closer_blocks(images: Sequence[ShownImage], values: Values) -> list[Block]:
    closer = values.get("closer")
    if closer is None:
        return []
    blocks: list[Block] = [Heading("Layer by layer, and rollout"), Note(closer.get("note"))]
    chosen = [one for one in images if "closer" in one.maps]
    if not chosen:
        return blocks
    text = "The mean over heads in some layers, from the first to the last."
    if closer["rollout"]:
        text += (
            " Rollout follows attention back through all layers, each with half of its weight on the token itself: it "
            "shows which input patches a token is made of in the end."
        )
    blocks.append(Text(text + " Artifacts appear as single bright spots that stay in place.", "soft"))
    heads: list[Block] = []
    for order, one in enumerate(chosen):
        maps: CloserMaps = one.maps["closer"]
        names = list(values["tokens"][:MAX_TOKENS])
        every = torch.stack([weights[: len(names)] for weights in maps.layers.values()], 1)
        for name, alike in alike_maps(dict(zip(names, every, strict=True))).items():
            place = names.index(name)
            layers = {f"layer {layer}": weights[place] for layer, weights in maps.layers.items()}
            rollout = {} if maps.rollout is None else {"rollout": maps.rollout[place]}
            blocks.append(_strip(one, name, layers | rollout, alike))
            if order < HEAD_IMAGES:
                by_head = {f"head {head}": weights[place] for head, weights in enumerate(maps.heads)}
                heads.append(_strip(one, name, by_head, alike, photo=False))
    return [*blocks, Details("Each head of the last layer", heads)]


def _with_alike(name: str, alike: Mapping[str, float]) -> str:
    """Return the name of a token, and the tokens whose maps are alike, with the least cosine."""
    if not alike:
        return name
    return f"{name} ({', '.join(alike)} alike: cosine {number(min(alike.values()))} or more)"


def _weight_panel(one: ShownImage, weights: Any, name: str, what: str) -> Svg:
    """Draw a map, with a label that says where its largest weight is."""
    values = torch.as_tensor(weights).flatten()
    row, column = divmod(int(values.argmax()), one.grid[1])
    share = percent(float(values.max() / values.sum().clamp(min=1e-12)))
    label = f"Attention of {name}, {what}, {one.name}: most on row {row}, column {column} ({share} of the patches')"
    return weight_panel(one, weights, label)


def _strip(
    one: ShownImage, name: str, maps: Mapping[str, Any], alike: Mapping[str, float], photo: bool = True
) -> Strip:
    """Draw maps of one token, each with what it shows, after the image."""
    panels = [(photo_panel(one, one.title), "the image")] if photo else []
    for what, weights in maps.items():
        panels.append((_weight_panel(one, weights, name, what), what))
    return Strip(panels, f"{_with_alike(f'{name} token', alike)}, {one.title}")


def _number_blocks(values: Values, noun: str) -> list[Block]:
    mass = values["mass"]
    rows = [[f"from {who}", *map(percent, row)] for who, row in zip(mass["queries"], mass["mass"], strict=True)]
    rows.append(["uniform attention", *map(percent, mass["fair"])])
    caption = f"Attention by role, {count(values['images'], noun)} ({values['patch_rows']} patches of each)"
    head = ["", *(f"to {name}" for name in mass["keys"])]
    tables: list[Sequence[Block]] = [[Heading("Between roles"), Table(head, rows, caption)]]
    if values.get("on_outliers"):
        tables.append([Heading("On high-norm tokens"), _outlier_bars(values["on_outliers"], noun)])
    if "spread" in values:
        found = values["spread"]
        rows = [
            [name, number(patches), number(bits)]
            for name, patches, bits in zip(values["tokens"], found["effective"], found["entropy"], strict=True)
        ]
        head = ["token", f"patches attended to (of {found['patches']})", "entropy, bits"]
        tables.append([Heading("Spread"), Table(head, rows, "A uniform map over n patches counts as n")])
    if "quality" in values:
        tables.append([Heading("On the object, and on spots"), _quality_table(values, noun)])
    if "overlap" in values:
        cosines = zip(values["tokens"], values["overlap"]["cosine"], strict=True)
        rows = [[name, *map(number, row)] for name, row in cosines]
        caption = "Similarity of maps (cosine): 1 is the same, 0 is nothing in common"
        tables.append([Heading("Overlap between tokens"), Table(["", *values["tokens"]], rows, caption)])
    return [Beside(left, right) for left, right in zip_longest(tables[::2], tables[1::2], fillvalue=())]


def _quality_table(values: Values, noun: str) -> Table:
    found = values["quality"]
    spots = zip(values["tokens"], found["spikes"], found["on_spikes"], strict=True)
    rows = [[name, number(spikes), percent(share)] for name, spikes, share in spots]
    head = ["token", "spikes in a map", "attention on them"]
    caption = "Spikes: single patches with five times the median attention, and that of their neighborhood"
    if found["on_object"] is not None:
        head += ["attention on the object", "strongest patch on it"]
        for row, share, hit in zip(rows, found["on_object"], found["patch_hit"], strict=True):
            row += [percent(share), f"{percent(hit)} of {noun}s"]
        rows.append(["uniform attention", "0", "0 %", percent(found["fair"]), ""])
        caption += f". Objects of {count(found['object_images'], noun)}"
    return Table(head, rows, caption)


def _outlier_bars(values: Values, noun: str) -> Figure:
    rows = [Bar(name, share, percent(share)) for name, share in values["mass"].items()]
    label = "Share of attention on high-norm tokens: " + ", ".join(f"{row.name} {row.text}" for row in rows)
    chart = bars(rows, label, (values["fair"], f"fair share {percent(values['fair'])}"))
    caption = (
        f"Share of each token's attention on high-norm tokens, in the {count(values['images'], noun)} that have "
        "some. The dashed line is their share of all tokens."
    )
    return Figure([chart], caption)


INTRO = (
    "In each layer every token reads from all tokens, with weights that sum to one: its attention. Unless "
    "stated otherwise this is the last layer, averaged over heads."
)
SECTION = Section("attention", "Attention", "Attention", INTRO, render, compute, "attention", conclude=conclude)
