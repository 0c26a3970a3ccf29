"""Tables and plots of the comparison, and the results section of the README, from the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.plots import COLORS, INK, PALE, entitle, figure, legend
from experiments.common.readme import replace_section, with_plots
from experiments.common.results import read_rows
from experiments.common.statistics import spread
from experiments.common.tables import NOT_MEASURED, markdown, plus_minus, points, signed, titled_tables
from experiments.methods.dense import DENSE
from experiments.methods.measure import ACCURACY, KERNELS, REFERENCE, SPEED, UNMERGED
from experiments.methods.report_dense import dense_tables, plot_dense
from experiments.methods.settings import By, Row, by_variant, compared, mean
from experiments.methods.tuning import TUNED
from experiments.methods.variants import TOLERANCE, all_variants
from vitrail._atomic_files import write_bytes

TABLE_SHARE = 0.6
"""Budget of the table with intervals."""

FINE_TUNED = "tome, fine-tuned"
"""The method that others are compared with where all weights of the model are trained."""

SPEEDS = (1.25, 1.5, 1.75, 2.0, 2.25)
"""Speed-ups for which the most faithful setting is listed."""

MOONSHOT_SPEED = 1.5
SHOWN = 7
"""Methods that have a color of their own in plots: the most faithful ones. The others are gray."""


def speed_ups(rows: Sequence[Row], kind: str) -> dict[tuple[str, float], float]:
    """Return measured speed-ups by variant and share."""
    newest = {row["key"]: row for row in rows if row["model"] == kind}
    return {(row["variant"], row["share"]): row["speed_up"] for row in newest.values() if row["speed_up"]}


def variants_of(found: By) -> list[str]:
    """Return the names of the measured variants in the order of their rows."""
    names = dict.fromkeys(name for name, _ in found)
    return [name for name in names if name not in (UNMERGED, KERNELS, *TUNED)]


# Tables.


def trained(name: str) -> str | None:
    """Return what training changes in a variant: ``"method"``, ``"model"`` or nothing."""
    return next((variant.trains for variant in all_variants() if variant.name == name), None)


def at_one_budget(
    found: By,
    speeds: Mapping[tuple[str, float], float],
    share: float,
    kind: str | None = None,
    reference: str = REFERENCE,
) -> str:
    """Return a table of all variants at one budget whose training is of a kind, most faithful first."""
    lines = []
    for name in variants_of(found):
        rows = found.get((name, share))
        if rows is None or trained(name) != kind:
            continue
        cells = [
            name, str(len(rows)), points(compared(rows, found[UNMERGED, 1.0])),
            "–" if name == reference else points(compared(rows, found.get((reference, share), {}))),
            plus_minus(spread([100 * row["agreement"] for row in rows.values()]), "{:.2f}"),
            f"{mean(rows, 'kl'):.4f}", f"{mean(rows, 'gflops'):.3g}", _speed(speeds.get((name, share))),
        ]  # fmt: skip
        lines.append((mean(rows, "kl"), cells))
    if not lines:
        return NOT_MEASURED
    against = f"against {reference.replace('tome', 'ToMe')}, points"
    head = ["method", "seeds", "accuracy, points", against, "agreement, %", "KL", "GFLOPs", "speed-up"]
    return markdown([head, *(cells for _, cells in sorted(lines, key=lambda line: line[0]))])


def choices(found: By, speeds: Mapping[tuple[str, float], float]) -> str:
    """Return the most faithful setting off the shelf for each speed and each number of FLOPs, beside ToMe's best there.

    Fidelity is the KL divergence: unlike accuracy it separates settings that all lose little. Settings need all seeds.
    """
    seeds = len(found[UNMERGED, 1.0])
    settings = [
        one for one, rows in found.items() if one[0] != UNMERGED and trained(one[0]) is None and len(rows) == seeds
    ]
    needs: dict[str, list[tuple[str, float]]] = {
        f"{least:g} × the throughput": [one for one in settings if speeds.get(one, 0) >= least] for least in SPEEDS
    }
    for share in sorted({share for name, share in settings if name not in (KERNELS, REFERENCE, *TUNED)}, reverse=True):
        most = (1 + TOLERANCE) * share
        needs[f"{100 * share:.0f} % of the FLOPs"] = [one for one in settings if cost(found[one]) <= most]
    lines = []
    for need, able in needs.items():
        if not able:
            lines.append([need, "none", *["–"] * 6])
            continue
        best, tome = (
            min(names, key=lambda one: mean(found[one], "kl"), default=None)
            for names in (able, [one for one in able if one[0] == REFERENCE])
        )
        assert best is not None
        rows = found[best]
        lines.append([
            need, best[0], str(len(rows)), flops_share(rows), _speed(speeds.get(best)),
            points(compared(rows, found[UNMERGED, 1.0])), f"{mean(rows, 'kl'):.4f}",
            "–" if tome is None else f"{mean(found[tome], 'kl'):.4f}",
        ])  # fmt: skip
    head = [
        "at least, or at most",
        "most faithful",
        "seeds",
        "FLOPs",
        "speed-up",
        "accuracy, points",
        "KL",
        "KL of ToMe",
    ]
    return markdown([head, *lines])


def cost(rows: Mapping[int, Row]) -> float:
    """Return the multiply-adds as a share of the unmerged model's."""
    return mean(rows, "gflops") / mean(rows, "unmerged_gflops")


