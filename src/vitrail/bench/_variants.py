"""The baseline model and its variants: copies that are merged, sliced or left unchanged.

The sliced model is the lower bound on time. Each of its blocks attends with the library's modules and PyTorch's plain
attention, drops the last tokens instead of merging any, and feeds the rest. It has as many tokens in each layer as the
merged model but no sizes, no matching and no unmerging. Its output is useless; its time is what merging would take if
it cost nothing.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters import find, load_model, size_options
from vitrail.adapters.base import BlockAdapter, repeat_heads
from vitrail.adapters.registry import sized
from vitrail.bench.config import BenchConfig
from vitrail.errors import UnsupportedInput, VitrailWarning
from vitrail.runtime.install import swap
from vitrail.surgery import Merging, merge
from vitrail.surgery.copies import copy_model
from vitrail.surgery.saving import read_settings
from vitrail.surgery.saving.changes import merge_arguments

INPUTS = 4
"""Number of random batches to rotate through."""


@dataclass(frozen=True)
class Baseline:
    """The model that all variants are copies of, and its cost; ``tokens`` leave each block when merged."""

    module: nn.Module
    shape: tuple[int, ...]
    merging: dict[str, Any]
    tokens: tuple[int, ...]
    tokens_before: int
    flops_before: int
    flops_after: int

    def variant(self, name: str, own_weights: bool) -> nn.Module:
        """Return a copy changed into a variant; copies share the weights unless each trains its own."""
        module = copy_model(self.module, share=not own_weights)
        if name == "merged":
            self.merge(module)
        elif name == "sliced":
            slice_tokens(module, self.tokens, self.shape[1:])
        return module

    def merge(self, module: nn.Module) -> Merging:
        """Merge a copy, silently: building the baseline has already warned."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VitrailWarning)
            return merge(module, **self.merging)


def build(config: BenchConfig, module: nn.Module | None = None) -> Baseline:
    """Load the configured model, or use the given one, and count what merging saves."""
    if module is None:
        torch.manual_seed(0)
        module = load_model(config.model, pretrained=config.pretrained, **size_options(config.model, config.size))
    spec, layout = sized(find(module), config.size, config.model)
    module = module.to(config.torch_device, config.weight_dtype).eval()
    options = _merge_options(config, module)
    with merge(module, **options) as merging:
        tokens = tuple(merging.tokens_per_layer(config.size))
        before, after = merging.flops(config.size, merged=False), merging.flops(config.size)
    return Baseline(module, spec.shape, options, tokens, layout.num_tokens, before, after)


def _merge_options(config: BenchConfig, module: nn.Module) -> dict[str, Any]:
    """Return the arguments of `vitrail.merge` for a model."""
    if config.merge is not None:
        return merge_arguments(read_settings(config.merge), module)
    r = list(config.r) if isinstance(config.r, tuple) else config.r
    return {"r": r, "schedule": config.schedule, "proportional": config.proportional}


def random_batches(config: BenchConfig, shape: tuple[int, ...]) -> list[Tensor]:
    """Draw different batches of standard normal inputs (C, ...), like normalized images."""
    device, shape = config.torch_device, (config.batch, *shape)
    needed = math.prod(shape) * config.weight_dtype.itemsize * INPUTS
    memory = _memory(device)
    if memory is not None and needed > memory:  # allocating this much can kill the process
        raise does_not_fit(config.batch, f"{INPUTS} batches take {needed / 1e9:.3g} GB of {memory / 1e9:.3g}.")
    generator = torch.Generator(device).manual_seed(0)
    draws = (torch.randn(shape, generator=generator, device=device) for _ in range(INPUTS))
    return [draw.to(config.weight_dtype) for draw in draws]


def does_not_fit(batch: int, why: str) -> UnsupportedInput:
    """Return the error for a batch that is too large for the memory."""
    return UnsupportedInput(f"batch {batch} does not fit into the memory of this device: {why} Choose a smaller batch")


def _memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        return None


def try_input_size(base: Baseline, config: BenchConfig, batch: Tensor) -> None:
    """Run one input through the model: libraries check the input size only when called."""
    try:
        with torch.inference_mode(), torch.autocast(batch.device.type, config.autocast_dtype, enabled=config.autocast):
            base.module(batch[:1])
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        advice = "" if config.size is None else ". Leave the size out"
        shape = " × ".join(map(str, base.shape))
        raise UnsupportedInput(f"{config.model} does not accept inputs of {shape} ({reason}){advice}") from error


class SlicedBlock:
    """Mixin in front of a library's block: attend, cut, MLP.

    ``_vitrail_slice`` is the number of tokens that leave it, that of special tokens in front, the block's adapter, and
    functions that return the position bias between all tokens and their rotation.
    """

    _vitrail_slice: tuple[int, int, BlockAdapter, Callable[[], Tensor | None], Callable[[], Tensor | None]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        length, special, parts, position_bias, rotation = self._vitrail_slice
        x, args = (args[0], args[1:]) if args else (kwargs.pop(parts.input_name), ())
        block: Any = self
        call = parts.read_call(args, kwargs)
        rope = rotation() if parts.rotates else call.rope
        h = parts.attend_norm(block, x)
        q, k, v = parts.qkv(block, h)
        if rope is not None:
            table = rope[..., : q.shape[2] - special, :]
            q, k = parts.rotate(block, q, table).type_as(v), parts.rotate(block, k, table).type_as(v)
        k, v = repeat_heads(q, k, v)
        scale, dropout = parts.attention_scale(block), parts.attention_dropout(block)
        bias = position_bias()
        bias = None if bias is None else bias[..., : q.shape[2], : q.shape[2]]
        if parts.fused:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
        else:
            scores = (q * (scale or q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)
            attended = F.dropout(parts.weigh(block, scores, bias), dropout) @ v
        branch = parts.attend_branch(block, parts.attend_output(block, attended.transpose(1, 2).flatten(2), h))
        # cut before the sum: same values, fewer bytes, and a contiguous input for the norm
        x = x[:, :length] + branch[:, :length]
        output = x + parts.feed_branch(block, parts.feed(block, parts.feed_norm(block, x)))
        return parts.returned(output, call)


def slice_tokens(model: nn.Module, lengths: Sequence[int], size: tuple[int, ...] | None = None) -> None:
    """Change a model in place so that ``lengths[i]`` tokens leave block ``i``; this cannot be undone.

    Special tokens come first and stay. The model takes inputs of this size, by default its own.
    """
    found = find(model)
    layout = found.adapter.layout(found.trunk, size)
    position = found.adapter.position(found.trunk, layout.grid)
    for layer, (block, parts, length) in enumerate(zip(found.blocks, found.block_adapters, lengths, strict=True)):
        bias = partial(position.bias, layer, None) if parts.biased and position is not None else lambda: None
        rotation = partial(position.table, layer, None) if parts.rotates and position is not None else lambda: None
        block._vitrail_slice = (length, layout.num_special, parts, bias, rotation)  # type: ignore[assignment]
        swap(block, SlicedBlock)
