"""The header of a report's page, and its last sections: recommendations, method, problems."""

from __future__ import annotations

from typing import Any

from vitrail.report import verdict
from vitrail.report.page.blocks import Block, Bullets, Note, Table
from vitrail.report.page.formatting import count, number, percent
from vitrail.report.report import Report
from vitrail.report.sections.base import Section

MEDIA_NOTES = {
    "video": "“Image” means a clip on this page: frames below each other, one for each step of the patch grid in time.",
    "audio": "“Image” means a sound's spectrogram on this page: time from left to right, low frequencies at the top.",
}
"""How inputs that are no images are drawn."""

METHOD_INTRO = (
    "The model ran unchanged; tokens were recorded where they leave each block, before the final norm. Norms are "
    "those of patch tokens, without class and register tokens. The threshold is specific to this model: it comes "
    "from a test for a second group of norms above the bulk. Intervals are 95 % confidence intervals over images."
)


def header(report: Report) -> dict[str, Any]:
    """Return the values of the page's title and header."""
    norms, name = report.norms, report.model["name"]
    return {
        "title": f"{name}: artifact tokens",
        "model": name,
        "badge": (norms["verdict"], verdict.BADGES[norms["verdict"]]),
        "verdict": report.verdict,
        "confidence": verdict.confidence_sentence(norms, report.noun),
        "next": report.next_step,
        "alerts": [Note(" ".join(_alerts(report)))],
        "tiles": {
            "high-norm tokens": "none" if norms["threshold"] is None else percent(norms["outlier_share"]),
            "threshold (norm)": number(norms["threshold"]),
            "typical norm": number(norms["typical"]),
            "since layer (from 0)": number(norms["onset"]),
            f"{report.noun}s": f"{report.data['images']:,}",
        },
    }


def _alerts(report: Report) -> list[str]:
    problems = report.problems
    alerts = [MEDIA_NOTES[report.data["medium"]]] if report.data.get("medium") in MEDIA_NOTES else []
    if problems["num_not_finite_tokens"]:
        alerts.append(
            f"{count(problems['num_not_finite_tokens'], 'token')} (over all layers) in "
            f"{count(problems['num_not_finite_images'], report.noun)} had non-finite values; no average includes them."
        )
    if problems["num_skipped"]:
        alerts.append(f"{count(problems['num_skipped'], report.noun)} could not be read and were skipped.")
    return alerts


def _render_next(report: Report) -> list[Block]:
    return [Bullets(verdict.recommendations(report.norms, report.registers, report.cure, report.noun))]


def _render_method(report: Report) -> list[Block]:
    model, data, versions, grid = report.model, report.data, report.versions, report.layout["grid"]
    special = ", ".join(f"{span['count']} {span['role']}" for span in report.layout["special"]) or "none"
    millions, kept = f"{model['parameters'] / 1e6:,.1f} million parameters", data["kept"]
    rows = {
        "model": f"{model['name']} ({model['class']})",
        "size": f"{millions}, {model['layers']} layers, {model['heads']} heads",
        "dtype and device": f"{model['dtype']} on {model['device']}",
        "tokens": f"special: {special}; patches: {grid[1]} × {grid[2]}",
        f"{report.noun}s": f"{data['images']:,}, of which {data['labelled']:,} with a label ({data['kind']})",
        f"{report.noun}s kept": (
            f"{kept['features']:,} for attention, components and probes; {kept['objects']:,} for objects; "
            f"{kept['places']:,} for places"
        ),
        "options": ", ".join(f"{name} {value}" for name, value in report.settings.items()),
        "versions": ", ".join(f"{name} {value}" for name, value in versions["versions"].items()),
        "machine": f"{versions['device']}, Python {versions['python']}, {versions['date']}",
    }
    return [Table([], [list(row) for row in rows.items()], "Model, data and versions")]


def _render_problems(report: Report) -> list[Block]:
    problems = report.problems
    blocks: list[Block] = [Note(note) for note in problems["notes"]]
    if problems["num_skipped"]:
        rows = [[one["name"], one["reason"]] for one in problems["skipped"]]
        blocks.append(Table([report.noun, "reason"], rows, f"{count(problems['num_skipped'], report.noun)} skipped"))
    if problems["num_not_finite_tokens"]:
        rows = [[one["name"], one["layer"], one["tokens"]] for one in problems["not_finite"]]
        blocks.append(Table([report.noun, "layer", "tokens"], rows, "Non-finite values (at most 100 places)"))
    return blocks


NEXT = Section("next", "Recommendations", "Recommendations", "", _render_next)
METHOD = Section("how", "Method and settings", "Method", METHOD_INTRO, _render_method)
NO_PROBLEMS = "none; all images were read, and all values are finite"
PROBLEMS = Section("problems", "Problems", "", "", _render_problems, absent=lambda report: NO_PROBLEMS)