def by_budget(found: By, value: Callable[[str, float], str]) -> str:
    """Return a table with one column for each budget."""
    shares = sorted({share for name, share in found if name not in (UNMERGED, KERNELS, *TUNED)}, reverse=True)
    few = [share for share in shares if sum((name, share) in found for name in variants_of(found)) > 1] or shares
    lines = [[name, *(value(name, share) if (name, share) in found else "–" for share in few)] for name in
             variants_of(found)]  # fmt: skip
    return markdown([["method", *(f"{100 * share:.0f} % of FLOPs" for share in few)], *lines])


def tuned_settings(found: By) -> list[tuple[str, float]]:
    """Return the tuned variants with their budgets, the least merging first."""
    return sorted((one for one in found if one[0] in TUNED), key=lambda one: (-one[1], one[0]))


def flops_share(rows: Mapping[int, Row]) -> str:
    """Return the share of the unmerged model's multiply-adds in percent."""
    return f"{100 * cost(rows):.0f} %"


def tuned_table(found: By, speeds: Mapping[tuple[str, float], float]) -> str:
    """Return the tuned settings beside ToMe at the same budgets."""
    lines = []
    for name, share in tuned_settings(found):
        rows, tome = found[name, share], found.get((REFERENCE, share), {})
        chosen = sorted({_method_name(row["config"]["method"]) for row in rows.values()})
        lines.append([
            name, flops_share(rows), ", ".join(chosen), points(compared(rows, found[UNMERGED, 1.0])),
            points(compared(tome, found[UNMERGED, 1.0])), points(compared(rows, tome)),
            f"{mean(rows, 'kl'):.4f}", f"{mean(tome, 'kl'):.4f}" if tome else "–",
            _speed(speeds.get((name, share))), _speed(speeds.get((REFERENCE, share))),
        ])  # fmt: skip
    head = ["setting", "FLOPs", "chosen", "tuned, points", "ToMe, points", "difference, points", "KL tuned", "KL ToMe",
            "speed-up tuned", "speed-up ToMe"]  # fmt: skip
    return markdown([head, *lines]) if lines else NOT_MEASURED


def moonshot(found: By, speeds: Mapping[tuple[str, float], float]) -> str:
    """Return, for each tuned variant, its least merging that is fast enough, and its curve against ToMe's.

    The setting is chosen by FLOPs and measured speed; accuracy plays no part in the choice. Curves are compared at the
    measured speed of each tuned setting, between whose neighbors ToMe's accuracy is interpolated.
    """
    sentences = []
    for variant in TUNED:
        shares = [share for name, share in tuned_settings(found) if name == variant]
        if not shares:
            continue
        fast = [share for share in shares if speeds.get((variant, share), 0) >= MOONSHOT_SPEED]
        text = f"*{variant}*: no setting reaches {MOONSHOT_SPEED:g} times the speed of the unmerged model"
        if fast:
            share = max(fast)
            text = (
                f"*{variant}*: the least merging that is at least {MOONSHOT_SPEED:g} times as fast as the unmerged "
                f"model has {flops_share(found[variant, share])} of the FLOPs, "
                f"{speeds[variant, share]:.2f} times the speed and "
                f"{points(compared(found[variant, share], found[UNMERGED, 1.0]))} points"
            )
        above = above_reference(found, speeds, variant, shares)
        sentences.append(f"{text}; it is above ToMe's curve at {sum(above)} of {len(above)} measured speeds.")
    return "\n\n".join(sentences)


def above_reference(
    found: By, speeds: Mapping[tuple[str, float], float], variant: str, shares: Sequence[float]
) -> list[bool]:
    """Return for each timed setting of a variant whether it is more accurate than ToMe at the same measured speed.

    Speeds beyond ToMe's fastest setting count as above if the accuracy is at least that of this setting.
    """
    curve = sorted(
        (speeds[REFERENCE, share], mean(rows, "accuracy"))
        for (name, share), rows in found.items()
        if name == REFERENCE and (name, share) in speeds
    )
    timed = [share for share in shares if (variant, share) in speeds]
    if not curve:
        return []
    x, y = zip(*curve, strict=True)
    return [mean(found[variant, share], "accuracy") > float(np.interp(speeds[variant, share], x, y)) for share in timed]


