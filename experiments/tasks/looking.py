"""What tokens look at, and what they know: measured on a trained model and its validation set, in one go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.common.scoring import inputs
from experiments.common.study import Trained
from vitrail.analysis.attention import overlap, spread, token_maps
from vitrail.analysis.probes.linear import fit_classifier
from vitrail.data import Dataset
from vitrail.surgery.recording import Recording, record
from vitrail.tokens import TokenLayout
from vitrail.training import Run

ONE, TWO = "one task", "two tasks"
"""Which tokens are compared: those of one task with each other, or with those of the other task."""

BATCH = 256
PROBED = 2000
"""Training pictures that linear probes learn from."""

SHOWN = 6
"""Validation pictures whose maps are kept."""


def look(run: Run, trained: Trained) -> dict[str, Any]:
    """Note where the tokens of each task look, layer by layer, and what each token knows of every task."""
    data = trained.data
    probed = data.watched(PROBED)
    seen, learned = see(trained, data.validation), see(trained, probed)
    by_layer = [token_maps(seen.attention[layer], seen.layout) for layer in seen.layers]
    last = by_layer[-1].mean(1)  # over heads
    cover = None if data.masks is None else patches_of(data.masks(), seen.layout).to(last)
    return {
        "patches": seen.layout.num_patches,
        "overlap": overlaps(by_layer, seen.layout),
        "pairs": pairs(by_layer[-1], seen.layout),
        "effective": by_name(spread(by_layer[-1]).effective, seen.layout),
        "on_object": None if cover is None else covered(by_layer, cover, seen.layout),
        "object_area": None if cover is None else cover.mean().item(),
        "mean_maps": {name: rounded(last[:, of].mean((0, 1))) for name, of in named(seen.layout)},
        "shown_maps": {name: rounded(last[:SHOWN, of].mean(1)) for name, of in named(seen.layout)},
        "knows": knows(learned, probed, seen, data.validation),
    }


def see(trained: Trained, examples: Dataset) -> Recording:
    """Record the special tokens: their attention in every layer, and what they are in the last one."""
    x = inputs(trained.model, trained.labels, examples)
    rows = record(trained.model, x, "attention", batch_size=BATCH)
    tokens = record(trained.model, x, "tokens", rows.layers[-1], batch_size=BATCH).tokens
    return replace(rows, tokens=tokens)


def named(layout: TokenLayout) -> Iterator[tuple[str, list[int]]]:
    """Give the tokens of each task by its name; those of the class as ``cls``."""
    for span, where in layout.spans():
        if span.name:
            yield span.name, list(where)


def by_name(values: Tensor, layout: TokenLayout) -> dict[str, float]:
    """Average values (Q,) of special tokens over those of a task."""
    return {name: values[of].mean().item() for name, of in named(layout)}


def overlaps(by_layer: list[Tensor], layout: TokenLayout) -> dict[str, list[float] | None]:
    """Give the cosine between maps, layer by layer: of two tokens of one task, and of tokens of two tasks."""
    owner = torch.tensor([number for number, (_, of) in enumerate(named(layout)) for _ in of])
    same = owner == owner[:, None]
    pairs = {ONE: same & ~torch.eye(len(owner), dtype=torch.bool), TWO: ~same}
    alike = [overlap(maps).cosine for maps in by_layer]
    return {
        name: [matrix[chosen].mean().item() for matrix in alike] if chosen.any() else None
        for name, chosen in pairs.items()
    }


def pairs(maps: Tensor, layout: TokenLayout) -> list[tuple[str, str, float]]:
    """Give the tasks of each two tokens, and the cosine between their maps."""
    owners = [name for name, of in named(layout) for _ in of]
    alike = overlap(maps).cosine
    return [
        (owners[one], owners[other], alike[one, other].item())
        for one, other in itertools.combinations(range(len(owners)), 2)
    ]


def patches_of(masks: Tensor, layout: TokenLayout) -> Tensor:
    """Say how much of each patch the object covers: (N, S, S) becomes (N, t, h, w)."""
    return F.adaptive_avg_pool2d(masks[:, None], layout.grid[-2:])


def covered(by_layer: list[Tensor], cover: Tensor, layout: TokenLayout) -> dict[str, list[float]]:
    """Give the share of each task's attention, of what patches get, that lies on the object, layer by layer."""
    inside = [(maps * cover[:, None, None]).sum((-3, -2, -1)).mean((0, 1)) for maps in by_layer]
    return {name: [layer[of].mean().item() for layer in inside] for name, of in named(layout)}


def knows(learned: Recording, train: Dataset, seen: Recording, test: Dataset) -> dict[str, dict[str, float]]:
    """Give the accuracy for every task of a linear probe on each task's token, learned on training pictures."""
    (before,), (after,) = learned.tokens.values(), seen.tokens.values()
    found: dict[str, dict[str, float]] = {}
    for name, of in named(seen.layout):
        x, y = before[:, of].mean(1), after[:, of].mean(1)
        found[name] = {}
        for column, task in enumerate(test.classes):
            probe = fit_classifier(x, train.labels[:, column], penalties=(1e-2,))
            right = probe.predict(y).cpu() == test.labels[:, column]
            found[name][task] = right.double().mean().item()
    return found


def rounded(maps: Tensor) -> list[Any]:
    """Give maps (..., t, h, w) of one moment as lists, with four digits."""
    found: list[Any] = maps.squeeze(-3).mul(1e4).round().div(1e4).tolist()
    return found
