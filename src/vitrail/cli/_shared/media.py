"""Media: for each modality, which commands accept its models, and how samples are checked and read.

A command knows no medium by itself: it asks the `Medium` of its data or of the model's input specification. To add a
medium to the command line, give its entry in `MEDIA` the commands and functions, decode its files in `vitrail.data`,
and draw its groups in `vitrail.drawing.groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.cli._shared import console
from vitrail.data import Dataset, InputSpec, check_image, open_dataset, to_tensor
from vitrail.data.media.modality import MODALITIES
from vitrail.data.media.recording import Recording
from vitrail.data.media.registry import MEDIA as FILES
from vitrail.data.media.registry import recording
from vitrail.errors import ImageError, UnsupportedInput

RANDOM_INPUTS = ("bench", "export")
"""Commands that read no data: they run models on random inputs of the right shape."""

WHOLE_DATASETS = ("embed", "predict")
"""Commands that run a model on every sample of a dataset, of any medium."""

READING = (*RANDOM_INPUTS, *WHOLE_DATASETS, "evaluate", "inspect", "merge", "train", "tune", "web")
"""Commands for every medium that has files."""


@dataclass(frozen=True)
class Medium:
    """What commands do with models and samples of one modality.

    Attributes:
        noun: what inputs are called.
        commands: commands that accept such models.
        check: checks a file, mostly by its header; returns its number of frames if only the first is used, else 1.
        batch: returns a sample as a batch of one for a model.
    """

    noun: str
    commands: Sequence[str] = (*RANDOM_INPUTS, *WHOLE_DATASETS)
    check: Callable[[Path], int] = lambda path: 1
    batch: Callable[[Any, InputSpec], Tensor] = lambda values, spec: spec.normalize(values[None])


def _recorded(modality: str) -> Medium:
    """Return the medium of recordings, which every command that reads files accepts."""

    def check(path: Path) -> int:
        recording(modality, path).check()
        return 1

    def batch(sample: Recording, spec: InputSpec) -> Tensor:
        return sample.tensor(spec)[None]

    return Medium(MODALITIES[modality].plural, READING, check, batch)


MEDIA = {
    "image": Medium(
        MODALITIES["image"].plural,
        (*READING, "demo", "serve"),
        check=check_image,
        batch=lambda image, spec: to_tensor([image], spec),
    ),
    "audio": _recorded("audio"),
    "video": _recorded("video"),
    "array": Medium("spectrograms or other arrays"),
}
"""Media by modality, as in `InputSpec.modality`."""


@dataclass(frozen=True)
class Readable:
    """Samples that can be read, by their file headers.

    Attributes:
        indices: the readable ones.
        skipped: the others, as a summary lists them.
        animations: names of files of which only the first frame is used.
    """

    indices: list[int]
    skipped: list[dict[str, str]] = field(default_factory=list)
    animations: list[str] = field(default_factory=list)

    def note(self) -> None:
        """Note files of several frames."""
        if self.animations:
            number, first = len(self.animations), self.animations[0]
            console.note(f"Only the first frame is used of {number} animations, such as {first}.")


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
            f"take {accepted}. It runs with {', '.join(sorted(medium.commands))}. From Python, measure it with "
            "vitrail.training.evaluate, merged or not, and look inside with vitrail.record; "
            "vitrail.training.load_trained returns the model, and labels.preprocessing normalizes its inputs"
        )


def open_for(dataset: Dataset, source: Any, spec: InputSpec, **options: Any) -> Dataset:
    """Return a dataset as samples of what a model takes: GIFs that were opened as images are opened again as clips.

    Raises:
        UnsupportedInput: the data holds something else.
    """
    if spec.modality in (dataset.modality, "array") or dataset.modality == "array":
        return dataset
    wrong = UnsupportedInput(
        f"the model takes {MEDIA[spec.modality].noun}, {' × '.join(map(str, spec.shape))}, and the data holds "
        f"{medium_of(dataset).noun}, such as {dataset.name(0)}; use a model for these, or give it "
        f"{MEDIA[spec.modality].noun}"
    )
    try:
        opened = open_dataset(source, modality=spec.modality, **options)
    except ImageError as error:
        raise wrong from error
    endings = FILES[spec.modality].extensions
    if opened.modality != spec.modality or not all(path.suffix.lower() in endings for path in opened.paths or ()):
        raise wrong
    return opened


def find_readable(dataset: Dataset) -> Readable:
    """Find the samples that can be read, by file headers.

    Of a source without files, such as a parquet file, samples are read until one can be.
    """
    good: list[int] = []
    skipped: list[dict[str, str]] = []
    frames: dict[str, int] = {}
    paths, check = dataset.paths, medium_of(dataset).check
    for index in range(len(dataset)):
        try:
            if paths is None or len(dataset) == 1:
                check_sample(dataset, index)
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
    return Readable(good, skipped, [name for name, count in frames.items() if count > 1])


def check_sample(dataset: Dataset, index: int) -> None:
    """Raise unless a sample can be read: images to the last pixel, clips and sounds by their header."""
    sample = dataset.read(index).image
    if isinstance(sample, Recording):
        sample.check()


def skip(dataset: Dataset, index: int, error: ImageError) -> dict[str, str]:
    """Print that a sample is skipped, and return it for the summary."""
    console.error(f"Skipped {error}")
    return {"picture": str(dataset.paths[index]) if dataset.paths else dataset.name(index), "reason": str(error)}


def check_any(readable: Sequence[object], dataset: Dataset) -> None:
    """Raise if no sample could be read."""
    if not readable:
        raise ImageError(f"none of the {len(dataset)} {medium_of(dataset).noun} could be read")
