"""``vitrail.count``: parameters and multiply-adds of a model, by part, and what a token or a merge changes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._checks import is_int
from vitrail.adapters import Found, find
from vitrail.errors import InvalidOption
from vitrail.runtime.cost import CostModel
from vitrail.runtime.layout import added_to, layout_of


@dataclass(frozen=True)
class Count:
    """Parameters and multiply-adds of a model for one input.

    One multiply-add is one FLOP, as in the literature; norms, activations and softmax are left out, as there.

    Attributes:
        parameters: number of parameters.
        parameters_by_part: ``embedding``, ``attend`` and ``feed`` of all blocks, ``rest`` (tokens, positions, heads).
        tokens: length of the sequence before any merge.
        flops: multiply-adds of the model in its current state.
        flops_by_part: ``patches`` (patch embedding and attention pooling), ``projections``, ``attention`` (pairs of
            tokens), ``feed``, ``matching``, ``rest``.
        flops_unmerged: multiply-adds without merging.
        flops_per_token: multiply-adds that one more special token adds.
    """

    parameters: int
    parameters_by_part: dict[str, int]
    tokens: int
    flops: int
    flops_by_part: dict[str, int]
    flops_unmerged: int
    flops_per_token: int


@checked
def count(model: nn.Module, size: Any = None) -> Count:
    """Count a supported model, merged or not.

    Args:
        model: any supported model.
        size: an input, or its size in pixels, as one number, (height, width), or (time, height, width) for videos; by
            default the model's own.
    """
    found = find(model)
    size = _size(found, size)
    grid = found.adapter.layout(found.trunk, size).grid
    layout = layout_of(found, size).with_grid(grid)
    cost = CostModel.of(model, found)
    special, patches = layout.num_special, layout.num_patches
    plan = getattr(found.trunk, "_vitrail_plan", None)
    nothing = (0,) * len(found.blocks)
    merges = nothing if plan is None or not plan.method.static else plan.merges_of(found, layout)
    method = None if plan is None else plan.method
    added = added_to(found)
    side, read = ([], False) if added is None else (added.counts(), added.is_open)
    special -= cost.late[-1] + (0 if added is None else added.counts()[-1])
    by_part = cost.parts(special, patches, merges, side, read, method, grid)
    unmerged = cost.total(special, patches, side, read, None, grid, nothing)
    return Count(
        sum(weight.numel() for weight in model.parameters()),
        _parameters(model, found),
        layout.num_tokens,
        sum(by_part.values()),
        by_part,
        unmerged,
        cost.total(special + 1, patches, side, read, None, grid, nothing) - unmerged,
    )


def _size(found: Found, size: Any) -> Any:
    """Return the input size; raise if a given size is not a whole number of patches."""
    if size is None:
        return None
    embedding = found.adapter.patch_embedding(found.trunk)
    strides = [part.stride for part in embedding.modules() if isinstance(part, nn.Conv2d | nn.Conv3d)]
    steps = tuple(map(prod, zip(*strides, strict=True))) if strides else (1, 1)
    steps = steps[-len(found.adapter.input_spec(found.trunk).size) :]
    expected = "(time, height, width)" if len(steps) == 3 else "(height, width), or one number for both"
    if isinstance(size, Tensor):
        size = found.adapter.channels_first(found.trunk, size)
        if size.dim() != 2 + len(steps):
            raise InvalidOption(
                f"an input is a batch with channels, and {expected}; got a tensor of {tuple(size.shape)}"
            )
        return tuple(size.shape[2:])
    sides = (size, size) if is_int(size) else size
    right = isinstance(sides, list | tuple) and len(sides) == len(steps) and all(map(is_int, sides))
    if not right or any(side < step or side % step for side, step in zip(sides, steps, strict=True)):
        raise InvalidOption(f"size={size!r}; expected an input, or {expected}, each a multiple of the patches' {steps}")
    return tuple(sides)


def _parameters(model: nn.Module, found: Found) -> dict[str, int]:
    """Count parameters by part, each once, however often it is shared."""
    pairs = zip(found.block_adapters, found.blocks, strict=True)
    roots = {
        "embedding": [found.adapter.patch_embedding(found.trunk)],
        "feed": [part for parts, block in pairs for part in parts.feed_parts(block)],
        "attend": list(found.blocks),
    }
    seen: set[int] = set()
    counted = {}
    for name, parts in roots.items():
        new = {id(weight): weight.numel() for part in parts for weight in part.parameters() if id(weight) not in seen}
        seen |= set(new)
        counted[name] = sum(new.values())
    counted["rest"] = sum(weight.numel() for weight in model.parameters() if id(weight) not in seen)
    return {name: counted[name] for name in ("embedding", "attend", "feed", "rest")}
