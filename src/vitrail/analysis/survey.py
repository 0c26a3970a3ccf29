"""Norms over a list of checkpoints or models: when do artifacts appear?

Models are loaded one at a time, so a list of checkpoints needs the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from itertools import takewhile
from typing import Any, NamedTuple

from torch import nn

from vitrail._arguments import checked
from vitrail.analysis.norms import NormAccumulator, Norms
from vitrail.analysis.result import Result
from vitrail.data.batches import Batches, open_batches
from vitrail.errors import InvalidOption, UnsupportedInput, VitrailError
from vitrail.surgery.recording import Images, stream

MAPS = 4
"""Images whose norm maps are kept for each model."""


class NormMap(NamedTuple):
    """Norms of the patches of one image after the last block, row by row; the frames of a clip are below each other."""

    grid: tuple[int, int]
    norms: list[float]


class Entry(Result):
    """One model of a survey."""

    name: str  # name of the model
    parameters: int  # number of parameters
    depth: int  # number of blocks
    norms: Norms | None  # norms, threshold, verdict and onset; None after a failure
    problem: str = ""  # the failure; empty otherwise
    maps: tuple[NormMap, ...] = field(default=(), repr=False, metadata={"json": False})  # of the first images


class Survey(Result):
    """Several models on the same images, in the given order."""

    entries: tuple[Entry, ...]  # one per model
    first: str | None  # name of the first model from which on all have artifacts; None if the last one has none

    def table(self) -> list[dict[str, Any]]:
        """Return one flat row per model: name, parameters, verdict, confidence, threshold, share, onset, problem."""
        columns = ("verdict", "confidence", "threshold", "outlier_share", "onset")
        return [
            {
                "name": entry.name,
                "parameters": entry.parameters,
                **{name: getattr(entry.norms, name, None) for name in columns},
                "problem": entry.problem,
            }
            for entry in self.entries
        ]


@checked
def survey(
    models: Mapping[str, nn.Module | Callable[[], nn.Module]],
    data: Images,
    *,
    batch_size: int | None = None,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> Survey:
    """Analyze the norms of several models on the same images.

    A model that fails is reported in its entry; the others go on.

    Args:
        models: models by name, or functions that load them, called one after the other: checkpoints of a training run
            by step, or models by size.
        data: image files or preprocessed tensors; see :data:`~vitrail.surgery.recording.Images`. They are read once
            per model, batch by batch; files are preprocessed as each model expects. An iterator is held in memory.
        batch_size: images per batch, unless ``data`` comes in batches.
        progress: called with a model's name, the number of models done, and the number of models.
    """
    if not isinstance(models, Mapping) or not models:
        raise InvalidOption("models must be given by name: {'step 1000': model, 'step 2000': lambda: load(...)}")
    for name, given in models.items():
        if not callable(given):
            raise InvalidOption(f"expected a model or a function that loads one; got {given!r:.100} as {name}")
    batches = open_batches(data, with_labels=False).repeatable()
    entries = []
    for done, (name, given) in enumerate(models.items()):
        if progress is not None:
            progress(name, done, len(models))
        entries.append(_analyze(name, given, batches, batch_size))
    if all(entry.norms is None for entry in entries):
        raise UnsupportedInput(f"all {len(entries)} models failed; {entries[0].name}: {entries[0].problem}")
    measured = [entry for entry in reversed(entries) if entry.norms is not None]
    lasting = [*takewhile(lambda entry: entry.norms.verdict == "artifacts", measured)]  # type: ignore[union-attr]
    return Survey(tuple(entries), lasting[-1].name if lasting else None)


def _analyze(name: str, given: nn.Module | Callable[[], nn.Module], batches: Batches, batch_size: int | None) -> Entry:
    parameters = depth = 0
    try:
        model = given if isinstance(given, nn.Module) else given()
        parameters = sum(weight.numel() for weight in model.parameters())
        norms, maps = None, list[NormMap]()
        for recording in stream(model, batches, ("entry", "norms"), batch_size=batch_size, device="cpu"):
            depth = len(recording.layers)
            norms = (norms or NormAccumulator(depth)).add_recording(recording)
            (time, height, width), last = recording.layout.grid, recording.norms[recording.layers[-1]]
            for row in last[: MAPS - len(maps), recording.layout.patches]:
                maps.append(NormMap((time * height, width), row.tolist()))
        if norms is None:
            raise UnsupportedInput("there are no images")
        return Entry(name, parameters, depth, norms.result(), maps=tuple(maps))
    except (VitrailError, AssertionError, RuntimeError, ValueError, OSError) as error:  # timm asserts the size
        return Entry(name, parameters, depth, None, f"{type(error).__name__}: {error}")
