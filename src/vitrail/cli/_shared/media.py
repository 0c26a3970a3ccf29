"""Media: for each modality, which commands accept its models, how samples are read and how groups are drawn.

A command knows no medium by itself: it asks the `Medium` of its data or of the model's input specification. To add a
medium to the command line, give its entry in `MEDIA` the commands and functions, and decode its files in
`vitrail.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from vitrail.cli._shared import console
from vitrail.data import Dataset, InputSpec, check_image, to_tensor
from vitrail.drawing import contact_sheet, stained_glass
from vitrail.errors import ImageError, UnsupportedInput

SIDE = 1600
"""Longest side of an image in the side-by-side view; the stained glass keeps the image's resolution."""

RANDOM_INPUTS = ("bench", "export")
"""Commands that read no data: they run models on random inputs of the right shape."""

WHOLE_DATASETS = ("embed", "predict")
"""Commands that run a model on every sample of a dataset, of any medium."""


@dataclass(frozen=True)
class Medium:
    """What commands do with models and samples of one modality.

    Attributes:
        noun: what inputs are called.
        commands: commands that accept such models.
        check: checks a file, mostly by its header; returns its number of frames, of which the first is used.
        batch: returns a sample as a batch of one for a model.
        draw: draws a sample's groups (h, w); returns images by the ending of their files, the drawing first.
    """

    noun: str
    commands: Sequence[str] = (*RANDOM_INPUTS, *WHOLE_DATASETS)
    check: Callable[[Path], int] = lambda path: 1
    batch: Callable[[Any, InputSpec], Tensor] = lambda values, spec: spec.normalize(values[None])
    draw: Callable[[Any, Any], dict[str, Image.Image]] = lambda values, groups: {}


def _draw_glass(image: Image.Image, groups: Any) -> dict[str, Image.Image]:
    glass = stained_glass(image, groups)
    sides = [image.copy(), glass.copy()]
    for side in sides:
        side.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return {"glass": glass, "side-by-side": contact_sheet(sides)}


MEDIA = {
    "image": Medium(
        "images",
        (*RANDOM_INPUTS, *WHOLE_DATASETS, "merge", "tune", "demo", "inspect", "web"),
        check=check_image,
        batch=lambda image, spec: to_tensor([image], spec),
        draw=_draw_glass,
    ),
    "audio": Medium("sounds"),
    "video": Medium("video clips"),
    "array": Medium("spectrograms or other arrays"),
}
"""Media by modality, as in `InputSpec.modality`."""


def medium_of(dataset: Dataset) -> Medium:
    """Return the medium of a dataset's samples."""
    return MEDIA[dataset.modality]


def check_accepted(name: str, spec: InputSpec, command: str) -> None:
    """Raise if a command does not accept models of this modality."""
    medium = MEDIA[spec.modality]
    if command not in medium.commands:
        accepted = " or ".join(one.noun for one in MEDIA.values() if command in one.commands)
        raise UnsupportedInput(
            f"{name} takes {medium.noun}, {' × '.join(map(str, spec.shape))}, and vitrail {command} is for models that "
            f"take {accepted}. From Python, measure it with vitrail.training.evaluate on Arrays, merged or not, and "
            "look inside with vitrail.record; vitrail.training.load_trained returns the model, and its "
            "labels.preprocessing normalizes arrays."
        )


def find_readable(dataset: Dataset) -> tuple[list[int], list[dict[str, str]]]:
    """Return the indices of readable samples, and those that are not, by file headers; note files of several frames.

    Of a source without files, such as a parquet file, samples are read until one can be.
    """
    good: list[int] = []
    skipped: list[dict[str, str]] = []
    frames: dict[str, int] = {}
    paths, check = dataset.paths, medium_of(dataset).check
    for index in range(len(dataset)):
        try:
            if paths is None or len(dataset) == 1:
                dataset.read(index)  # to the last pixel
            if paths is None:
                good += range(index, len(dataset))
                break
            frames[dataset.name(index)] = check(paths[index])
            good.append(index)
        except ImageError as error:
            if len(dataset) == 1:
                raise
            skipped.append(skip(dataset, index, error))
    check_any(good, dataset)
    several = [name for name, count in frames.items() if count > 1]
    if several:
        console.note(f"Only the first frame is used of {len(several)} animations, such as {several[0]}.")
    return good, skipped


def skip(dataset: Dataset, index: int, error: ImageError) -> dict[str, str]:
    """Print that a sample is skipped, and return it for the summary."""
    console.error(f"Skipped {error}")
    return {"picture": str(dataset.paths[index]) if dataset.paths else dataset.name(index), "reason": str(error)}


def check_any(readable: Sequence[object], dataset: Dataset) -> None:
    """Raise if no sample could be read."""
    if not readable:
        raise ImageError(f"none of the {len(dataset)} {medium_of(dataset).noun} could be read")
