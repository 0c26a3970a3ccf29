"""Norms of patch tokens: maps of the shown images, the histogram, and layer by layer."""

from __future__ import annotations

from vitrail.report.page.blocks import Beside, Block, Columns, Details, Figure, Key, Note, Table, Text
from vitrail.report.page.charts import Distribution, Line, histogram, over_layers
from vitrail.report.page.formatting import count, number, percent
from vitrail.report.page.images import NormColors, outlier_marks, photo_panel
from vitrail.report.report import Report, ShownImage
from vitrail.report.sections.base import Section


def _render_images(report: Report) -> list[Block]:
    images, norms = report.images, report.norms
    if not images:
        return [Note("No image can be shown: none has only finite values.")]
    scale = NormColors(images)
    figures = []
    for one in images:
        outliers = "" if norms["threshold"] is None else f": {count(len(one.outliers), 'high-norm token')}"
        panels = [
            photo_panel(one, one.title + outliers, outlier_marks(one, one.outliers)),
            scale.panel(one, _map_label(one), one.norms, one.outliers),
        ]
        figures.append(Figure(panels, one.title + outliers))
    if norms["threshold"] is None:
        marks = ""
    else:
        marks = (
            f"Squares are high-norm tokens: those with a norm above {number(norms['threshold'])}. Some of the images "
            "are those with the most of them, the others are spread over the data."
        )
    text = "Left: the image as the model sees it. Right: the norm of each patch token after the last layer. "
    return [Text(text + marks, "soft"), scale.ramp(), Columns(figures, "images")]


def _map_label(one: ShownImage) -> str:
    return (
        f"Norms of the patch tokens of {one.name}: {number(min(one.norms))} to {number(max(one.norms))}, "
        f"{count(len(one.outliers), 'high-norm token')}"
    )


def _conclude_images(report: Report) -> str:
    norms = report.norms
    if norms["threshold"] is None:
        return "No token stands far above the others, so none is marked."
    many = f"{count(norms['images_with_outliers'], report.noun)} of {norms['num_images']:,}"
    kinds = {"artifacts": "artifact tokens", "content": "high-norm tokens, which content explains"}
    return f"{many} have {kinds.get(norms['verdict'], 'high-norm tokens, which may be artifacts')}."


def _render_histogram(report: Report) -> list[Block]:
    norms = report.norms
    distribution = Distribution(norms["histogram"]["edges"], norms["histogram"]["counts"], norms["threshold"])
    threshold = (
        "" if norms["threshold"] is None else f" The dashed line is the threshold: {number(norms['threshold'])}."
    )
    label = (
        f"Histogram of token norms: most are near {number(norms['typical'])}, the largest is "
        f"{number(norms['histogram']['edges'][-1])}.{threshold}"
    )
    text = (
        "Artifacts form a second peak, to the right of the large one and apart from it.",
        f"Norms of {count(norms['num_tokens'], 'patch token')} after the last layer, before the final norm. Both "
        f"scales are logarithmic, so that small groups are visible.{threshold}",
    )
    return [Beside([Figure([histogram([distribution], label)])], [Text(one, "soft") for one in text])]


def _conclude_histogram(report: Report) -> str:
    reason = str(report.norms["reason"])
    return f"{reason[:1].upper()}{reason[1:]}."


def _conclude_layers(report: Report) -> str:
    onset = report.norms["onset"]
    if onset is None:
        return "The last layer shows no clear artifacts, so there is no first layer with artifacts."
    return f"Every layer from layer {onset} on has artifacts."


def _render_layers(report: Report) -> list[Block]:
    layers = report.norms["per_layer"]
    head = ["layer", "verdict", "threshold", "above it", "median norm", "largest norm"]
    rows = []
    for one in layers:
        share, quantiles = None if one["threshold"] is None else one["outlier_share"], one["quantiles"]
        cells = number(one["threshold"]), percent(share), number(quantiles["50"]), number(quantiles["max"])
        rows.append([one["layer"], one["verdict"], *cells])
    table = Table(head, rows, "Norms of patch tokens by layer")
    return [
        Text("Each layer is judged by itself; layers are counted from 0.", "soft"),
        Columns(_layer_charts(report)),
        Details("All layers in numbers", [table]),
    ]


def _layer_charts(report: Report) -> list[Block]:
    layers, onset = report.norms["per_layer"], report.norms["onset"]
    numbers = [one["layer"] for one in layers]
    quantiles = {key: [one["quantiles"][key] for one in layers] for key in ("5", "50", "95", "max")}
    label = (
        f"Norms by layer: median {number(quantiles['50'][0])} after the first layer, "
        f"{number(quantiles['50'][-1])} after the last; largest {number(quantiles['max'][-1])}."
    )
    lines = [Line("s0", quantiles["50"]), Line("s1 thin", quantiles["max"])]
    band = quantiles["5"], quantiles["95"]
    chart = over_layers(numbers, lines, label, "norm", band=band, onset=onset)
    keys = [Key("s0", "median"), Key("band", "5 to 95 % of the tokens"), Key("s1", "largest")]
    charts: list[Block] = [Figure([chart], keys=keys)]
    if any(one["verdict"] == "artifacts" for one in layers):
        shares = [100 * one["outlier_share"] if one["verdict"] == "artifacts" else 0 for one in layers]
        label = (
            f"Share of artifact tokens by layer, in percent: {number(shares[-1])} in the last, from layer {onset} on."
        )
        chart = over_layers(numbers, [Line("s0", shares)], label, "tokens, %", onset=onset, log=False)
        charts.append(Figure([chart], "Share of artifact tokens, in layers that have any."))
    return charts


IMAGES = Section("images", "Norm maps", "Images", "", _render_images, conclude=_conclude_images)
HISTOGRAM = Section("norms", "Distribution of norms", "Norms", "", _render_histogram, conclude=_conclude_histogram)
LAYERS = Section("layers", "Norms by layer", "Layers", "", _render_layers, conclude=_conclude_layers)
