"""Attention and linear probes of task tokens, measured on a trained model and its validation set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.common.inputs import all_inputs
from experiments.common.study import TrainedModel
from vitrail.analysis.attention import overlap, spread, token_maps
from vitrail.analysis.probes.linear import fit_classifier
from vitrail.data import Dataset
from vitrail.surgery import Recording, record
from vitrail.tokens import TokenLayout
from vitrail.training import Run

SAME_TASK, OTHER_TASK = "one task", "two tasks"
"""Pairs of tokens: of the same task, or of different tasks. The values are keys in the rows."""

BATCH = 256
PROBE_SAMPLES = 2000
"""Training samples that linear probes are fitted on."""

SHOWN = 6
"""Validation images whose maps are kept."""


def measure(run: Run, trained: TrainedModel) -> dict[str, Any]:
    """Measure the attention of each task's tokens by layer, and what a probe reads from each token."""
    data = trained.data
    probe_data = data.monitored(PROBE_SAMPLES)
    recording, probe_recording = record_special(trained, data.validation), record_special(trained, probe_data)
    layout = recording.layout
    by_layer = [token_maps(recording.attention[layer], layout) for layer in recording.layers]
    last = by_layer[-1].mean(1)  # over heads
    coverage = None if data.masks is None else patch_coverage(data.masks(), layout).to(last)
    return {
        "patches": layout.num_patches,
        "overlap": mean_overlaps(by_layer, layout),
        "pairs": pair_overlaps(by_layer[-1], layout),
        "effective": by_name(spread(by_layer[-1]).effective, layout),
        "on_object": None if coverage is None else attention_on_object(by_layer, coverage, layout),
        "object_area": None if coverage is None else coverage.mean().item(),
        "mean_maps": {name: rounded(last[:, where].mean((0, 1))) for name, where in named_tokens(layout)},
        "shown_maps": {name: rounded(last[:SHOWN, where].mean(1)) for name, where in named_tokens(layout)},
        "knows": probe_accuracy(probe_recording, probe_data, recording, data.validation),
    }


def record_special(trained: TrainedModel, examples: Dataset) -> Recording:
    """Record the attention of the special tokens in every layer, and their features in the last one."""
    x = all_inputs(trained.model, trained.labels, examples)
    rows = record(trained.model, x, "attention", batch_size=BATCH)
    tokens = record(trained.model, x, "tokens", rows.layers[-1], batch_size=BATCH).tokens
    return replace(rows, tokens=tokens)


def named_tokens(layout: TokenLayout) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and the indices of each group of special tokens: a task, or ``cls``."""
    for span, where in layout.spans():
        if span.name:
            yield span.name, list(where)


def by_name(values: Tensor, layout: TokenLayout) -> dict[str, float]:
    """Average values (Q,) of special tokens over the tokens of each task."""
    return {name: values[where].mean().item() for name, where in named_tokens(layout)}


def mean_overlaps(by_layer: list[Tensor], layout: TokenLayout) -> dict[str, list[float] | None]:
    """Return the mean cosine between attention maps by layer: within a task, and between tasks."""
    owner = torch.tensor([number for number, (_, where) in enumerate(named_tokens(layout)) for _ in where])
    same = owner == owner[:, None]
    pairs = {SAME_TASK: same & ~torch.eye(len(owner), dtype=torch.bool), OTHER_TASK: ~same}
    cosines = [overlap(maps).cosine for maps in by_layer]
    return {
        name: [matrix[chosen].mean().item() for matrix in cosines] if chosen.any() else None
        for name, chosen in pairs.items()
    }


def pair_overlaps(maps: Tensor, layout: TokenLayout) -> list[tuple[str, str, float]]:
    """Return the tasks of every two tokens and the cosine between their attention maps."""
    owners = [name for name, where in named_tokens(layout) for _ in where]
    cosines = overlap(maps).cosine
    return [
        (owners[one], owners[other], cosines[one, other].item())
        for one, other in itertools.combinations(range(len(owners)), 2)
    ]


def patch_coverage(masks: Tensor, layout: TokenLayout) -> Tensor:
    """Return the share of each patch that the object covers: (N, S, S) to (N, t, h, w)."""
    return F.adaptive_avg_pool2d(masks[:, None], layout.grid[-2:])


def attention_on_object(by_layer: list[Tensor], coverage: Tensor, layout: TokenLayout) -> dict[str, list[float]]:
    """Return the share of each task's attention over patches that is on the object, by layer."""
    inside = [(maps * coverage[:, None, None]).sum((-3, -2, -1)).mean((0, 1)) for maps in by_layer]
    return {name: [layer[where].mean().item() for layer in inside] for name, where in named_tokens(layout)}


def probe_accuracy(
    fitted_on: Recording, train: Dataset, tested_on: Recording, test: Dataset
) -> dict[str, dict[str, float]]:
    """Return the accuracy of a linear probe for every task on each task's token, fitted on training samples."""
    (train_tokens,), (test_tokens,) = fitted_on.tokens.values(), tested_on.tokens.values()
    accuracy: dict[str, dict[str, float]] = {}
    for name, where in named_tokens(tested_on.layout):
        x, y = train_tokens[:, where].mean(1), test_tokens[:, where].mean(1)
        accuracy[name] = {}
        for column, task in enumerate(test.classes):
            probe = fit_classifier(x, train.labels[:, column], penalties=(1e-2,))
            correct = probe.predict(y).cpu() == test.labels[:, column]
            accuracy[name][task] = correct.double().mean().item()
    return accuracy


def rounded(maps: Tensor) -> list[Any]:
    """Return maps (..., 1, h, w) as lists, rounded to four digits."""
    values: list[Any] = maps.squeeze(-3).mul(1e4).round().div(1e4).tolist()
    return values
