"""The parts of a block. Shapes: B batch, H heads, N tokens, D channels, d channels of a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.merging.attention import fused_attention
from vitrail.models.config import ViTConfig
from vitrail.models.position import rotate


class PatchEmbed(nn.Module):
    """Turn the input into patches, and project each: (B, C, [T,] H, W) to (B, P, D).

    Patches are cut out and do not overlap; after a stem of convolutions they are its pixels.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        conv = nn.Conv2d if len(config.patch) == 2 else nn.Conv3d
        convolved = config.stem == "convolutions"
        self.stem = convolutions(config) if convolved else nn.Identity()
        channels, side = (config.width, (1, 1)) if convolved else (config.in_chans, config.patch)
        self.proj = conv(channels, config.width, side, stride=side, bias=not config.pre_norm)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches, row by row."""
        return self.proj(self.stem(x)).flatten(2).transpose(1, 2)


def convolutions(config: ViTConfig) -> nn.Sequential:
    """Build a stem: each layer halves the picture and doubles the channels, up to the width of the model."""
    layers: list[nn.Module] = []
    before, halvings = config.in_chans, config.patch[0].bit_length() - 1
    for left in reversed(range(halvings)):
        channels = config.width >> left
        layers += [nn.Conv2d(before, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        before = channels
    return nn.Sequential(*layers)


class Attention(nn.Module):
    """Self-attention with several heads; rotary position, norms of queries and keys, and a mask where asked for."""

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
        """Attend (B, N, D); ``mask`` (N, N) is true where a query (row) may read a key (column)."""
        batch, length, width = x.shape
        packed = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        attended = self.attend(q, k, v, mask).transpose(1, 2).reshape(batch, length, width)
        return self.proj_drop(self.proj(attended))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Mix the values (B, H, N, d) by attention."""
        dropout = self.attn_drop.p if self.training else 0.0
        return fused_attention(q, k, v, mask=mask, dropout=dropout)


class TalkingHeadsAttention(Attention):
    """Attention whose heads mix their scores before the softmax and their weights after it (CaiT's patch stage).

    Both maps have a bias, so that the second one gives weight to every key: a mask must act on either side.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.proj_l = nn.Linear(config.heads, config.heads)
        self.proj_w = nn.Linear(config.heads, config.heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Mix the values (B, H, N, d) by attention, written out: no fused kernel lets heads talk."""
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

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.hidden, bias=config.proj_bias)
        self.drop1 = nn.Dropout(config.dropout)
        self.fc2 = nn.Linear(config.hidden, config.width, bias=config.proj_bias)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Feed each token (B, N, D) on its own."""
        return self.drop2(self.fc2(self.drop1(F.gelu(self.fc1(x)))))


class SwiGLU(nn.Module):
    """A gated MLP: the first half of the first layer's outputs, through SiLU, scales the second half."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.hidden, bias=config.proj_bias)
        self.drop1 = nn.Dropout(config.dropout)
        self.fc2 = nn.Linear(config.hidden // 2, config.width, bias=config.proj_bias)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Feed each token (B, N, D) on its own."""
        gate, value = self.fc1(x).chunk(2, -1)
        return self.drop2(self.fc2(self.drop1(F.silu(gate) * value)))


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch; small at first: deep models start near the identity."""

    def __init__(self, width: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Scale each channel."""
        return x * self.gamma


class DropPath(nn.Module):
    """Leave out a residual branch for some samples while training, and make up for it in the others.

    The rate is a tensor inside: as a number it would be part of the code that the compiler makes, and every block would
    be compiled by itself.
    """

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    @property
    def drop_prob(self) -> float:
        """Probability with which a sample's branch is left out."""
        return self._drop_prob

    @drop_prob.setter
    def drop_prob(self, rate: float) -> None:
        self._drop_prob, self._drops = rate, rate > 0
        self._kept = torch.tensor(1 - rate, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        """Zero the branch of each sample with probability ``drop_prob``."""
        if not self._drops or not self.training:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < self._kept
        return x * kept / self._kept


class Block(nn.Module):
    """Attend, then feed: norm, attention, layer scale, sum; norm, MLP, layer scale, sum."""

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = layer_norm(config)
        self.attn = TalkingHeadsAttention(config) if config.talking_heads else Attention(config)
        self.ls1 = layer_scale(config)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = layer_norm(config)
        self.mlp = mlp(config)
        self.ls2 = layer_scale(config)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, rope: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Update all tokens (B, N, D); ``rope`` turns the last ones, ``mask`` says who reads whom."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), rope=rope, mask=mask)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def layer_norm(config: ViTConfig) -> nn.LayerNorm:
    """Build a norm over all channels."""
    return nn.LayerNorm(config.width, eps=config.norm_eps)


def layer_scale(config: ViTConfig) -> nn.Module:
    """Build the scale of a branch, where the model has one."""
    return nn.Identity() if config.layer_scale is None else LayerScale(config.width, config.layer_scale)


def mlp(config: ViTConfig) -> nn.Module:
    """Build the kind of MLP that the model has."""
    return {"gelu": Mlp, "swiglu": SwiGLU}[config.mlp](config)


def _head_norm(config: ViTConfig) -> nn.Module:
    return nn.LayerNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
