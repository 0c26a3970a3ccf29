"""``vitrail evaluate``: accuracy of a trained model, head by head and fused, merged or not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

import typer

from vitrail import training
from vitrail._wording import counted
from vitrail.analysis.result import plain
from vitrail.cli._shared import console, options
from vitrail.cli._shared.output import check_writable, write_text
from vitrail.cli._shared.ranks import command
from vitrail.data.media.modality import MODALITIES
from vitrail.training import Evaluation
from vitrail.training.run_directory import load_classifier

MAX_CONFUSION = 30
"""Largest number of classes for which a confusion matrix is printed; the JSON has all."""

EXAMPLES = (
    "vitrail evaluate runs/student val.parquet",
    "vitrail evaluate runs/student/last photos/ --merge r=8 -o result.json",
    "vitrail evaluate runs/pets breeds.parquet --tasks breed",
    "vitrail evaluate vitrail:audio digits.parquet --merge r=0,4,8",
    "vitrail evaluate timm:deit_small_patch16_224 val/ --merge r=0,4,8,16 --class-map names.json",
    "On several devices: torchrun --nproc-per-node 4 -m vitrail evaluate runs/student val.parquet",
)


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"Run or model directory, {options.INCLUDED}, or timm:NAME, …")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Labeled images, sounds or clips, as for training.")],
    merge: Annotated[
        str | None,
        typer.Option(
            metavar="MERGE", help="Merge tokens, such as r=8, keep=0.5,schedule=decreasing, or a sweep: r=0,4,8."
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option("--labels", "--tasks", metavar="COLUMNS", help="Label columns; by default those of the training."),
    ] = None,
    masks: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of masks for a folder of images.")] = None,
    class_map: Annotated[
        Path | None,
        typer.Option("--class-map", metavar="FILE", help="JSON: the model's name of each class of the data."),
    ] = None,
    size: Annotated[
        int | None, typer.Option("--image-size", min=1, metavar="N", help="Input size; by default the model's.")
    ] = None,
    batch: options.Batch = 256,
    device: options.Device = None,
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16", help="float32, or bfloat16 autocast.")] = "fp32",
    max_unreadable: Annotated[
        float, typer.Option("--max-unreadable", metavar="X", help="Fraction of images that may be unreadable.")
    ] = 0.01,
    confusion: Annotated[bool, typer.Option("--confusion", help="Print the confusion matrix.")] = False,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="This process, or actors of a Ray cluster.")
    ] = "local",
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Ray cluster; by default a new one.")] = None,
    actors: Annotated[int | None, typer.Option(min=1, metavar="N", help="Actors of Ray.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write all figures as JSON.")] = None,
) -> None:
    """Print the figures of all heads, of the model merged or not; -o and --json have more of them."""
    with command():
        if out is not None:
            check_writable(out, "-o")
        columns = tuple(part.strip() for part in (labels or "").split(",") if part.strip())
        settings = options.parse_sweep(merge)
        model = load_classifier(checkpoint) if len(settings) > 1 else checkpoint
        results = {}
        for name, setting in settings.items():
            with console.bars() as progress:
                results[name] = training.evaluate(
                    model,
                    data,
                    labels=columns,
                    class_map=class_map,
                    masks=masks,
                    merge=setting,
                    size=size,
                    batch=batch,
                    device=device,
                    dtype=dtype,
                    max_unreadable=max_unreadable,
                    progress=progress,
                    engine=engine,
                    address=address,
                    actors=actors,
                )
        if len(results) > 1:
            _print_sweep(results)
        for found in results.values():
            if len(results) == 1:
                _print(found)
            if confusion:
                _print_confusion(found)
        values = {name: found.to_dict() for name, found in results.items()}
        content = plain(values if len(values) > 1 else next(iter(values.values())))
        console.answer(content)
        if out is not None and not console.out.quiet:  # last: what was measured is printed in any case
            write_text(out, f"{json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False)}\n")


def _print_sweep(results: dict[str, Evaluation]) -> None:
    """Print one column for each setting, the unmerged model first."""
    first = next(iter(results.values()))
    samples = MODALITIES[first.modality]
    table = console.table("", *results, title=counted(first.count, samples.noun))
    figures = [_main_figures(found) for found in results.values()]
    for name in figures[0]:
        table.add_row(name, *(each[name] for each in figures))
    table.add_row("loss", *(f"{found.loss:.4f}" for found in results.values()))
    speeds = [found.images_per_s for found in results.values()]
    table.add_row(f"{samples.plural}/s", *("–" if speed is None else f"{speed:,.0f}" for speed in speeds))
    console.show(table)
    for text in dict.fromkeys(text for found in results.values() for text in found.notes):
        console.note(text)


def _main_figures(found: Evaluation) -> dict[str, str]:
    """Return the figures by which each head is judged, as printed."""
    classes = {name: share for name, share in found.accuracy.items() if name not in {*found.mean_ap, *found.miou}}
    shares: dict[str, Mapping[str, float | None]] = {"accuracy": classes, "mAP": found.mean_ap, "mIoU": found.miou}
    figures = {f"{title}, {name}": _percent(share) for title, each in shares.items() for name, share in each.items()}
    for name, error in found.rmse.items():
        r2 = found.r2.get(name)
        figures |= {f"RMSE, {name}": f"{error:.4g}", f"MAE, {name}": f"{found.mae[name]:.4g}"}
        figures[f"R², {name}"] = "–" if r2 is None else f"{r2:.4f}"
    return figures


def _print(found: Evaluation) -> None:
    settings = ", ".join(f"{name}={value}" for name, value in (found.merge or {}).items() if name != "protect")
    merged = "not merged" if found.merge is None else f"merged: {settings}"
    samples = MODALITIES[found.modality]
    console.say(f"{counted(found.count, samples.noun)}, {merged}", style="bold")
    others = {*found.mean_ap, *found.miou}
    if classes := [name for name in found.accuracy if name not in others]:
        table = console.table("head", "accuracy", "top 5", "calibration error")
        for name in classes:
            shares = (found.accuracy[name], found.top5.get(name), found.calibration.get(name))
            table.add_row(name, *map(_percent, shares))
        console.show(table)
    if found.rmse:
        table = console.table("head", "RMSE", "MAE", "R²")
        for name, error in found.rmse.items():
            r2 = found.r2.get(name)
            table.add_row(name, f"{error:.4g}", f"{found.mae[name]:.4g}", "–" if r2 is None else f"{r2:.4f}")
        console.show(table)
    for name, mean in found.mean_ap.items():
        _print_classes(found, name, ("mAP", mean, "average precision", found.ap[name]), "label accuracy")
    for name, mean in found.miou.items():
        _print_classes(found, name, ("mIoU", mean, "IoU", found.iou[name]), "pixel accuracy")
    console.say(f"Loss {found.loss:.4f}")
    if heads := found.disagreement:
        for i, j in combinations(range(len(heads.heads)), 2):
            share = 100 * heads.argmax[i, j].item()
            console.say(f"{heads.heads[i]} and {heads.heads[j]} differ on {share:.2f} % of {samples.plural}")
    if found.outliers.get("outlier_share") is not None:
        console.say(f"Artifact tokens: {found.outliers['verdict']} ({100 * found.outliers['outlier_share']:.3g} %)")
    if found.images_per_s is not None:
        rate = f"{found.images_per_s:,.0f} {samples.plural}/s"
        console.say(f"{rate}, {found.dtype} on {found.device}, batch size {found.batch}")
    for text in found.notes:
        console.note(text)


def _print_classes(
    found: Evaluation, name: str, figures: tuple[str, float | None, str, Sequence[float | None]], accuracy: str
) -> None:
    """Print a mean figure, and that of each class where they are few."""
    title, mean, each, values = figures
    console.say(f"{name}: {title} {_percent(mean)}, {accuracy} {_percent(found.accuracy[name])}")
    if len(values) <= MAX_CONFUSION:
        table = console.table("class", each)
        for one, value in zip(found.classes[name], values, strict=True):
            table.add_row(one, _percent(value))
        console.show(table)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"


def _print_confusion(found: Evaluation) -> None:
    for name, counts in found.confusion.items():
        classes = found.classes[name]
        if len(classes) > MAX_CONFUSION:
            console.note(f"{name}: {len(classes)} classes are too many to print; --json has the confusion matrix")
            continue
        table = console.table("", *classes, title=f"{name}: true class in rows, prediction in columns")
        for one, row in zip(classes, counts.tolist(), strict=True):
            table.add_row(one, *map(str, row))
        console.show(table)
