"""The few neurons that make a model's artifacts: those that fire most where artifacts are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.data.batches import Batches, open_batches
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.surgery.recording import Pictures, Recording, stream
from vitrail.surgery.selection import check_layers, is_whole

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

    def strongest(self, count: int) -> RegisterNeurons:
        """Give so many of them: those that fire most, of equal ones the earlier."""
        every = [
            (-abs(score), layer, place) for layer, scores in self.scores.items() for place, score in enumerate(scores)
        ]
        chosen: dict[int, list[int]] = {}
        for _, layer, place in sorted(every)[:count]:
            chosen.setdefault(layer, []).append(place)
        return replace(
            self,
            by_layer={layer: tuple(self.by_layer[layer][i] for i in chosen[layer]) for layer in sorted(chosen)},
            scores={layer: tuple(self.scores[layer][i] for i in chosen[layer]) for layer in sorted(chosen)},
        )


def find_register_neurons(
    model: nn.Module,
    data: Pictures,
    count: int = 10,
    *,
    layers: int | Sequence[int] | None = None,
    threshold: float | None = None,
    batch_size: int | None = None,
) -> RegisterNeurons:
    """Find the neurons that fire most where artifacts are.

    The pictures are walked over three times (twice with a threshold), one batch in memory at a time, in any order:
    for the threshold, for the block since which there are artifacts, and for the neurons. An iterator, which can be
    walked over once, is held in memory as a whole.

    Args:
        model: any supported model, not merged.
        data: pictures, as files or prepared; see :data:`~vitrail.surgery.recording.Pictures`.
        count: how many neurons to take, over all layers looked at.
        layers: blocks to look at; by default those up to the one where artifacts appear.
        threshold: norm of an artifact in the last layer; by default the mean plus three standard deviations, where
            what is above that is twice as long as usual.
        batch_size: pictures at once, where they do not come in batches.
    """
    if not is_whole(count) or count < 1:
        raise InvalidOption(f"the number of register neurons is 1 or more; got {count!r}")
    if threshold is not None and not (isinstance(threshold, int | float) and math.isfinite(threshold)):
        raise InvalidOption(f"the threshold is a norm, a finite number; got {threshold!r}")
    wanted = None if layers is None else check_layers(layers, len(find(model).blocks))
    feed = open_batches(data, with_labels=False).repeatable()
    least = 0.0
    if threshold is None:
        threshold, least = _usual_threshold(model, feed, batch_size), LEAST_FACTOR
    lengths = _lengths(model, feed, batch_size, threshold)
    _check_apart(lengths, threshold, least)
    chosen = range(lengths.onset + 1) if wanted is None else wanted
    means = _activations(model, feed, batch_size, threshold, list(chosen))
    share = lengths.outliers / (lengths.outliers + lengths.others)
    return _strongest(means, count, threshold, share, lengths.onset, lengths.pictures)


@dataclass
class _Lengths:
    """How long artifacts and other patches are after each block: sums (L,) of norms, and how many there are."""

    long: Tensor
    usual: Tensor
    outliers: int = 0
    others: int = 0
    pictures: int = 0

    @property
    def factor(self) -> Tensor:
        """How many times as long as other patches artifacts are, after each block."""
        return (self.long / self.outliers) / (self.usual / self.others).clamp_min(1e-12)

    @property
    def onset(self) -> int:
        """The first block after which, and after every later one, the last layer's outliers stand out.

        They do where they are longer than other patches by at least the square root of the factor of the last layer:
        half of the way, as factors go.
        """
        factor = self.factor
        below = (factor < factor[-1].clamp_min(1).sqrt()).nonzero()
        return min(int(below[-1]) + 1, len(factor) - 1) if len(below) else 0


def _patch_norms(recording: Recording) -> Tensor:
    """Give the norms (L, B, P) of patches after the blocks that were looked into."""
    norms = torch.stack([recording.norms[layer][:, recording.layout.patches] for layer in recording.layers]).double()
    if not norms.isfinite().all():
        raise UnsupportedInput(
            "some tokens of this model are not finite on these pictures; artifacts cannot be told from them"
        )
    return norms


def _usual_threshold(model: nn.Module, feed: Batches, batch_size: int | None) -> float:
    """Give the mean plus three standard deviations of the norms after the last block."""
    count, total, squares = 0, 0.0, 0.0
    for recording in stream(model, feed, "norms", -1, batch_size=batch_size, device="cpu"):
        norms = _patch_norms(recording)
        count += norms.numel()
        total += float(norms.sum())
        squares += float(norms.square().sum())
    if not count:
        raise UnsupportedInput("there were no pictures to find register neurons with")
    mean = total / count
    return mean + 3 * math.sqrt(max(0.0, squares / count - mean**2))


def _lengths(model: nn.Module, feed: Batches, batch_size: int | None, threshold: float) -> _Lengths:
    """Sum up how long artifacts and other patches are after each block."""
    depth = len(find(model).blocks)
    found = _Lengths(torch.zeros(depth, dtype=torch.float64), torch.zeros(depth, dtype=torch.float64))
    for recording in stream(model, feed, "norms", batch_size=batch_size, device="cpu"):
        norms = _patch_norms(recording)
        where = norms[-1] > threshold
        found.long += norms[:, where].sum(1)
        found.usual += norms[:, ~where].sum(1)
        found.outliers += int(where.sum())
        found.others += int((~where).sum())
        found.pictures += len(recording)
    return found


def _check_apart(found: _Lengths, threshold: float, least: float) -> None:
    """Refuse to look for neurons where there are no artifacts."""
    if not found.pictures:
        raise UnsupportedInput("there were no pictures to find register neurons with")
    if not found.outliers or not found.others:
        raise UnsupportedInput(
            f"{'every' if found.outliers else 'no'} patch of {found.pictures} pictures has a norm above "
            f"{threshold:.4g} after the last block, so there are no artifacts to find neurons of; give more pictures, "
            "or another threshold"
        )
    if float(found.factor[-1]) < least:
        raise UnsupportedInput(
            f"the norms of {found.outliers + found.others} patches form one group: the longest are not {least:g} times "
            "as long as usual, so there are no artifacts to find neurons of; to look for what fires at the longest "
            "tokens all the same, give a threshold"
        )


def _activations(
    model: nn.Module, feed: Batches, batch_size: int | None, threshold: float, layers: list[int]
) -> dict[int, Tensor]:
    """Give the mean activation (hidden,) of each neuron of some blocks where artifacts are."""
    last = len(find(model).blocks) - 1
    sums: dict[int, Tensor] = {}
    count = 0
    for recording in stream(model, feed, ("mlp", "norms"), sorted({*layers, last}), batch_size=batch_size):
        patches = recording.layout.patches
        where = recording.norms[last][:, patches].double() > threshold
        count += int(where.sum())
        for layer in layers:
            fired = recording.mlp[layer][:, patches][where].double().sum(0).cpu()
            sums[layer] = sums[layer] + fired if layer in sums else fired
    if not count:
        raise UnsupportedInput(
            "the pictures were not the same when they were walked over again; give a loader that can be, and that "
            "does not change them"
        )
    return {layer: total / count for layer, total in sums.items()}


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
