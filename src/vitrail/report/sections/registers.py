"""Each register: norm, attention, and what a probe reads from it."""

from __future__ import annotations

from vitrail.analysis.attention import spread, token_maps
from vitrail.report.context import Context
from vitrail.report.page.blocks import Beside, Block, Table, Text
from vitrail.report.page.formatting import interval, number, percent
from vitrail.report.report import Report
from vitrail.report.sections.base import Section, Values
from vitrail.tokens import Role


def compute(context: Context) -> Values:
    """Describe each register; class probes are those of the ``probes`` section."""
    registers = context.layout.indices(Role.REGISTER)
    if not registers:
        return {"tokens": [], "note": "the model has no register tokens"}
    row = {token: row for row, token in enumerate(context.queries)}
    rows = [row[token] for token in registers]
    widths = spread(token_maps(context.attention[:, :, rows], context.layout))
    probes = context.sections.get("probes", {}).get("classes", {}).get("kinds", {})
    tokens = []
    for place, token in enumerate(registers):
        norms = context.special_norms[:, token].double()
        name, mean = context.special_names[token], float(norms.mean())
        tokens.append(
            {
                "name": name,
                "position": token,
                "norm": mean,
                "norm_sd": float(norms.std()) if len(norms) > 1 else None,
                "norm_ratio": mean / context.norms.typical,
                "entropy": float(widths.entropy[place]),
                "effective_patches": float(widths.effective[place]),
                "class_probe": probes.get(name),
            }
        )
    return {"tokens": tokens, "images": len(context.featured)}


def render(report: Report) -> list[Block]:
    """Show one row per register."""
    rows = []
    for one in report.registers.get("tokens") or []:
        accuracy = interval((one["class_probe"] or {}).get("accuracy"), percent)
        ratio, patches = f"{number(one['norm_ratio'])} ×", number(one["effective_patches"])
        rows.append([one["name"], number(one["norm"]), ratio, patches, accuracy])
    if not rows:
        return []
    head = ["token", "norm", "of a typical patch", "patches attended to", "class from it alone"]
    return [Beside([Table(head, rows, "Registers in the last layer")], [Text(EXPLANATION, "soft")])]


def conclude(report: Report) -> str:
    """Return which register has the largest norm, and how widely the registers attend."""
    tokens = report.registers["tokens"]
    largest = max(tokens, key=lambda one: one["norm_ratio"])
    patches = [one["effective_patches"] for one in tokens]
    spread = number(patches[0]) if len(patches) == 1 else f"{number(min(patches))} to {number(max(patches))}"
    return (
        f"The largest norm is that of {largest['name']}: {number(largest['norm_ratio'])} times a typical patch. "
        f"A register attends to about {spread} patches."
    )


EXPLANATION = "Registers are extra tokens that a model can use as storage, so that it need not use patches."
SECTION = Section("registers", "Registers", "Registers", "", render, compute, "registers", conclude=conclude)
