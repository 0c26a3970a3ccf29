"""``vitrail.test_time_registers``: move artifacts from the patches to appended tokens, without training.

Jiang et al. (NeurIPS 2025) found that a few MLP neurons produce a model's artifacts. `find_register_neurons` finds the
neurons with the largest activations at artifacts. `test_time_registers` moves their activations to appended tokens, in
each image by itself, by one of two rules (see `MOVES`). The appended tokens start as zeros behind the model's own
special tokens and are dropped after the last block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._checks import is_int, is_number
from vitrail._deprecation import renamed_property
from vitrail._wording import counted
from vitrail.adapters import Found, find
from vitrail.data.batches import Batches, open_batches
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.runtime.checks import biased_layers, refuse_extended, refuse_merged, refuse_packed, refuse_windowed
from vitrail.runtime.layout import MARK
from vitrail.surgery._handle import HookHandle
from vitrail.surgery._pretrained import attach, detach
from vitrail.surgery.hooks import Recording, check_layers
from vitrail.surgery.recording import Images, input_axes, stream

Move = Literal["layer", "neuron"]
MOVES: tuple[Move, ...] = get_args(Move)
"""How activations move. "layer", as the authors' released code does: the neurons of a layer share one value, their
largest activation over all tokens, and only patches get zero. "neuron", as the paper's text says: each neuron moves
its own largest activation, by magnitude, and all other tokens get zero, the class token among them."""

LEAST_FACTOR = 2.0
"""Smallest ratio between the mean norms of artifacts and of other patches."""

MOST_REGISTERS = 1024
"""Most tokens that are appended: each image computes them in every block."""


@checked
def test_time_registers(
    model: nn.Module,
    data: Images = None,
    *,
    neurons: int | RegisterNeurons | Mapping[int, Sequence[int]] = 10,
    registers: int = 1,
    layers: int | Sequence[int] | None = None,
    threshold: float | None = None,
    control: int | None = None,
    batch_size: int | None = None,
    move: Move = "layer",
) -> TestTimeRegisters:
    """Move a model's artifacts to appended tokens, in place.

    Args:
        model: a supported model, without merging or added tokens.
        data: images to find register neurons with (see :data:`~vitrail.surgery.recording.Images`); not needed if
            ``neurons`` are given.
        neurons: how many to find, or the result of :func:`find_register_neurons`, or neurons by layer.
        registers: number of tokens to append; neurons are assigned to them in turn.
        layers, threshold, batch_size: see :func:`find_register_neurons`.
        control: a random seed, to move as many random other neurons of the same layers instead. A control should
            remove no artifacts.
        move: ``layer``, as the authors' code, or ``neuron``, as the paper's text; see :data:`MOVES`.
    """
    found = find(model)
    if move not in MOVES:
        raise InvalidOption(f"move is one of {', '.join(MOVES)}; got {move!r}")
    if not is_int(registers, 1) or registers > MOST_REGISTERS:
        raise InvalidOption(f"registers must be an integer from 1 to {MOST_REGISTERS}; got {registers!r}")
    if control is not None and not is_int(control):
        raise InvalidOption(f"control must be a random seed, an integer; got {control!r}")
    TestTimeRegisters._refuse_twice(found)
    refuse_merged(model)
    refuse_extended(model)
    refuse_packed(found, "adding test-time registers")
    refuse_windowed(found, "adding test-time registers")
    if found.adapter.exposes:
        raise UnsupportedModel(
            f"{type(found.trunk).__name__} makes feature maps of the tokens between its blocks, and registers would be "
            "among them; use the same weights as a model without feature maps"
        )
    if any(biased_layers(found)):
        raise UnsupportedModel("test-time registers have no position bias, which this model adds to all of its scores")
    if any(parts.rotates for parts in found.block_adapters):
        raise UnsupportedModel("the blocks of this model count positions from the first token, so registers shift them")
    known = neurons if isinstance(neurons, RegisterNeurons) else None
    if is_int(neurons):
        if data is None:
            raise InvalidOption("pass data, images to find register neurons with, or neurons by layer")
        known = find_register_neurons(model, data, neurons, layers=layers, threshold=threshold, batch_size=batch_size)
    by_layer, widths = _check_neurons(found, neurons if known is None else known.by_layer)
    if control is not None:
        by_layer = _random_neurons(by_layer, widths, control)
    return TestTimeRegisters(model, found, by_layer, registers, known, move)


test_time_registers.__test__ = False  # type: ignore[attr-defined]


@dataclass(eq=False, repr=False)
class TestTimeRegisters(HookHandle):
    """The handle of test-time registers.

    Attributes:
        by_layer: the moved neurons of each block.
        registers: number of appended tokens.
        neurons: how the neurons were found; None if they were given by layer.
        move: how activations move.
    """

    __test__ = False  # not a test class
    _function = "vitrail.test_time_registers"
    _mark, _name = MARK, "test-time registers"

    by_layer: Mapping[int, tuple[int, ...]]
    registers: int
    neurons: RegisterNeurons | None
    move: Move = "layer"

    def __post_init__(self) -> None:
        found, blocks = self.found, self.found.blocks
        self.place = found.adapter.layout(found.trunk).num_special
        hooks = [blocks[0].register_forward_pre_hook(self._insert, with_kwargs=True)]
        for layer, some in self.by_layer.items():
            last = found.block_adapters[layer].feed_last(blocks[layer])
            hooks.append(last.register_forward_pre_hook(partial(self._move, some)))
        self._attach([*hooks, blocks[-1].register_forward_hook(self._drop)])
        self._shift(self.registers)
        attach(self.model, found)

    active = renamed_property("active", "is_active")

    @property
    def config(self) -> dict[str, Any]:
        neurons = {layer: list(some) for layer, some in self.by_layer.items()}
        return {"neurons": neurons, "registers": self.registers, "move": self.move}

    def remove(self) -> None:
        """Remove the registers and stop moving activations."""
        super().remove()
        self._shift(-self.registers)
        detach(self.model)

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return self.config, {}

    @classmethod
    def from_saved(cls, model: nn.Module, options: dict[str, Any], tensors: dict[str, Tensor]) -> TestTimeRegisters:
        if not isinstance(options.get("neurons"), Mapping):
            raise ValueError("registers: neurons by layer are missing")
        return test_time_registers(model, neurons=options["neurons"], registers=options.get("registers", 1))

    def _shift(self, by: int) -> None:
        for block, parts in zip(self.found.blocks, self.found.block_adapters, strict=True):
            parts.shift_prefix(block, by)

    def _insert(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        parts = self.found.block_adapters[0]
        name = parts.input_name
        call = parts.read_call(args[1:], kwargs)
        if call.mask is not None and not call.among_special and not parts.biased:
            raise UnsupportedInput(
                "an attention mask is defined over the model's own tokens, without test-time registers; call the model "
                "without a mask and without padding, or remove the registers"
            )
        x = args[0] if args else kwargs[name]
        zeros = x.new_zeros(x.shape[0], self.registers, x.shape[2])
        x = torch.cat([x[:, : self.place], zeros, x[:, self.place :]], 1)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})

    def _drop(self, _: nn.Module, __: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        x = torch.cat([x[:, : self.place], x[:, self.place + self.registers :]], 1)
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def _move(self, neurons: tuple[int, ...], _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        places = [self.place + number % self.registers for number in range(len(neurons))]
        h = args[0].clone()
        index = torch.tensor(neurons, device=h.device)
        values = h[..., index]
        if self.move == "layer":
            largest = values.amax((-2, -1)).unsqueeze(-1).expand(*values.shape[:-2], len(neurons))
            h[..., self.place + self.registers :, index] = 0
        else:
            largest = values.gather(-2, values.abs().argmax(-2, keepdim=True)).squeeze(-2)
            h[..., index] = 0
        h[..., torch.tensor(places, device=h.device), index] = largest
        return (h, *args[1:])


@dataclass(frozen=True)
class RegisterNeurons:
    """The neurons that produce artifacts, and how they were found.

    Attributes:
        by_layer: neurons in the MLP of each block, strongest first.
        scores: their mean absolute activations at artifacts, the mean over images.
        threshold: norm after the last block above which a patch counts as an artifact.
        outlier_share: share of patches above it.
        onset: first block after which the same patches are outliers; neurons are searched up to it.
        images: number of images.
    """

    by_layer: Mapping[int, tuple[int, ...]]
    scores: Mapping[int, tuple[float, ...]]
    threshold: float
    outlier_share: float
    onset: int
    images: int

    pictures = renamed_property("pictures", "images")

    @property
    def count(self) -> int:
        """Number of neurons."""
        return sum(len(neurons) for neurons in self.by_layer.values())

    def strongest(self, count: int) -> RegisterNeurons:
        """Return the ``count`` neurons with the largest scores; the earlier ones in case of a tie."""
        ranked = sorted(
            (-score, layer, place) for layer, scores in self.scores.items() for place, score in enumerate(scores)
        )
        chosen: dict[int, list[int]] = {}
        for _, layer, place in ranked[:count]:
            chosen.setdefault(layer, []).append(place)
        return replace(
            self,
            by_layer={layer: tuple(self.by_layer[layer][i] for i in chosen[layer]) for layer in sorted(chosen)},
            scores={layer: tuple(self.scores[layer][i] for i in chosen[layer]) for layer in sorted(chosen)},
        )


@checked
def find_register_neurons(
    model: nn.Module,
    data: Images,
    count: int = 10,
    *,
    layers: int | Sequence[int] | None = None,
    threshold: float | None = None,
    batch_size: int | None = None,
) -> RegisterNeurons:
    """Find the neurons with the largest activations at artifacts.

    The images are read three times (twice with a threshold), in any order, one batch at a time: for the threshold, for
    the first block with artifacts, and for the neurons. An iterator, which can be read only once, is kept in memory.

    Args:
        model: a supported model, without merging.
        data: images; see :data:`~vitrail.surgery.recording.Images`.
        count: number of neurons, over all layers.
        layers: blocks to search; by default those up to the first with artifacts.
        threshold: norm of an artifact after the last block; by default the mean plus three standard deviations, if
            the norms above it are twice the others.
        batch_size: batch size for ``data``.
    """
    if not is_int(count, 1):
        raise InvalidOption(f"the number of register neurons must be 1 or more; got {count!r}")
    if threshold is not None and not is_number(threshold):
        raise InvalidOption(f"threshold must be a norm, a finite number; got {threshold!r}")
    found = find(model)
    chosen = None if layers is None else check_layers(layers, len(found.blocks))
    batches = open_batches(data, with_labels=False, axes=input_axes(found)).repeatable()
    least = 0.0
    if threshold is None:
        threshold, least = _default_threshold(model, batches, batch_size), LEAST_FACTOR
    norms = _compare_norms(model, batches, batch_size, threshold)
    _check_artifacts(norms, threshold, least)
    means = _activations(model, batches, batch_size, threshold, chosen or range(norms.onset + 1))
    every = RegisterNeurons(
        {layer: tuple(range(len(mean))) for layer, mean in means.items()},
        {layer: tuple(mean.tolist()) for layer, mean in means.items()},
        threshold,
        norms.outliers / (norms.outliers + norms.others),
        norms.onset,
        norms.images,
    )
    return every.strongest(count)


@dataclass
class _Norms:
    """Sums (L,) of the norms of outliers and of other patches after each block, and their counts."""

    outlier_sum: Tensor
    other_sum: Tensor
    outliers: int = 0
    others: int = 0
    images: int = 0

    @property
    def factor(self) -> Tensor:
        """Mean norm of outliers relative to that of other patches, after each block."""
        return (self.outlier_sum / self.outliers) / (self.other_sum / self.others).clamp_min(1e-12)

    @property
    def onset(self) -> int:
        """First block from which on the outliers of the last block stand out.

        They do if their factor is at least the square root of the factor of the last block.
        """
        factor = self.factor
        below = (factor < factor[-1].clamp_min(1).sqrt()).nonzero()
        return min(int(below[-1]) + 1, len(factor) - 1) if len(below) else 0


def _patch_norms(recording: Recording) -> Tensor:
    """Return the norms (L, B, P) of patches after the recorded blocks."""
    norms = torch.stack([recording.norms[layer][:, recording.layout.patches] for layer in recording.layers]).double()
    if not norms.isfinite().all():
        raise UnsupportedInput("some tokens are not finite on these images, so artifacts cannot be found")
    return norms


def _default_threshold(model: nn.Module, batches: Batches, batch_size: int | None) -> float:
    """Compute the mean plus three standard deviations of the norms after the last block."""
    count, total, squares = 0, 0.0, 0.0
    for recording in stream(model, batches, "norms", -1, batch_size=batch_size, device="cpu"):
        norms = _patch_norms(recording)
        count += norms.numel()
        total += float(norms.sum())
        squares += float(norms.square().sum())
    if not count:
        raise UnsupportedInput("there are no images to find register neurons with")
    mean = total / count
    return mean + 3 * sqrt(max(0.0, squares / count - mean**2))


def _compare_norms(model: nn.Module, batches: Batches, batch_size: int | None, threshold: float) -> _Norms:
    depth = len(find(model).blocks)
    found = _Norms(torch.zeros(depth, dtype=torch.float64), torch.zeros(depth, dtype=torch.float64))
    for recording in stream(model, batches, "norms", batch_size=batch_size, device="cpu"):
        norms = _patch_norms(recording)
        outlier = norms[-1] > threshold
        found.outlier_sum += norms[:, outlier].sum(1)
        found.other_sum += norms[:, ~outlier].sum(1)
        found.outliers += int(outlier.sum())
        found.others += int((~outlier).sum())
        found.images += len(recording)
    return found


def _check_artifacts(found: _Norms, threshold: float, least: float) -> None:
    """Raise if there are no artifacts to find neurons for."""
    if not found.images:
        raise UnsupportedInput("there are no images to find register neurons with")
    if not found.outliers or not found.others:
        raise UnsupportedInput(
            f"{'all patches' if found.outliers else 'no patches'} of {counted(found.images, 'image')} have a norm "
            f"above {threshold:.4g} after the last block, so there are no artifacts to find neurons for; use more "
            "images, or another threshold"
        )
    if float(found.factor[-1]) < least:
        raise UnsupportedInput(
            f"the norms of {found.outliers + found.others} patches form one group: the largest are less than "
            f"{least:g} times the others, so there are no artifacts to find neurons for; pass a threshold to search "
            "anyway"
        )


def _activations(
    model: nn.Module, batches: Batches, batch_size: int | None, threshold: float, layers: Sequence[int]
) -> dict[int, Tensor]:
    """Compute the mean over images of each neuron's mean |activation| (hidden,) at the artifacts of an image."""
    last = len(find(model).blocks) - 1
    sums: dict[int, Tensor] = {}
    count = 0
    for recording in stream(model, batches, ("mlp", "norms"), sorted({*layers, last}), batch_size=batch_size):
        patches = recording.layout.patches
        outlier = recording.norms[last][:, patches].double() > threshold
        several = outlier.sum(1)
        count += int((several > 0).sum())
        share = outlier.double() / several.clamp_min(1).unsqueeze(1)
        for layer in layers:
            total = (share[outlier] @ recording.mlp[layer][:, patches][outlier].double().abs()).cpu()
            sums[layer] = sums[layer] + total if layer in sums else total
    if not count:
        raise UnsupportedInput(
            "the images differ from those of the first reading; pass data that is the same each time it is read"
        )
    return {layer: total / count for layer, total in sums.items()}


