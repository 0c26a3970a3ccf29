"""The work of ``vitrail merge``: every picture through the model, without and with merging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

import vitrail
from vitrail.cli import _console as console
from vitrail.cli._model import Loaded, load
from vitrail.cli._output import Names, make_directory, write_image
from vitrail.cli.asking import ask, cost_of, paint
from vitrail.cli.summary import Result, Skipped, Summary, as_data, markdown, table, write_summary
from vitrail.data import check_image, find_images, read_image
from vitrail.drawing import contact_sheet
from vitrail.errors import ImageError

SIDE = 1600
"""Longest side of a picture in the side-by-side view; the stained glass itself keeps its resolution."""

NAMED = 5
"""How many pictures a note names one by one."""


def run_merge(
    model: str,
    pictures: Sequence[Path],
    options: dict[str, Any],
    out: Path,
    *,
    size: tuple[int, ...] | None = None,
    random: bool = False,
    device: str | None = None,
) -> Summary:
    """Merge a model, run it on pictures, write what came out, and print it.

    A picture that cannot be read is reported and skipped if there are others.
    """
    paths = find_images(pictures)
    good, skipped = readable(paths)  # before the model is loaded, which may take long
    with console.err.status(f"Loading {model}"):
        loaded = load(model, random=random, size=size, device=device)
    with vitrail.merge(loaded.model, **options) as merging:  # wrong options are found before anything is written
        cost, config = cost_of(loaded, merging), merging.config
    folder = make_directory(out)
    if random:
        console.note(f"{model} has random weights here: its groups and outputs say nothing about trained ones.")

    names = Names(folder, ("glass", "side-by-side"), paths)
    results: list[Result] = []
    alike = Counter(path.name for path in paths)
    with console.progress() as bar:
        task = bar.add_task("Merging", total=len(good))
        for path in good:
            try:
                picture = read_image(path)
            except ImageError as error:
                skipped.append(_skip(path, error))
            else:
                if not results:
                    ask(loaded, picture)  # the first pass of all takes longer, and would be the one without merging
                called = path.name if alike[path.name] == 1 else str(path)
                results.append(_one_picture(loaded, options, path, picture, called, names))
            bar.advance(task)
    if not results:
        raise _none(paths)
    size = loaded.preprocessing.size
    summary = Summary(model, loaded.weights, loaded.device.type, size, config, cost, results, skipped)
    write_summary(folder, as_data(summary), markdown([summary], f"{model}, merged"))
    _print(summary, folder)
    return summary


def readable(paths: Sequence[Path]) -> tuple[list[Path], list[Skipped]]:
    """Sort out what is no picture, and say what is used of those with several frames."""
    good: list[Path] = []
    skipped: list[Skipped] = []
    moving: list[str] = []
    for path in paths:
        try:
            frames = check_image(path)
            if len(paths) == 1:
                read_image(path)  # a single one can be checked to its last pixel
        except ImageError as error:
            if len(paths) == 1:
                raise
            skipped.append(_skip(path, error))
        else:
            good.append(path)
            if frames > 1:
                moving.append(f"{path.name} ({frames} frames)")
    if not good:
        raise _none(paths)
    if moving:
        more = f" and {len(moving) - NAMED} more" if len(moving) > NAMED else ""
        console.note(f"Only the first frame is used of {', '.join(moving[:NAMED])}{more}.")
    return good, skipped


def _skip(path: Path, error: ImageError) -> Skipped:
    console.error(f"Skipped {error}")
    return Skipped(str(path), str(error))


def _none(paths: Sequence[Path]) -> ImageError:
    return ImageError(f"None of the {len(paths)} pictures could be read, so there is nothing to show.")


def _one_picture(
    loaded: Loaded, options: dict[str, Any], path: Path, picture: Image.Image, called: str, names: Names
) -> Result:
    before = ask(loaded, picture)
    with vitrail.merge(loaded.model, **options) as merging:
        glass, result = paint(loaded, merging, picture, called, before)
    files = names.for_image(path)
    write_image(files["glass"], glass)
    write_image(files["side-by-side"], contact_sheet([_smaller(picture), _smaller(glass)]))
    result.files.update({ending: file.name for ending, file in files.items()})
    return result


def _smaller(picture: Image.Image) -> Image.Image:
    copy = picture.copy()
    copy.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return copy


def _print(summary: Summary, folder: Path) -> None:
    console.out.print(table([summary], f"{summary.model} ({summary.weights} weights, {summary.device})"))
    tokens = " ".join(str(count) for count in summary.cost.tokens_after)
    console.say(f"Tokens that leave each block: {tokens} (unmerged: {summary.cost.tokens_before[-1]})")
    if summary.skipped:
        total = len(summary.pictures) + len(summary.skipped)
        console.error(f"{len(summary.skipped)} of {total} pictures could not be read and were left out, see above.")
    console.say(f"Pictures and summary.md are in {folder}", style="bold")
