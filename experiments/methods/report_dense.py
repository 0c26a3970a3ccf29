"""Tables and plots of segmentation and boxes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from experiments.common.plots import COLORS, INK, PALE, figure, legend
from experiments.common.statistics import Difference
from experiments.common.tables import markdown, points
from experiments.methods.measure import REFERENCE, UNMERGED
from experiments.methods.settings import By, Row, compared, grouped, mean

SEGMENTATION = {"linear head": "", "decoder": "decoder_"}
"""Heads with the prefix of their values."""

SHOWN = ("tome", "edges", "edges, never across", "grid", "local_global", "tome, transport", "threshold")
"""Variants with a color of their own in plots: ToMe and those made for dense outputs. The others are gray."""


def dense_tables(kind: str, found: By, speeds: Mapping[tuple[str, float], float]) -> dict[str, str]:
    """Return the tables of one model: each head, and boxes; speeds are those of the whole model with its own head."""
    tables = {}
    for name, prefix in SEGMENTATION.items():
        fields = {"mIoU": (f"{prefix}miou", f"{prefix}miou_groups"),
                  "boundary F": (f"{prefix}boundary", f"{prefix}boundary_groups")}  # fmt: skip
        tables[f"**{kind}**, masks of Pets, {name}"] = _table(found, fields, speeds)
    tables[f"**{kind}**, boxes of Pets"] = _table(
        found, {"boxes found": ("box_recall", "boxes"), "CorLoc": ("corloc", "lost")}, speeds
    )
    return tables


def _table(found: By, fields: Mapping[str, tuple[str, str]], speeds: Mapping[tuple[str, float], float]) -> str:
    """Return values with paired differences to the unmerged model and to ToMe at the same FLOPs."""
    base, first = found[UNMERGED, 1.0], next(iter(fields.values()))[0]
    head = ["method", "FLOPs"]
    for name in fields:
        head += [f"{name}, %", "against unmerged, points", "against ToMe, points"]
    lines = []
    for variant, share in sorted(found, key=lambda one: (-one[1], -mean(found[one], first))):
        rows, tome = found[variant, share], found.get((REFERENCE, share), {})
        cells = [variant, f"{100 * share:.0f} %"]
        for value, paired in fields.values():
            cells.append(f"{100 * mean(rows, value):.2f}")
            cells.append("–" if variant == UNMERGED else points(_paired(rows, base, paired)))
            cells.append("–" if variant in (UNMERGED, REFERENCE) else points(_paired(rows, tome, paired)))
        lines.append([*cells, f"{speeds[variant, share]:.2f}" if (variant, share) in speeds else "–"])
    return markdown([[*head, "speed-up"], *lines])


def _paired(first: Mapping[int, Row], second: Mapping[int, Row], name: str) -> Difference | None:
    """Compare values that are kept by group, or by image."""
    return (grouped if name.endswith("groups") else compared)(first, second, name)


def plot_dense(kind: str, found: By, folder: Path) -> None:
    """Plot mIoU and boundary F of the decoder over FLOPs, and boxes of the linear head."""
    values = {"mIoU, decoder, points": "decoder_miou", "boundary F, decoder, points": "decoder_boundary",
              "boxes found, points": "box_recall"}  # fmt: skip
    names = sorted({name for name, _ in found if name != UNMERGED}, key=lambda name: name in SHOWN)
    base = found[UNMERGED, 1.0]
    with figure(folder / f"{kind.replace(' ', '-')}-dense.png", columns=3, width=13.0, height=4.0) as panels:
        for axes, (label, field) in zip(panels, values.items(), strict=True):
            for name in names:
                curve = sorted(
                    (mean(rows, "gflops"), 100 * (mean(rows, field) - mean(base, field)))
                    for (one, _), rows in found.items()
                    if one == name
                )
                color = COLORS[SHOWN.index(name) % len(COLORS)] if name in SHOWN else PALE
                axes.plot(*zip(*curve, strict=True), "-o", color=color, markersize=3,
                          linewidth=1.6 if name in SHOWN else 0.7, label=name if name in SHOWN else None)  # fmt: skip
            axes.axhline(0, color=INK, linewidth=0.8)
            axes.set(xlabel="GMACs of an image", ylabel=f"{label} against unmerged")
        legend(panels[0])
