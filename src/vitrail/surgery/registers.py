"""``vitrail.test_time_registers``: artifacts moved off the patches onto tokens of their own, without training.

Jiang et al. (NeurIPS 2025) found that a few neurons of the MLPs make a model's artifacts. They are found by what fires
where artifacts are, and their activations go to appended tokens: for each neuron and picture the largest one over all
tokens, while every other token gets zero. The appended tokens begin as zeros behind the model's own special tokens and
are taken away after the last block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vitrail.adapters import Found, find
from vitrail.errors import AlreadyMerged, InvalidOption
from vitrail.runtime.checks import refuse_extended, refuse_merged
from vitrail.runtime.layout import MARK
from vitrail.surgery.recording import Pictures
from vitrail.surgery.register_neurons import RegisterNeurons, find_register_neurons
from vitrail.surgery.selection import is_whole


class TestTimeRegisters:
    """Registers that were added to a model; :meth:`remove` takes them away, and the model is what it was."""

    __test__ = False  # its name is not a test's

    def __init__(self, found: Found, by_layer: Mapping[int, Sequence[int]], registers: int) -> None:
        self.found = found
        self.by_layer = {layer: tuple(neurons) for layer, neurons in by_layer.items()}
        self.registers = registers
        self.neurons: RegisterNeurons | None = None
        self.place = found.adapter.layout(found.trunk).num_special
        self.handles: list[RemovableHandle] = []
        self._apply()

    @classmethod
    def of(cls, model: nn.Module) -> TestTimeRegisters | None:
        """Give the registers that a model carries."""
        return next((getattr(part, MARK) for part in model.modules() if hasattr(part, MARK)), None)

    @property
    def active(self) -> bool:
        """Whether the model still has them."""
        return bool(self.handles)

    def remove(self) -> None:
        """Take the registers away."""
        if not self.active:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for block, parts in zip(self.found.blocks, self.found.block_adapters, strict=True):
            parts.shift_prefix(block, -self.registers)
        delattr(self.found.trunk, MARK)

    def __enter__(self) -> TestTimeRegisters:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _apply(self) -> None:
        blocks = self.found.blocks
        self.handles.append(blocks[0].register_forward_pre_hook(self._insert, with_kwargs=True))
        for layer, neurons in self.by_layer.items():
            last = self.found.block_adapters[layer].feed_last(blocks[layer])
            self.handles.append(last.register_forward_pre_hook(self._mover(neurons)))
        self.handles.append(blocks[-1].register_forward_hook(self._drop))
        for block, parts in zip(blocks, self.found.block_adapters, strict=True):
            parts.shift_prefix(block, self.registers)
        setattr(self.found.trunk, MARK, self)

    def _insert(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        name = self.found.block_adapters[0].input_name
        x = args[0] if args else kwargs[name]
        more = x.new_zeros(x.shape[0], self.registers, x.shape[2])
        x = torch.cat([x[:, : self.place], more, x[:, self.place :]], 1)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})

    def _drop(self, _: nn.Module, __: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        x = torch.cat([x[:, : self.place], x[:, self.place + self.registers :]], 1)
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def _mover(self, neurons: tuple[int, ...]) -> Any:
        places = [self.place + number % self.registers for number in range(len(neurons))]

        def move(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            h = args[0].clone()
            index = torch.tensor(neurons, device=h.device)
            values = h[..., index]
            largest = values.gather(-2, values.abs().argmax(-2, keepdim=True)).squeeze(-2)
            h[..., index] = 0
            h[..., torch.tensor(places, device=h.device), index] = largest
            return (h, *args[1:])

        return move


def test_time_registers(
    model: nn.Module,
    data: Pictures = None,
    *,
    neurons: int | RegisterNeurons | Mapping[int, Sequence[int]] = 10,
    registers: int = 1,
    layers: int | Sequence[int] | None = None,
    threshold: float | None = None,
    control: int | None = None,
    batch_size: int | None = None,
) -> TestTimeRegisters:
    """Move a model's artifacts onto appended tokens, in place; the handle that is returned removes them again.

    Args:
        model: any supported model, not merged.
        data: pictures to find register neurons with, as files or prepared (see
            :data:`~vitrail.surgery.recording.Pictures`); not needed where neurons are given.
        neurons: how many to find, or those that were found before, or their numbers by layer.
        registers: how many tokens to append; neurons take them in turn.
        layers: see :func:`find_register_neurons`.
        threshold: likewise.
        control: a seed; then as many neurons are drawn at random from the others of the same layers. They should
            cure nothing.
        batch_size: likewise.
    """
    found = find(model)
    _check(model, found, registers, control)
    known = neurons if isinstance(neurons, RegisterNeurons) else None
    if is_whole(neurons):
        if data is None:
            raise InvalidOption("give pictures to find register neurons with, or the neurons themselves")
        options = {"layers": layers, "threshold": threshold, "batch_size": batch_size}
        known = find_register_neurons(model, data, neurons, **options)  # type: ignore[arg-type]
    by_layer = _checked(known.by_layer if known is not None else neurons)
    widths = _widths(found, by_layer)
    if control is not None:
        by_layer = _drawn(by_layer, widths, control)
    handle = TestTimeRegisters(found, by_layer, registers)
    handle.neurons = known
    return handle


test_time_registers.__test__ = False  # type: ignore[attr-defined]


def _check(model: nn.Module, found: Found, registers: int, control: int | None) -> None:
    if not is_whole(registers) or registers < 1:
        raise InvalidOption(f"the number of registers is 1 or more; got {registers!r}")
    if control is not None and not is_whole(control):
        raise InvalidOption(f"control is a seed, a whole number; got {control!r}")
    if hasattr(found.trunk, MARK):
        raise AlreadyMerged("this model has test-time registers already; remove those first")
    refuse_merged(model)
    refuse_extended(model)


def _checked(neurons: Any) -> Mapping[int, Sequence[int]]:
    """Take neurons by layer: whole numbers."""
    several = isinstance(neurons, Mapping) and all(isinstance(some, Sequence) for some in neurons.values())
    if not several or not all(is_whole(one) for layer, some in neurons.items() for one in (layer, *some)):
        raise InvalidOption(f"neurons are a number, or numbers by layer such as {{5: [17, 301]}}; got {neurons!r:.200}")
    found: Mapping[int, Sequence[int]] = neurons
    return found


def _drawn(by_layer: Mapping[int, Sequence[int]], widths: Mapping[int, int], seed: int) -> dict[int, tuple[int, ...]]:
    """Draw as many neurons in each layer, none of which is one of those given."""
    draw = torch.Generator().manual_seed(seed)
    drawn = {}
    for layer, some in by_layer.items():
        if 2 * len(some) > widths[layer]:
            raise InvalidOption(
                f"the control needs as many neurons again, and layer {layer} has {widths[layer]}, of which {len(some)} "
                "are given; give fewer"
            )
        order = torch.randperm(widths[layer], generator=draw).tolist()
        drawn[layer] = tuple([neuron for neuron in order if neuron not in some][: len(some)])
    return drawn


def _widths(found: Found, by_layer: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Give the number of neurons of each layer, and check those that are asked for."""
    widths = {}
    for layer, some in by_layer.items():
        if not 0 <= layer < len(found.blocks):
            raise InvalidOption(f"neurons are given by layer, 0 to {len(found.blocks) - 1}; got layer {layer}")
        widths[layer] = int(found.block_adapters[layer].feed_last(found.blocks[layer]).in_features)  # type: ignore[arg-type]
        wrong = [neuron for neuron in some if not 0 <= neuron < widths[layer]]
        if wrong or len(set(some)) != len(some):
            raise InvalidOption(
                f"layer {layer} has neurons 0 to {widths[layer] - 1}, each to be given once; got {wrong or list(some)}"
            )
    return widths
