"""The page of a report: the verdict first, then what it rests on, then what else is known, then what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitrail.report.charts import Bars, Line, histogram, over_layers
from vitrail.report.html_analyses import (
    discovery_part,
    pca_part,
    places_part,
    probes_part,
    registers_part,
)
from vitrail.report.html_attention import attention_part
from vitrail.report.html_cure import cure_part
from vitrail.report.html_pictures import norm_part, photos
from vitrail.report.markup import Html, figure, key, note, table, tag
from vitrail.report.style import STYLE
from vitrail.report.words import advice, confidence, count, cure_words, meaning, number, percent

if TYPE_CHECKING:
    from vitrail.report.report import Report

Values = Mapping[str, Any]
BADGES = {"artifacts": "▲ artifact tokens found", "none": "✓ no artifact tokens", "uncertain": "? uncertain"}


def page(title: str, parts: Sequence[Any]) -> str:
    """Put a whole page together."""
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        # Nothing may be fetched, even if a name ever became markup.
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; img-src data:; style-src 'unsafe-inline'",
        ),
        tag("title", title),
        tag("style", Html(STYLE)),
    ]
    body = tag("body", tag("main", list(parts)))
    return f"<!doctype html>\n{tag('html', tag('head', head), body, lang='en')}\n"


def section(key: str, title: str, *parts: Any) -> Html:
    """Make one part of a page, with a heading that links can lead to."""
    return tag("section", tag("h2", title), *parts, id=key)


def report_page(report: Report) -> str:
    """Give a report as a page."""
    values = report.to_dict()
    norms = values["norms"]
    links = [
        ("pictures", "Pictures"),
        ("norms", "Norms"),
        ("layers", "Layers"),
        ("places", "Places"),
        ("attention", "Attention"),
        ("components", "Components"),
        ("probes", "Probes"),
        ("objects", "Objects"),
        ("cure", "Cure"),
        ("next", "What to do"),
        ("how", "How it was measured"),
    ]
    parts = [
        photos(report.pictures),
        _header(values),
        tag("nav", [tag("a", words, href=f"#{key}") for key, words in links], aria_label="Parts of this report"),
        section("pictures", "Where the long tokens are", norm_part(report.pictures, norms)),
        section("norms", "How long the tokens are", _histogram_part(norms)),
        section("layers", "Since which layer", _layers_part(norms)),
        section("places", "What kind of place", places_part(values["redundancy"])),
        section("attention", "What the tokens look at", attention_part(report.pictures, values["attention"])),
        section("registers", "Each register by itself", registers_part(values["registers"])),
        section("components", "What the patch tokens show", pca_part(report.pictures, values["pca"])),
        section("probes", "What the tokens know", probes_part(values["probes"])),
        section("objects", "Objects found without labels", discovery_part(report.pictures, values["discovery"])),
        section("cure", "Does the cure work here?", cure_part(report.pictures, values["cure"])),
        section("next", "What to do next", tag("ul", [tag("li", _with_code(words)) for words in advice(values)])),
        section("how", "How it was measured", _measured(values)),
        section("problems", "Problems", _problems(values)),
    ]
    return page(f"{values['model']['name']}: artifact tokens", parts)


def _with_code(words: str) -> list[Any]:
    """Set a call that is named in a sentence in its own letters."""
    before, call, after = re.match(r"(.*?)(vitrail\.\w+\([^)]*\)|$)(.*)", words, re.DOTALL).groups()  # type: ignore[union-attr]
    return [before, tag("code", call) if call else None, after]


def _header(values: Values) -> Html:
    norms = values["norms"]
    tiles = [
        ("tokens above the line", percent(norms["outlier_share"]) if norms["threshold"] is not None else "none"),
        ("threshold (norm)", number(norms["threshold"])),
        ("typical norm", number(norms["typical"])),
        ("since layer", "–" if norms["onset"] is None else norms["onset"]),
        ("pictures", f"{values['data']['pictures']:,}"),
    ]
    found = norms["verdict"]
    return tag(
        "header",
        tag("h1", "Does ", tag("code", values["model"]["name"]), " have artifact tokens?"),
        tag("p", tag("span", BADGES[found], class_=f"badge {found}")),
        tag("p", values["verdict"], class_="answer"),
        tag("p", confidence(norms)),
        tag("p", cure_words(values["cure"])) if "effect" in values["cure"] else None,
        _alarms(values),
        tag("p", meaning(norms), class_="soft"),
        tag("dl", [tag("div", tag("dt", words), tag("dd", value)) for words, value in tiles], class_="tiles"),
    )


def _alarms(values: Values) -> Html:
    problems, data = values["problems"], values["data"]
    found = []
    if problems["num_not_finite_tokens"]:
        found.append(
            f"{count(problems['num_not_finite_tokens'], 'token')} (over all layers) in "
            f"{count(problems['num_not_finite_pictures'], 'picture')} had numbers that are not finite; they are not in "
            "any average."
        )
    if problems["num_skipped"]:
        found.append(f"{count(problems['num_skipped'], 'picture')} could not be read and were left out.")
    if data["pictures"] < 20:
        found.append(f"Only {count(data['pictures'], 'picture')}: treat every number below as a first impression.")
    return note([[words, " "] for words in found] if found else None)


def _histogram_part(norms: Values) -> list[Html]:
    bars = Bars("norms", norms["histogram"]["edges"], norms["histogram"]["counts"], norms["threshold"])
    limit = "" if norms["threshold"] is None else f" The dashed line is the threshold: {number(norms['threshold'])}."
    words = (
        f"Norms of {count(norms['num_tokens'], 'patch token')} after the last layer, before the final normalisation. "
        f"Both scales are logarithmic, so that small groups can be seen.{limit}"
    )
    label = f"Histogram of token norms, typical norm {number(norms['typical'])}.{limit}"
    return [
        tag(
            "p",
            "Artifacts show as a second hill, to the right of the large one and apart from it. "
            f"Here: {norms['reason']}.",
        ),
        figure(histogram([bars], label), words),
    ]


def _layers_part(norms: Values) -> Html | list[Html]:
    layers = norms["per_layer"]
    numbers = [one["layer"] for one in layers]

    def values(key: str) -> list[float | None]:
        return [one["quantiles"][key] for one in layers]

    lines = [Line("median", "s0", values("50")), Line("largest", "s1 thin", values("max"))]
    chart = over_layers(
        numbers,
        lines,
        f"Norms by layer: median {number(layers[0]['quantiles']['50'])} after the first layer, "
        f"{number(layers[-1]['quantiles']['50'])} after the last.",
        "norm",
        band=(values("5"), values("95")),
        onset=norms["onset"],
    )
    keys = [key("s0", "median"), key("band", "5 to 95 % of the tokens"), key("s1", "largest")]
    shares = over_layers(
        numbers,
        [Line("share", "s0", [100 * one["outlier_share"] if one["verdict"] == "artifacts" else 0 for one in layers])],
        "Share of artifact tokens by layer, in per cent.",
        "tokens, %",
        onset=norms["onset"],
        log=False,
    )
    some = any(one["verdict"] == "artifacts" for one in layers)
    shown = figure(shares, "Share of artifact tokens, in layers that have any.") if some else None
    if norms["onset"] is None:
        when = "The last layer shows no clear artifacts, so there is no layer since which they are there."
    else:
        when = f"Every layer from layer {norms['onset']} on has artifacts."
    rows = [
        [
            one["layer"],
            one["verdict"],
            number(one["threshold"]),
            percent(one["outlier_share"]) if one["threshold"] is not None else "–",
            number(one["quantiles"]["50"]),
            number(one["quantiles"]["max"]),
        ]
        for one in layers
    ]
    head = ["layer", "verdict", "threshold", "above it", "median norm", "largest norm"]
    return [
        tag("p", when, " Each layer is judged by itself; layers are counted from 0."),
        tag(
            "div",
            figure(chart, keys),
            shown,
            class_="pair",
        ),
        tag("details", tag("summary", "All layers in numbers"), table(head, rows, "Norms of patch tokens by layer")),
    ]


def _measured(values: Values) -> list[Html]:
    model, data, versions, settings = (values[key] for key in ("model", "data", "versions", "settings"))
    special = ", ".join(f"{span['count']} {span['role']}" for span in values["layout"]["special"]) or "none"
    grid = values["layout"]["grid"]
    kept = data["kept"]
    rows = [
        ["model", f"{model['name']} ({model['class']})"],
        [
            "size",
            f"{model['parameters'] / 1e6:,.1f} million parameters, {model['layers']} layers, {model['heads']} heads",
        ],
        ["precision", f"{model['dtype']} on {model['device']}"],
        ["tokens", f"special: {special}; patches: {grid[1]} × {grid[2]}"],
        ["pictures", f"{data['pictures']:,}, of which {data['labelled']:,} with a label ({data['kind']})"],
        [
            "looked at closely",
            f"{kept['features']:,} pictures for attention, components and probes; {kept['objects']:,} for objects; "
            f"{kept['places']:,} for places",
        ],
        ["options", ", ".join(f"{name} {value}" for name, value in settings.items())],
        ["versions", ", ".join(f"{name} {value}" for name, value in versions["versions"].items())],
        ["machine", f"{versions['device']}, Python {versions['python']}, {versions['date']}"],
    ]
    return [
        tag(
            "p",
            "The model ran as it always does; its tokens were read where they leave each block, before the final "
            "normalisation. Class and register tokens are not among the norms. The threshold is found for this model, "
            "by a test for a second group of norms above the bulk. Intervals are 95 % confidence intervals over "
            "pictures.",
        ),
        table(["", ""], rows, "Model, data and versions"),
    ]


def _problems(values: Values) -> list[Html] | Html:
    problems = values["problems"]
    found: list[Html] = [note(words) for words in problems["notes"]]
    if problems["num_skipped"]:
        rows = [[one["name"], one["reason"]] for one in problems["skipped"]]
        found.append(table(["picture", "why"], rows, f"{count(problems['num_skipped'], 'picture')} left out"))
    if problems["num_not_finite_tokens"]:
        rows = [[one["name"], one["layer"], one["tokens"]] for one in problems["not_finite"]]
        found.append(table(["picture", "layer", "tokens"], rows, "Numbers that are not finite (at most 100 places)"))
    return found or tag("p", "None: all pictures were read, and all numbers are finite.")
