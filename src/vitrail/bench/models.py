"""The models of a measurement: one base, and copies of it that are merged, sliced or left alone."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import find, load_model, size_options
from vitrail.bench.config import BenchConfig
from vitrail.bench.sliced import slice_tokens
from vitrail.errors import InvalidOption, UnsupportedInput, VitrailWarning
from vitrail.surgery import Merging, merge


@dataclass(frozen=True)
class Base:
    """The model that all variants are copies of, and what it costs.

    Attributes:
        size: height and width of its pictures.
        tokens: tokens that leave each block when merged.
        tokens_before: tokens without merging.
        flops_before: multiply-adds for one picture without merging.
        flops_after: with merging.
    """

    module: nn.Module
    size: tuple[int, ...]
    merging: dict[str, Any]
    tokens: tuple[int, ...]
    tokens_before: int
    flops_before: int
    flops_after: int

    def variant(self, name: str, own_weights: bool) -> nn.Module:
        """Make a copy and change it as its name says; copies share the weights, unless each is to train its own."""
        module = copy_model(self.module, share=not own_weights)
        if name == "merged":
            self.merge(module)
        elif name == "sliced":
            slice_tokens(module, self.tokens)
        return module

    def merge(self, module: nn.Module) -> Merging:
        """Merge a copy; what cannot merge was reported when the base was made."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VitrailWarning)
            return merge(module, **self.merging)


def build(config: BenchConfig, module: nn.Module | None = None) -> Base:
    """Load the model that a configuration names, or take the one that is given, and count what merging saves."""
    place = config.place
    if module is None:
        module = _load(config)
    found = find(module)
    size = config.size or found.adapter.preprocessing(found.trunk).size
    try:
        layout = found.adapter.layout(found.trunk, size)
    except ValueError as error:
        raise _wrong_size(config.model, size) from error
    if size[0] % layout.grid[1] or size[1] % layout.grid[2]:
        raise _wrong_size(config.model, size)
    module = module.to(place, config.weight_dtype).eval()
    r = list(config.r) if isinstance(config.r, tuple) else config.r
    options = {"r": r, "schedule": config.schedule, "proportional": config.proportional}
    with merge(module, **options) as merging:  # type: ignore[arg-type]
        tokens = tuple(merging.tokens_per_layer(size))
        before, after = merging.flops(size, merged=False), merging.flops(size)
    return Base(module, size, options, tokens, layout.num_tokens, before, after)


def random_batches(config: BenchConfig, size: tuple[int, ...], place: torch.device) -> list[Tensor]:
    """Draw the inputs that take turns: normally distributed, as prepared pictures are, and never twice the same."""
    shape = (config.batch, 3, *size)
    _check_room(config, math.prod(shape), place)
    generator = torch.Generator().manual_seed(0)
    if place.type == "cuda":
        generator = torch.Generator(place).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=place).to(config.weight_dtype) for _ in range(config.inputs)]


def copy_model(module: nn.Module, share: bool) -> nn.Module:
    """Copy a model, merged or not; with ``share`` the copy has the same parameters and buffers, not equal ones."""
    shared: Sequence[Tensor] = (*module.parameters(), *module.buffers()) if share else ()
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


def try_out(base: Base, config: BenchConfig, batch: Tensor) -> None:
    """Run the model once; libraries refuse a size only then."""
    try:
        with torch.inference_mode(), torch.autocast(batch.device.type, config.compute_dtype, enabled=config.autocast):
            base.module(batch[:1])
    except (AssertionError, ValueError) as error:
        height, width = base.size
        why = " ".join(str(error).split()).rstrip(".")
        raise UnsupportedInput(
            f"{config.model} does not take pictures of 3 × {height} × {width} ({why})"
            f"{'' if config.size is None else '. Leave the size out'}"
        ) from error


def _load(config: BenchConfig) -> nn.Module:
    torch.manual_seed(0)
    return load_model(config.model, pretrained=config.pretrained, **size_options(config.model, config.size))


def _check_room(config: BenchConfig, values: int, place: torch.device) -> None:
    """Refuse inputs that alone are larger than all memory; asking for so much can end the process without a word."""
    needed = values * config.weight_dtype.itemsize * config.inputs
    there = _memory(place)
    if there is not None and needed > there:
        raise UnsupportedInput(
            f"batch {config.batch} does not fit into the memory of this device: {config.inputs} batches of pictures "
            f"take {needed / 1e9:.3g} GB, and there are {there / 1e9:.3g}. Choose a smaller batch"
        )


def _memory(place: torch.device) -> int | None:
    """Give the bytes of memory of a device; None where the system does not say."""
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _wrong_size(name: str, size: tuple[int, ...]) -> InvalidOption:
    return InvalidOption(
        f"size {size[0]}x{size[1]} is not a whole number of patches of {name}; choose a multiple of its patch size "
        "(often 16 or 14) in each direction, or leave the size out"
    )