def dynamic_table(found: By, rows: Sequence[Row], kind: str) -> str:
    """Return the methods whose lengths depend on the image beside ToMe's static schedule of the same mean FLOPs."""
    timed = {(row["variant"], row["share"]): row for row in rows if row["model"] == kind}
    lines = []
    for name, share in sorted(found, key=lambda one: (one[0], -one[1])):
        own, tome = found[name, share], found.get((REFERENCE, share), {})
        if name in (UNMERGED, KERNELS) or all(row["static"] for row in own.values()) or not tome:
            continue
        speeds = [timed.get((one, share), {}).get("images_per_s", {}).get("eager") for one in (name, REFERENCE)]
        ratio = f"{speeds[0] / speeds[1]:.2f}" if all(speeds) else "–"
        spread_of = mean(own, "gflops_sd") / mean(own, "gflops")
        lines.append([
            name, f"{100 * share:.0f} %", f"{100 * spread_of:.0f} %", points(compared(own, tome)),
            f"{mean(own, 'kl'):.4f}", f"{mean(tome, 'kl'):.4f}",
            *("–" if speed is None else f"{speed:,.0f}" for speed in speeds), ratio,
        ])  # fmt: skip
    head = ["method", "mean FLOPs", "deviation over images", "against ToMe, points", "KL", "KL of ToMe",
            "images/s, eager", "ToMe, eager", "ratio"]  # fmt: skip
    return markdown([head, *lines]) if lines else ""


def skipped_table(rows: Sequence[Row]) -> str:
    """Return which settings were not measured, and why."""
    newest = {row["key"]: row for row in rows}
    reasons: dict[tuple[str, str, str], list[float]] = {}
    for row in newest.values():
        if "skipped" in row:
            reasons.setdefault((row["model"], row["variant"], row["skipped"].partition(";")[0]), []).append(
                row["share"]
            )
    lines = [
        [model, variant, ", ".join(f"{100 * share:.0f} %" for share in sorted(set(shares), reverse=True)), reason]
        for (model, variant, reason), shares in reasons.items()
    ]
    return markdown([["model", "method", "FLOPs", "reason"], *lines])


