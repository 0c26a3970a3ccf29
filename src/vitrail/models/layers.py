"""Layers of the ViT: patch embedding, attention, MLP, block, class attention.

Shapes: B batch, H heads, N tokens, Q queries, D channels, d channels of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.merging.attention import fused_attention, weights_of_few
from vitrail.models.config import ViTConfig
from vitrail.models.position import rotate


class PatchEmbed(nn.Module):
    """Patch embedding, (B, C, [T,] H, W) to (B, P, D): one projection, after a convolutional stem if there is one."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        conv = nn.Conv2d if len(config.patch) == 2 else nn.Conv3d
        convolved = config.stem == "convolutions"
        self.stem = _stem(config) if convolved else nn.Identity()
        channels, side = (config.width, (1, 1)) if convolved else (config.in_chans, config.patch)
        self.proj = conv(channels, config.width, side, stride=side, bias=not config.pre_norm)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.stem(x)).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention, optionally with rotary position, norms of queries and keys, and a mask."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.heads, config.head_width
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.q_norm = _head_norm(config)
        self.k_norm = _head_norm(config)
        self.attn_drop = nn.Dropout(config.attention_dropout)
        self.proj = nn.Linear(config.width, config.width, bias=config.proj_bias)
        self.proj_drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Apply attention to (B, N, D); ``mask`` (N, N) is true where a query (row) attends to a key (column)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        attended = self.attend(q, k, v, mask).transpose(1, 2).reshape(batch, length, width)
        return self.proj_drop(self.proj(attended))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the values (B, H, N, d) weighted by attention."""
        return fused_attention(q, k, v, mask=mask, dropout=self.attn_drop.p if self.training else 0.0)


class TalkingHeadsAttention(Attention):
    """Attention with linear maps across heads before and after the softmax (CaiT's patch stage).

    Both maps have a bias, so that the second gives weight to every key; the mask therefore applies after it, too.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.proj_l = nn.Linear(config.heads, config.heads)
        self.proj_w = nn.Linear(config.heads, config.heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the values (B, H, N, d) weighted by attention; no fused kernel mixes heads."""
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        scores = self.proj_l(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = self.proj_w(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0)
        return self.attn_drop(weights) @ v


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    gated = False

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.hidden, bias=config.proj_bias)
        self.drop1 = nn.Dropout(config.dropout)
        self.fc2 = nn.Linear(config.hidden // (2 if self.gated else 1), config.width, bias=config.proj_bias)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.drop1(self.activate(self.fc1(x)))))

    def activate(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden)


class SwiGLU(Mlp):
    """A gated MLP: the first half of the hidden channels, through SiLU, scales the second half."""

    gated = True

    def activate(self, hidden: Tensor) -> Tensor:
        gate, value = hidden.chunk(2, -1)
        return F.silu(gate) * value


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch, small at first so that deep models start near the identity."""

    def __init__(self, width: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), float(value)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: drop a residual branch for some samples in training, and scale up the others.

    The rate is stored as a tensor: torch.compile would specialize on a number and compile each block separately.
    """

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    @property
    def drop_prob(self) -> float:
        """Probability of dropping the branch of a sample."""
        return self._drop_prob

    @drop_prob.setter
    def drop_prob(self, rate: float) -> None:
        self._drop_prob, self._drops = rate, rate > 0
        self._kept = torch.tensor(1 - rate, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        if not self._drops or not self.training:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < self._kept
        return x * kept / self._kept


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each with layer scale, drop path and a residual sum."""

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = layer_norm(config)
        self.attn = TalkingHeadsAttention(config) if config.talking_heads else Attention(config)
        self.ls1 = _layer_scale(config)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = layer_norm(config)
        self.mlp = _mlp(config)
        self.ls2 = _layer_scale(config)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, rope: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Update all tokens (B, N, D); ``rope`` rotates the last ones, ``mask`` is that of `Attention`."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), rope=rope, mask=mask)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ClassAttention(nn.Module):
    """Attention from the first tokens of a sequence to all of it."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.heads, config.head_width
        self.q = nn.Linear(config.width, config.width, bias=config.qkv_bias)
        self.k = nn.Linear(config.width, config.width, bias=config.qkv_bias)
        self.v = nn.Linear(config.width, config.width, bias=config.qkv_bias)
        self.q_norm = _head_norm(config)
        self.k_norm = _head_norm(config)
        self.proj = nn.Linear(config.width, config.width, bias=config.proj_bias)

    def forward(self, x: Tensor, queries: int, mask: Tensor | None = None) -> Tensor:
        """Attend from the first ``queries`` tokens of (B, N, D); ``mask`` (Q, N) is true where they may."""
        v = self._heads(self.v(x))
        attended = self.weights(x, queries, mask).to(v.dtype) @ v
        return self.proj(attended.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor, queries: int, mask: Tensor | None = None) -> Tensor:
        """Return the attention weights (B, H, Q, N) that `forward` uses."""
        q, k = self.q_norm(self._heads(self.q(x[:, :queries]))), self.k_norm(self._heads(self.k(x)))
        return weights_of_few(q, k, mask)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


class ClassAttentionBlock(nn.Module):
    """A block of CaiT's second stage: some tokens attend to all others, and only they change.

    In a plain ViT the class token both takes part in the exchange between patches and summarizes them. Here the
    special tokens that enter at this stage are queries; they attend to the patches, to special tokens that entered
    earlier, to visible queries, and to themselves. There are no positions and no dropout.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        config = replace(config, dropout=0.0, attention_dropout=0.0)
        self.norm1 = layer_norm(config)
        self.attn = ClassAttention(config)
        self.ls1 = _layer_scale(config)
        self.norm2 = layer_norm(config)
        self.mlp = _mlp(config)
        self.ls2 = _layer_scale(config)

    def forward(self, queries: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
        """Update the queries (B, Q, D) from themselves and the others (B, N − Q, D)."""
        x = self.norm1(torch.cat([queries, others], 1))
        queries = queries + self.ls1(self.attn(x, queries.shape[1], mask=mask))
        return queries + self.ls2(self.mlp(self.norm2(queries)))

    def weights(self, queries: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention weights (B, H, Q, N) of the queries over themselves and the others."""
        return self.attn.weights(self.norm1(torch.cat([queries, others], 1)), queries.shape[1], mask)


def layer_norm(config: ViTConfig) -> nn.LayerNorm:
    """Build a norm over all channels."""
    return nn.LayerNorm(config.width, eps=config.norm_eps)


def _stem(config: ViTConfig) -> nn.Sequential:
    """Build the convolutional stem: each layer halves the image and doubles the channels, up to the model's width."""
    layers: list[nn.Module] = []
    before, halvings = config.in_chans, config.patch[0].bit_length() - 1
    for left in reversed(range(halvings)):
        channels = config.width >> left
        layers += [nn.Conv2d(before, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        before = channels
    return nn.Sequential(*layers)


def _layer_scale(config: ViTConfig) -> nn.Module:
    return nn.Identity() if config.layer_scale is None else LayerScale(config.width, config.layer_scale)


def _mlp(config: ViTConfig) -> nn.Module:
    return SwiGLU(config) if config.mlp == "swiglu" else Mlp(config)


def _head_norm(config: ViTConfig) -> nn.Module:
    return nn.LayerNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
