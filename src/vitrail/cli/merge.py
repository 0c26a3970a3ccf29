"""The work of ``vitrail merge``: every image through the model, without and with merging."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

import vitrail
from vitrail.cli._shared import console
from vitrail.cli._shared.model import load
from vitrail.cli._shared.output import Names, make_directory, write_image
from vitrail.cli._shared.prediction import cost_of, paint, predict
from vitrail.cli._shared.summary import Result, Skipped, Summary, markdown, table, write_summary
from vitrail.data import Dataset, check_image, open_dataset
from vitrail.drawing import contact_sheet
from vitrail.errors import ImageError

SIDE = 1600
"""Longest side of an image in the side-by-side view; the stained glass keeps the image's resolution."""

NAMED = 5
"""Most images that a note names one by one."""


def run_merge(
    model: str,
    images: Sequence[Path],
    options: dict[str, Any],
    out: Path,
    *,
    size: tuple[int, ...] | None = None,
    random: bool = False,
    device: str | None = None,
    limit: int | None = None,
) -> Summary:
    """Merge a model, run it on images from any source, and write and print the results.

    An image that cannot be read is reported, and skipped if there are others.
    """
    dataset = open_dataset(images, labels=None, limit=limit)
    good, skipped = check_images(dataset)  # before loading the model, which may take long
    with console.err.status(f"Loading {model}"):
        loaded = load(model, random=random, size=size, device=device)
    with vitrail.merge(loaded.model, **options) as merging:  # wrong options are found before anything is written
        cost, config = cost_of(loaded, merging), merging.config
    folder = make_directory(out)
    if random:
        console.note(f"{model} has random weights here: its groups and outputs say nothing about trained ones.")

    paths = file_names(dataset)
    names = Names(folder, ("glass", "side-by-side"), paths)
    results: list[Result] = []
    with console.progress() as bar:
        task = bar.add_task("Merging", total=len(good))
        for index in good:
            try:
                image = dataset.read(index).image
            except ImageError as error:
                skipped.append(_skip(dataset, index, error))
            else:
                if not results:
                    predict(loaded, image)  # the first pass is slower, and would count as the one without merging
                before = predict(loaded, image)
                with vitrail.merge(loaded.model, **options) as merging:
                    glass, result = paint(loaded, merging, image, dataset.name(index), before)
                files = names.for_image(paths[index])
                write_image(files["glass"], glass)
                write_image(files["side-by-side"], contact_sheet([_reduced(image), _reduced(glass)]))
                result.files.update({ending: file.name for ending, file in files.items()})
                results.append(result)
            bar.advance(task)
    if not results:
        raise ImageError(f"none of the {len(dataset)} images could be read")
    input_size = loaded.preprocessing.size
    summary = Summary(model, loaded.weights, loaded.device.type, input_size, config, cost, results, skipped)
    write_summary(folder, asdict(summary), markdown([summary], f"{model}, merged"))
    _print(summary, folder)
    return summary


def check_images(dataset: Dataset) -> tuple[list[int], list[Skipped]]:
    """Return the indices of readable images, and those that are not, by file headers; report animations.

    Of a source without files, such as a parquet file, images are read until one can be.
    """
    good: list[int] = []
    skipped: list[Skipped] = []
    animated: list[str] = []
    paths = dataset.paths
    for index in range(len(dataset)):
        try:
            frames = 1
            if paths is None or len(dataset) == 1:
                dataset.read(index)  # to the last pixel
            if paths is not None:
                frames = check_image(paths[index])
        except ImageError as error:
            if len(dataset) == 1:
                raise
            skipped.append(_skip(dataset, index, error))
            continue
        if paths is None:
            good += range(index, len(dataset))
            break
        good.append(index)
        if frames > 1:
            animated.append(f"{dataset.name(index)} ({frames} frames)")
    if not good:
        raise ImageError(f"none of the {len(dataset)} images could be read")
    if animated:
        more = f" and {len(animated) - NAMED} more" if len(animated) > NAMED else ""
        console.note(f"Only the first frame is used of {', '.join(animated[:NAMED])}{more}.")
    return good, skipped


def file_names(dataset: Dataset) -> Sequence[Path]:
    """Return a path to name each image's results after: its file, or its name without special characters."""
    return dataset.paths or [Path(re.sub(r"[^\w./-]+", "-", name)) for name in dataset.names]


def _skip(dataset: Dataset, index: int, error: ImageError) -> Skipped:
    console.error(f"Skipped {error}")
    return Skipped(str(dataset.paths[index]) if dataset.paths else dataset.name(index), str(error))


def _reduced(image: Image.Image) -> Image.Image:
    copy = image.copy()
    copy.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return copy


def _print(summary: Summary, folder: Path) -> None:
    console.out.print(table([summary], f"{summary.model} ({summary.weights} weights, {summary.device})"))
    tokens = " ".join(str(count) for count in summary.cost.tokens_after)
    console.say(f"Tokens after each block: {tokens} (unmerged: {summary.cost.tokens_before[-1]})")
    if summary.skipped:
        total = len(summary.pictures) + len(summary.skipped)
        console.error(f"{len(summary.skipped)} of {total} images could not be read and were skipped, see above.")
    console.say(f"Images and summary.md are in {folder}", style="bold")