def _speed(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _method_name(method: Any) -> str:
    if not isinstance(method, Mapping):
        return str(method)
    options = [f"{name}={value}" for name, value in method.items() if name != "name"]
    return f"{method['name']} ({', '.join(options)})" if options else str(method["name"])


# Plots.


def plot_kind(kind: str, found: By, speeds: Mapping[tuple[str, float], float], folder: Path) -> None:
    """Plot accuracy and KL divergence over measured speed-up and over FLOPs."""
    names = [*variants_of(found), *dict.fromkeys(name for name, _ in tuned_settings(found))]
    ranked = sorted(names, key=lambda name: np.mean([mean(rows, "kl") for (one, _), rows in found.items()
                                                     if one == name]))  # fmt: skip
    shown = list(dict.fromkeys([REFERENCE, *TUNED, *ranked]))
    colors = dict(zip([name for name in shown if name in names][:SHOWN], COLORS, strict=False))
    base = mean(found[UNMERGED, 1.0], "accuracy")
    values: dict[str, Callable[[Mapping[int, Row]], float]] = {
        "accuracy, points against unmerged": lambda rows: 100 * (mean(rows, "accuracy") - base),
        "KL divergence from unmerged": lambda rows: max(mean(rows, "kl"), 1e-6),
    }
    for file, (label, value) in zip(("accuracy", "fidelity"), values.items(), strict=True):
        with figure(folder / f"{kind.replace(' ', '-')}-{file}.png", columns=2, width=11.0, height=4.4) as panels:
            for axes, over_speed in zip(panels, (True, False), strict=True):
                for name in sorted(names, key=lambda name: name in colors):
                    settings = sorted(one for one in found if one[0] == name and (not over_speed or one in speeds))
                    points_of = [
                        (speeds[one] if over_speed else mean(found[one], "gflops"), value(found[one]))
                        for one in settings
                    ]
                    if points_of:
                        color = colors.get(name)
                        style: dict[str, Any] = {"linewidth": 1.6} if color else {"linewidth": 0.7, "alpha": 0.7}
                        label_of = name if color else None
                        axes.plot(*zip(*points_of, strict=True), "-o", color=color or PALE, markersize=3,
                                  label=label_of if over_speed else None, **style)  # fmt: skip
                axes.set(xlabel="speed-up, measured" if over_speed else "GMACs of an image", ylabel=label)
                at_share = {
                    name: [value({seed: row}) for seed, row in rows.items()]
                    for (name, share), rows in found.items()
                    if share == TABLE_SHARE and name in names and (not over_speed or (name, share) in speeds)
                }
                which = "lowest" if file == "fidelity" else "highest"
                entitle(axes, at_share, f" at {100 * TABLE_SHARE:.0f} % of the multiply-adds", which=which)
                if file == "fidelity":
                    axes.set_yscale("log")
                else:
                    axes.axhline(0, color=INK, linewidth=0.8)
                    axes.set_ylim(max(-12, axes.get_ylim()[0]), None)
            legend(panels[0])


# The README.


def section(accuracy: Sequence[Row], speed: Sequence[Row], dense: Sequence[Row]) -> str:
    """Return all tables."""
    if not accuracy:
        return NOT_MEASURED
    parts: dict[str, str] = {}
    for kind in dict.fromkeys(row["model"] for row in accuracy):
        found, speeds = by_variant(accuracy, kind), speed_ups(speed, kind)
        base = found[UNMERGED, 1.0]
        unmerged = plus_minus(spread([100 * row["accuracy"] for row in base.values()]), "{:.2f}")
        shares = [share for name, share in found if name in variants_of(found)]
        if not shares:
            continue
        share = min(shares, key=lambda one: abs(one - TABLE_SHARE))
        kernels, at = speeds.get((KERNELS, 1.0)), f"at {100 * share:.0f} % of the FLOPs"
        parts[
            f"**{kind}** (unmerged {unmerged} %, {mean(base, 'gflops'):.3g} GFLOPs; kernels without merging "
            f"{_speed(kernels)} times as fast), {at}"
        ] = at_one_budget(found, speeds, share)
        for trains, title, reference in (
            ("method", "the methods' own parameters trained", REFERENCE),
            ("model", "all weights fine-tuned", FINE_TUNED),
        ):
            table = at_one_budget(found, speeds, share, trains, reference)
            if table != NOT_MEASURED:
                parts[f"**{kind}**, {at}, {title}"] = table
        parts[f"**{kind}**, the most faithful setting off the shelf for a speed and for a number of FLOPs"] = choices(
            found, speeds
        )

        def lost(name: str, share: float, found: By = found) -> str:
            difference = compared(found[name, share], found[UNMERGED, 1.0])
            return "–" if difference is None else signed(difference.mean)

        parts[f"**{kind}**, accuracy against the unmerged model, points"] = by_budget(found, lost)
        if tuned_settings(found):
            table = f"{tuned_table(found, speeds)}\n\n{moonshot(found, speeds)}"
            parts[f"**{kind}**, settings of `vitrail tune` and ToMe"] = table
        if table := dynamic_table(found, speed, kind):
            parts[f"**{kind}**, lengths that depend on the image against a static schedule of the same mean FLOPs"] = (
                table
            )
    for kind in dict.fromkeys(row["model"] for row in dense):
        parts |= dense_tables(kind, by_variant(dense, kind), speed_ups(speed, kind))
    if any("skipped" in row for row in accuracy):
        parts["Not measured"] = skipped_table(accuracy)
    return f"{titled_tables(parts)}\n\n{provenance([*accuracy, *speed, *dense])}"


def provenance(rows: Sequence[Row]) -> str:
    """Return where and with what the rows were measured."""
    devices, commits = (sorted({str(row[name]) for row in rows}) for name in ("device", "commit"))
    torch = sorted({row["versions"]["torch"] for row in rows})
    return (
        "In brackets: 95 % confidence interval over seeds and samples (samples alone where there is one seed). On "
        f"{', '.join(devices)}, torch {', '.join(torch)}, commit {', '.join(commits)}."
    )


def write_report(folder: Path) -> None:
    """Draw the plots and rewrite the results section of the README in a folder of rows."""
    accuracy, speed, dense = (read_rows(folder / name, ("key",)) for name in (ACCURACY, SPEED, DENSE))
    for kind in dict.fromkeys(row["model"] for row in accuracy):
        found = by_variant(accuracy, kind)
        if variants_of(found):
            plot_kind(kind, found, speed_ups(speed, kind), folder)
    for kind in dict.fromkeys(row["model"] for row in dense):
        plot_dense(kind, by_variant(dense, kind), folder)
    blank = "# Merging methods\n\n<!-- results -->\n<!-- /results -->\n"
    text = section(accuracy, speed, dense)
    page = replace_section(folder / "README.md", with_plots(text, folder) if accuracy else text, blank=blank)
    write_bytes(folder / "README.md", page.encode())