def _check_neurons(found: Found, neurons: Any) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """Return the given neurons, and the number of neurons, of each layer; JSON has layers as text."""
    given = neurons
    valid = isinstance(neurons, Mapping) and all(isinstance(some, Sequence) for some in neurons.values())
    if valid:
        neurons = {_layer_number(layer): some for layer, some in given.items()}
    if not valid or not all(is_int(one) for layer, some in neurons.items() for one in (layer, *some)):
        raise InvalidOption(f"neurons is a number, or numbers by layer such as {{5: [17, 301]}}; got {given!r:.200}")
    if len(neurons) < len(given):
        raise InvalidOption(f"neurons has a layer twice, as a number and as text; give it once; got {given!r:.200}")
    empty = [layer for layer, some in neurons.items() if not some]
    if empty:
        raise InvalidOption(f"neurons has none for layer {empty[0]}; give one or more, or leave the layer out")
    widths = {}
    for layer, some in neurons.items():
        if not 0 <= layer < len(found.blocks):
            raise InvalidOption(f"neurons are given by layer, 0 to {len(found.blocks) - 1}; got layer {layer}")
        widths[layer] = int(found.block_adapters[layer].feed_last(found.blocks[layer]).in_features)
        wrong = [neuron for neuron in some if not 0 <= neuron < widths[layer]]
        if wrong or len(set(some)) != len(some):
            raise InvalidOption(
                f"layer {layer} has neurons 0 to {widths[layer] - 1}, each to be given once; got {wrong or list(some)}"
            )
    return {layer: tuple(some) for layer, some in neurons.items()}, widths


def _layer_number(layer: object) -> object:
    """Return a layer that is a number in text, as a key in JSON, as an integer; anything else unchanged."""
    return int(layer) if isinstance(layer, str) and layer.isascii() and layer.isdigit() else layer


def _random_neurons(
    by_layer: Mapping[int, Sequence[int]], widths: Mapping[int, int], seed: int
) -> dict[int, tuple[int, ...]]:
    """Draw as many other neurons of each layer."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for layer, some in by_layer.items():
        if 2 * len(some) > widths[layer]:
            raise InvalidOption(
                f"control needs as many other neurons, but layer {layer} has {widths[layer]}, of which {len(some)} "
                "are given; give fewer"
            )
        order = torch.randperm(widths[layer], generator=generator).tolist()
        drawn[layer] = tuple([neuron for neuron in order if neuron not in some][: len(some)])
    return drawn
