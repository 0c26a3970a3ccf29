"""Class attention: some tokens gather from all the others, which stay as they are (CaiT's second stage).

In a plain ViT the class token must do two things at once: help the patches to talk, and sum them up. Here the patches
talk first; then the tokens that enter at this stage ask, and only they change. Gradients still reach what they read.

Every special token that enters at the stage is a query. It reads the patches, the special tokens that entered
earlier (registers, say), the other queries unless they are invisible, and itself. Position plays no part here: a
query stands at no place in the picture.

Shapes: B batch, Q queries, M other tokens, H heads, D channels, d channels of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrail.merging.attention import weights_of_few
from vitrail.models.config import ViTConfig
from vitrail.models.layers import layer_norm, layer_scale, mlp


class ClassAttention(nn.Module):
    """Attention from the first tokens of a sequence to all of it."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.heads, config.head_width
        self.q = nn.Linear(config.width, config.width, bias=config.qkv_bias)
        self.k = nn.Linear(config.width, config.width, bias=config.qkv_bias)
        self.v = nn.Linear(config.width, config.width, bias=config.qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.proj = nn.Linear(config.width, config.width, bias=config.proj_bias)

    def forward(self, x: Tensor, queries: int, mask: Tensor | None = None) -> Tensor:
        """Give what the first ``queries`` tokens of (B, Q + M, D) read; ``mask`` (Q, Q + M) is true where they may."""
        v = self._heads(self.v(x))
        attended = self.weights(x, queries, mask).to(v.dtype) @ v
        return self.proj(attended.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor, queries: int, mask: Tensor | None = None) -> Tensor:
        """Give the attention (B, H, Q, Q + M) that `forward` mixes values by."""
        return weights_of_few(*self._queries_and_keys(x, queries), mask)

    def _queries_and_keys(self, x: Tensor, queries: int) -> tuple[Tensor, Tensor]:
        return self.q_norm(self._heads(self.q(x[:, :queries]))), self.k_norm(self._heads(self.k(x)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


class ClassAttentionBlock(nn.Module):
    """Gather, then feed: as in any block, but only the queries change, and nothing is dropped out."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        config = replace(config, dropout=0.0, attention_dropout=0.0)
        self.norm1 = layer_norm(config)
        self.attn = ClassAttention(config)
        self.ls1 = layer_scale(config)
        self.norm2 = layer_norm(config)
        self.mlp = mlp(config)
        self.ls2 = layer_scale(config)

    def forward(self, queries: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
        """Update the queries (B, Q, D) from themselves and the others (B, M, D)."""
        everything = self.norm1(torch.cat([queries, others], 1))
        queries = queries + self.ls1(self.attn(everything, queries.shape[1], mask=mask))
        return queries + self.ls2(self.mlp(self.norm2(queries)))

    def weights(self, queries: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
        """Give the attention (B, H, Q, Q + M) of the queries over themselves and the others."""
        return self.attn.weights(self.norm1(torch.cat([queries, others], 1)), queries.shape[1], mask)
