"""Pre-norm blocks whose parts are called as timm calls them: timm's own, and those of our models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter


class PreNormBlock(BlockAdapter):
    """``norm1``, ``attn`` with one layer for queries, keys and values, ``ls1``; ``norm2``, ``mlp``, ``ls2``."""

    def attend_norm(self, block: Any, x: Tensor) -> Tensor:
        return block.norm1(x)

    def qkv(self, block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = block.attn
        batch, length, _ = h.shape
        packed = attention.qkv(h).reshape(batch, length, 3, attention.num_heads, attention.head_dim)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return attention.q_norm(q), attention.k_norm(k), v

    def attention_dropout(self, block: Any) -> float:
        return block.attn.attn_drop.p if block.attn.training else 0.0

    def attend_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.drop_path1(block.ls1(y))

    def feed_norm(self, block: Any, x: Tensor) -> Tensor:
        return block.norm2(x)

    def feed(self, block: Any, h: Tensor) -> Tensor:
        return block.mlp(h)

    def feed_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.drop_path2(block.ls2(y))

    def attend_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.attn,)

    def feed_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.mlp,)

    def head_shape(self, block: Any) -> tuple[int, int]:
        return block.attn.num_heads, block.attn.head_dim
