"""The few neurons that make a model's artifacts: those that fire most where artifacts are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.surgery.asked import check_layers, is_whole
from vitrail.surgery.record import stream
from vitrail.tokens import TokenLayout

LEAST_FACTOR = 2.0
"""How many times as long as usual artifacts are, at least."""


@dataclass(frozen=True)
class RegisterNeurons:
    """The neurons that make artifacts, and how they were found.

    Attributes:
        by_layer: their numbers in the MLP of each block.
        scores: their mean activation where artifacts are, likewise.
        threshold: norm in the last layer above which a patch was taken for an artifact.
        outlier_share: share of patches above it.
        onset: first block after which the same patches are outliers; neurons are looked for up to it.
        pictures: how many pictures were looked at.
    """

    by_layer: Mapping[int, tuple[int, ...]]
    scores: Mapping[int, tuple[float, ...]]
    threshold: float
    outlier_share: float
    onset: int
    pictures: int

    @property
    def count(self) -> int:
        """How many neurons there are."""
        return sum(len(neurons) for neurons in self.by_layer.values())


def find_register_neurons(
    model: nn.Module,
    data: Tensor | Iterable[Any],
    count: int = 10,
    *,
    layers: int | Sequence[int] | None = None,
    threshold: float | None = None,
    batch_size: int | None = None,
) -> RegisterNeurons:
    """Find the neurons that fire most where artifacts are.

    Args:
        model: any supported model, not merged.
        data: prepared pictures, or batches that can be walked over twice.
        count: how many neurons to take, over all layers looked at.
        layers: blocks to look at; by default those up to the one where artifacts appear.
        threshold: norm of an artifact in the last layer; by default the mean plus three standard deviations, where
            what is above that is twice as long as usual.
        batch_size: pictures at once, where ``data`` is one tensor.
    """
    if not is_whole(count) or count < 1:
        raise InvalidOption(f"the number of register neurons is 1 or more; got {count!r}")
    if threshold is not None and not (isinstance(threshold, int | float) and math.isfinite(threshold)):
        raise InvalidOption(f"the threshold is a norm, a finite number; got {threshold!r}")
    wanted = None if layers is None else check_layers(layers, len(find(model).blocks))
    data = data if isinstance(data, Tensor) or not isinstance(data, Iterable) else list(data)
    norms, layout = _norms(model, data, batch_size)
    special = layout.num_special
    patches = norms[:, :, special:]
    if threshold is None:
        threshold = _usual_threshold(patches[-1])
    outliers = patches[-1] > threshold
    if not outliers.any() or outliers.all():
        raise UnsupportedInput(
            f"{'every' if outliers.any() else 'no'} patch of {patches.shape[1]} pictures has a norm above "
            f"{threshold:.4g} after the last block, so there are no artifacts to find neurons of; give more pictures, "
            "or another threshold"
        )
    onset = _onset(patches, outliers)
    chosen = range(onset + 1) if wanted is None else wanted
    sums: dict[int, Tensor] = {}
    start = 0
    for recording in stream(model, data, "mlp", list(chosen), batch_size=batch_size):
        where = outliers[start : start + len(recording)]
        start += len(recording)
        for layer, activations in recording.mlp.items():
            fired = activations[:, special:][where.to(activations.device)].double().sum(0).cpu()
            sums[layer] = sums.get(layer, torch.zeros_like(fired)) + fired
    means = {layer: total / int(outliers.sum()) for layer, total in sums.items()}
    return _strongest(means, count, threshold, float(outliers.double().mean()), onset, patches.shape[1])


def _usual_threshold(last: Tensor) -> float:
    """Give the mean plus three standard deviations of norms (B, P); where nothing stands far above, refuse."""
    threshold = float(last.mean() + 3 * last.std())
    above = last[last > threshold]
    if len(above) and float(above.median()) < LEAST_FACTOR * float(last.median()):
        raise UnsupportedInput(
            f"the norms of {last.numel()} patches form one group: the longest are not {LEAST_FACTOR:g} times as long "
            "as usual, so there are no artifacts to find neurons of; to look for what fires at the longest tokens all "
            "the same, give a threshold"
        )
    return threshold


def _norms(model: nn.Module, data: Any, batch_size: int | None) -> tuple[Tensor, TokenLayout]:
    """Give the norms (L, B, N) of all tokens after every block."""
    parts, layout = [], None
    for recording in stream(model, data, "norms", batch_size=batch_size, device="cpu"):
        layout = recording.layout
        parts.append(torch.stack([recording.norms[layer] for layer in recording.layers]))
    if layout is None:
        raise UnsupportedInput("there were no pictures to find register neurons with")
    if not all(torch.isfinite(part).all() for part in parts):
        raise UnsupportedInput(
            "some tokens of this model are not finite on these pictures; artifacts cannot be told from them"
        )
    return torch.cat(parts, 1), layout


def _onset(patches: Tensor, outliers: Tensor) -> int:
    """Give the first block after which, and after every later one, the last layer's outliers stand out.

    They do where they are longer than other patches by at least the square root of the factor of the last layer: half
    of the way, as factors go.
    """
    factor = torch.stack([layer[outliers].mean() / layer[~outliers].mean().clamp_min(1e-12) for layer in patches])
    below = (factor < factor[-1].clamp_min(1).sqrt()).nonzero()
    return min(int(below[-1]) + 1, len(patches) - 1) if len(below) else 0


def _strongest(
    means: Mapping[int, Tensor], count: int, threshold: float, share: float, onset: int, pictures: int
) -> RegisterNeurons:
    """Take the neurons with the largest means, whatever their sign; of equal ones the earlier."""
    layers = sorted(means)
    everything = torch.cat([means[layer] for layer in layers])
    order = everything.abs().sort(descending=True, stable=True).indices[:count].tolist()
    starts = torch.tensor([0, *(len(means[layer]) for layer in layers)]).cumsum(0).tolist()
    by_layer: dict[int, list[int]] = {}
    for place in order:
        index = next(i for i in range(len(layers)) if place < starts[i + 1])
        by_layer.setdefault(layers[index], []).append(place - starts[index])
    return RegisterNeurons(
        {layer: tuple(by_layer[layer]) for layer in sorted(by_layer)},
        {layer: tuple(float(means[layer][n]) for n in by_layer[layer]) for layer in sorted(by_layer)},
        threshold,
        share,
        onset,
        pictures,
    )
