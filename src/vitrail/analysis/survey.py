"""When artifacts appear: the same summary over layers, over a list of checkpoints, or over a list of models.

Models come one at a time and are let go before the next, so a list of checkpoints needs the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitrail.analysis.norms.distribution import NormAccumulator, Norms
from vitrail.analysis.result import Result
from vitrail.data.batches import Batches, open_batches
from vitrail.errors import InvalidOption, UnsupportedInput, VitrailError
from vitrail.surgery.recording import Pictures, stream


@dataclass(frozen=True)
class Entry(Result):
    """One model of a survey.

    Attributes:
        name: what it is called.
        parameters: how many it has.
        depth: how many blocks.
        norms: its norms, threshold, verdict and onset; None where it could not be looked at.
        problem: why it could not be; empty otherwise.
    """

    name: str
    parameters: int
    depth: int
    norms: Norms | None
    problem: str = ""


@dataclass(frozen=True)
class Survey(Result):
    """Several models on the same pictures, in the order in which they were given.

    Attributes:
        entries: one for each.
        first: name of the first model from which on all have artifacts; None where the last one has none.
    """

    entries: tuple[Entry, ...]
    first: str | None

    def table(self) -> list[dict[str, Any]]:
        """Give one flat row for each model: name, parameters, verdict, confidence, threshold, share, onset."""
        rows = []
        for entry in self.entries:
            norms = entry.norms
            found = {
                name: None if norms is None else getattr(norms, name)
                for name in ("verdict", "confidence", "threshold", "outlier_share", "onset")
            }
            rows.append({"name": entry.name, "parameters": entry.parameters, **found, "problem": entry.problem})
        return rows


def survey(
    models: Mapping[str, nn.Module | Callable[[], nn.Module]],
    data: Pictures,
    *,
    batch_size: int | None = None,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> Survey:
    """Count the norms of several models on the same pictures.

    Args:
        models: models by name, or functions that load them, called one after the other: checkpoints of a training run
            by step, or models by size.
        data: pictures, as files or prepared; see :data:`~vitrail.surgery.recording.Pictures`. They are walked over once
            for each model, one batch in memory at a time; files are prepared as each model expects them. An iterator,
            which can be walked over once, is held in memory as a whole.
        batch_size: pictures at once, where they do not come in batches.
        progress: called with a model's name, how many models are done, and how many there are.
    """
    if not isinstance(models, Mapping) or not models:
        raise InvalidOption("models are given by name: {'step 1000': model, 'step 2000': lambda: load(...)}")
    wrong = [name for name, given in models.items() if not callable(given)]
    if wrong:
        raise InvalidOption(f"a model is one, or a function that loads it; got {models[wrong[0]]!r:.100} as {wrong[0]}")
    feed = open_batches(data, with_labels=False).repeatable()
    entries = []
    for done, (name, given) in enumerate(models.items()):
        if progress is not None:
            progress(name, done, len(models))
        entries.append(_look(name, given, feed, batch_size))
    if all(entry.norms is None for entry in entries):
        raise UnsupportedInput(
            f"none of {len(entries)} models could be looked at; {entries[0].name}: {entries[0].problem}"
        )
    return Survey(tuple(entries), _first(entries))


def _look(name: str, given: nn.Module | Callable[[], nn.Module], feed: Batches, batch_size: int | None) -> Entry:
    """Look at one model; what is wrong with it is written down, and the others go on."""
    parameters = depth = 0
    try:
        model = given if isinstance(given, nn.Module) else given()
        parameters = sum(weight.numel() for weight in model.parameters())
        norms = None
        for recording in stream(model, feed, "norms", batch_size=batch_size, device="cpu"):
            depth = len(recording.layers)
            norms = norms or NormAccumulator(depth)
            patches = recording.layout.patches
            norms.add(torch.stack([recording.norms[layer][:, patches] for layer in recording.layers]))
        if norms is None:
            raise UnsupportedInput("there were no pictures")
        return Entry(name, parameters, depth, norms.result())
    except (VitrailError, AssertionError, RuntimeError, ValueError, OSError) as error:  # timm asserts the size
        return Entry(name, parameters, depth, None, f"{type(error).__name__}: {error}")


def _first(entries: list[Entry]) -> str | None:
    first = None
    for entry in reversed([entry for entry in entries if entry.norms is not None]):
        assert entry.norms is not None
        if entry.norms.verdict != "artifacts":
            break
        first = entry.name
    return first
