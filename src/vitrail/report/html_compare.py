"""The page of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrail.report.charts import Bars, Line, histogram, over_layers
from vitrail.report.html import BADGES, page, section
from vitrail.report.html_pictures import map_panel, norm_map, norm_scale, outlier_marks, photo_panel, photos, ramp
from vitrail.report.markup import Html, figure, key, note, table, tag
from vitrail.report.words import number, percent

if TYPE_CHECKING:
    from vitrail.report.compare import Comparison, Difference


def comparison_page(found: Comparison) -> str:
    """Give a comparison as a page."""
    names = [report.model["name"] for report in (found.a, found.b)]
    parts = [
        photos(found.a.pictures),
        _header(found, names),
        section("differences", "In numbers", _table(found)),
        section("norms", "How long the tokens are", _norms(found)),
        section("pictures", "The same pictures in both", _pictures(found)),
    ]
    return page(f"{names[0]} and {names[1]}: artifact tokens", parts)


def _header(found: Comparison, names: list[str]) -> Html:
    tiles = []
    for letter, name, report in zip("AB", names, (found.a, found.b), strict=True):
        verdict = report.norms["verdict"]
        badge = tag("span", BADGES[verdict], class_=f"badge {verdict}")
        tiles.append(tag("div", tag("h3", f"{letter}: ", tag("code", name)), tag("p", badge), tag("p", report.verdict)))
    return tag(
        "header",
        tag("h1", "Two inspections side by side"),
        tag("p", found.verdict, class_="answer"),
        tag("div", tiles, class_="pair"),
        [note(remark) for remark in found.remarks],
    )


def _table(found: Comparison) -> Html:
    rows = []
    for one in found.differences:
        change = "" if one.change is None else _change(one)
        rows.append([one.name, _value(one, one.a), _value(one, one.b), change])
    return table(["", "A", "B", "B − A"], rows, "What was measured in either; a dash where it was not")


def _value(one: Difference, value: Any) -> str:
    if isinstance(value, str):
        return value
    return percent(value) if one.share else number(value)


def _change(one: Difference) -> str:
    assert one.change is not None
    sign = "+" if one.change > 0 else "−" if one.change < 0 else "±"
    return f"{sign}{100 * abs(one.change):.3g} points" if one.share else f"{sign}{number(abs(one.change))}"


def _keys() -> list[Any]:
    return [key("s0", "A"), key("s1", "B")]


def _norms(found: Comparison) -> Html:
    norms = found.a.norms, found.b.norms
    series = [
        Bars(letter, one["histogram"]["edges"], one["histogram"]["counts"], one["threshold"])
        for letter, one in zip("AB", norms, strict=True)
    ]
    chart = histogram(series, "Histograms of token norms of both models.")
    depths = [[place / max(1, len(one["per_layer"]) - 1) for place in range(len(one["per_layer"]))] for one in norms]
    places = sorted({*depths[0], *depths[1]})
    lines = []
    for place, one in enumerate(norms):
        for quantile, style in (("50", f"s{place}"), ("max", f"s{place} thin")):
            by_depth = dict(
                zip(depths[place], (layer["quantiles"][quantile] for layer in one["per_layer"]), strict=True)
            )
            lines.append(Line(f"{'AB'[place]} {quantile}", style, [by_depth.get(depth) for depth in places]))
    layers = over_layers(places, lines, "Median and largest norm by depth, of both models.", "norm", depths=True)
    words = [
        *_keys(),
        "Norms after the last layer; the areas of both models are the same. Both scales are logarithmic.",
    ]
    return tag(
        "div",
        figure(chart, words),
        figure(layers, [*_keys(), "Median (solid) and largest norm (dashed) by depth: 0 the first layer, 1 the last."]),
        class_="pair",
    )


def _pictures(found: Comparison) -> list[Html]:
    others = {one.index: one for one in found.b.pictures}
    pairs = [
        (one, others[one.index])
        for one in found.a.pictures
        if one.index in others and others[one.index].name == one.name
    ]
    if not pairs:
        return [note("The reports show no picture that is the same in both.")]
    scales = norm_scale([one for one, _ in pairs]), norm_scale([two for _, two in pairs])
    figures = []
    for one, two in pairs:
        panels = [photo_panel(one, one.name)] if one.image is not None else []
        for letter, shown, scale in zip("AB", (one, two), scales, strict=True):
            label = f"Norms of {one.name} in {letter}"
            panels.append(map_panel(shown, norm_map(shown, *scale), label, outlier_marks(shown)))
        caption = f"{one.name}: {len(one.outliers)} outliers in A, {len(two.outliers)} in B"
        figures.append(figure(tag("div", panels, class_="panels"), caption))
    return [
        tag(
            "p", "The picture (where the report has it), then norms of the patch tokens in A and in B, outliers marked."
        ),
        ramp(number(scales[0][0]), number(scales[0][1]), "norm in A"),
        ramp(number(scales[1][0]), number(scales[1][1]), "norm in B"),
        tag("div", figures, class_="pictures"),
    ]
