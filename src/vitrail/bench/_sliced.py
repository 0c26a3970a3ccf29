"""The lower bound on time: a model whose tokens are cut off for free.

Each block attends with the library's modules and PyTorch's plain attention, drops the last tokens instead of merging
any, and feeds the rest. It has as many tokens in each layer as the merged model but no sizes, no matching and no
unmerging. Its output is useless; its time is what merging would take if it cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.adapters.base import BlockAdapter, repeat_heads
from vitrail.errors import InvalidOption
from vitrail.runtime.class_swap import swap


@dataclass(frozen=True)
class Slice:
    """Settings of a sliced block: tokens that leave it, special tokens in front, and the block's adapter."""

    length: int
    special: int
    parts: BlockAdapter


class SlicedBlock:
    """Mixin in front of a library's block: attend, cut, feed."""

    _vitrail_slice: Slice

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        mine = self._vitrail_slice
        if args:
            x, args = args[0], args[1:]
        else:
            x = kwargs.pop(mine.parts.input_name)
        block: Any = self
        parts, length, call = mine.parts, mine.length, mine.parts.read_call(args, kwargs)
        h = parts.attend_norm(block, x)
        q, k, v = parts.qkv(block, h)
        if call.rope is not None:
            table = call.rope[..., : q.shape[2] - mine.special, :]
            q, k = parts.rotate(block, q, table).type_as(v), parts.rotate(block, k, table).type_as(v)
        attended = _attend(parts, block, q, *repeat_heads(q, k, v))
        branch = parts.attend_branch(block, parts.attend_output(block, attended.transpose(1, 2).flatten(2), h))
        # cut before the sum: same values, fewer bytes, and a contiguous input for the norm
        x = x[:, :length] + branch[:, :length]
        return x + parts.feed_branch(block, parts.feed(block, parts.feed_norm(block, x)))


def _attend(parts: BlockAdapter, block: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale, dropout = parts.attention_scale(block), parts.attention_dropout(block)
    if parts.fused:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    scores = (q * (scale or q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)
    return F.dropout(parts.weigh(block, scores), dropout) @ v


def slice_tokens(model: nn.Module, lengths: Sequence[int]) -> None:
    """Change a model in place so that ``lengths[i]`` tokens leave block ``i``; this cannot be undone.

    Special tokens come first and stay.
    """
    found = find(model)
    if len(lengths) != len(found.blocks):
        raise InvalidOption(f"expected one length for each of {len(found.blocks)} blocks; got {len(lengths)}")
    special = found.adapter.layout(found.trunk).num_special
    for block, parts, length in zip(found.blocks, found.block_adapters, lengths, strict=True):
        block._vitrail_slice = Slice(length, special, parts)  # type: ignore[assignment]
        swap(block, SlicedBlock)
