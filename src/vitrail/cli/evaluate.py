"""``vitrail evaluate``: how good a trained model is, head by head and fused, merged or not."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from vitrail.cli import _console as console
from vitrail.cli import _options as options
from vitrail.cli._ranks import first_rank_prints, first_rank_reports

if TYPE_CHECKING:
    from vitrail.training import Evaluation

SHOWN = 30
"""Most classes of which the table of confusions is printed; the JSON has all."""

EVALUATE_EPILOG = (
    "Examples:\n\n"
    "vitrail evaluate runs/student val.parquet\n\n"
    "vitrail evaluate runs/student/last photos/ --merge r=8 --json result.json\n\n"
    "vitrail evaluate runs/pets breeds.parquet --tasks breed\n\n"
    "On several devices: torchrun --nproc-per-node 4 -m vitrail evaluate runs/student val.parquet"
)


def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder of a run or of a model.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Labelled pictures, as for training.")],
    merge: Annotated[
        str | None, typer.Option(metavar="MERGE", help="Merge tokens, like r=8 or keep=0.5,schedule=decreasing.")
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            "--labels", "--tasks", metavar="COLUMNS", help="Columns of labels; by default all those of the training."
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Pixels to show pictures at; by default as in training.", show_default=False
        ),
    ] = None,
    batch: options.Batch = 256,
    device: options.DeviceOf = None,
    dtype: Annotated[str, typer.Option(metavar="D", help="fp32 or bf16 (autocast).")] = "fp32",
    max_unreadable: Annotated[
        float, typer.Option("--max-unreadable", metavar="F", help="Share of pictures that may be unreadable.")
    ] = 0.01,
    confusion: Annotated[bool, typer.Option("--confusion", help="Print which classes are taken for which.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all values here.")] = None,
) -> None:
    """Measure a trained model on labelled pictures: accuracy of each head and fused, calibration, confusion, speed."""
    with first_rank_prints(), console.user_errors(), console.notes():
        from vitrail.cli._output import check_writable, write_text
        from vitrail.training import evaluate as measure

        if json_file is not None:
            check_writable(json_file, "--json")
        columns = tuple(part.strip() for part in (labels or "").split(",") if part.strip())
        with console.bars() as progress, first_rank_reports():
            found = measure(
                checkpoint,
                data,
                labels=columns,
                merge=merge,
                size=size,
                batch=batch,
                device=device,
                dtype=dtype,
                max_unreadable=max_unreadable,
                progress=progress,
            )
        if json_file is not None and not console.out.quiet:
            write_text(json_file, json.dumps(found.to_dict(), ensure_ascii=False, indent=2) + "\n", "--json")
        show(found, confusion)


def show(found: Evaluation, confusion: bool) -> None:
    """Print the figures as a table."""
    merged = "not merged" if found.merge is None else f"merged: {_settings(found.merge)}"
    console.say(f"{found.count} pictures, {merged}", style="bold")
    table = Table(box=box.SIMPLE)
    for title in ("answer", "accuracy", "top 5", "calibration error"):
        table.add_column(title, justify="left" if title == "answer" else "right")
    for name, share in found.accuracy.items():
        more = (_percent(values.get(name)) for values in (found.top5, found.calibration))
        table.add_row(name, _percent(share), *more)
    console.out.print(table)
    console.say(f"Loss {found.loss:.4f}")
    for line in _disagreement(found):
        console.say(line)
    if found.outliers.get("outlier_share") is not None:
        console.say(f"Artifact tokens: {found.outliers['verdict']} ({100 * found.outliers['outlier_share']:.3g} %)")
    if found.images_per_s is not None:
        console.say(f"{found.images_per_s:,.0f} images/s, {found.dtype} on {found.device}, batches of {found.batch}")
    for text in found.notes:
        console.note(text)
    if confusion:
        _show_confusion(found)


def _show_confusion(found: Evaluation) -> None:
    for name, counts in found.confusion.items():
        classes = found.classes[name]
        if len(classes) > SHOWN:
            console.note(f"{name}: {len(classes)} classes are too many to print; --json writes the table")
            continue
        table = Table(box=box.SIMPLE, title=f"{name}: true class by row, answer by column")
        table.add_column("")
        for one in classes:
            table.add_column(one, justify="right")
        for one, row in zip(classes, counts.tolist(), strict=True):
            table.add_row(one, *map(str, row))
        console.out.print(table)


def _disagreement(found: Evaluation) -> list[str]:
    heads = found.disagreement
    if heads is None:
        return []
    return [
        f"{heads.heads[i]} and {heads.heads[j]} differ on {100 * heads.argmax[i, j].item():.2f} % of pictures"
        for i, j in combinations(range(len(heads.heads)), 2)
    ]


def _settings(merge: dict[str, Any]) -> str:
    """Say how much was merged; and how, where that is not as usual."""
    usual = {"proportional": True, "order": "paper", "unmerge": True, "method": "tome"}
    return ", ".join(
        f"{name}={value}" for name, value in merge.items() if name != "protect" and usual.get(name) != value
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"
