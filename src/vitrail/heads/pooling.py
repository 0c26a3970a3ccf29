"""Attention pooling of patches, and the linear layer of all heads."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._checks import is_int
from vitrail.errors import InvalidOption
from vitrail.merging.attention import weights_of_few


def linear(width: int, outputs: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> nn.Linear:
    """Return a linear layer with truncated normal weights (standard deviation 0.02) and zero biases."""
    layer = nn.Linear(width, outputs, device=device, dtype=dtype)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


def check_size(name: str, value: Any) -> None:
    """Raise if a number of channels or outputs is not an integer of 1 or more."""
    if not is_int(value, 1):
        raise InvalidOption(f"{name}={value!r}; expected an integer, 1 or more")


class AttentionPool(nn.Module):
    """Attention of one learned query over all patches: (B, P, D) to (B, D).

    The result is projected, followed by ``x + mlp(norm(x))``, or by the norm alone without an MLP. Parameters have the
    names and shapes of timm's ``AttentionPoolLatent``. Unmerge merged tokens first: each patch counts once.

    Args:
        width: channels of a token.
        heads: attention heads; by default one per 64 channels.
        norm: whether to apply a LayerNorm.
        mlp_ratio: hidden channels of the MLP as a multiple of the width; 0 for no MLP.
        norm_eps: epsilon of the norm.
    """

    def __init__(
        self, width: int, heads: int | None = None, *, norm: bool = True, mlp_ratio: float = 4.0, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        check_size("width", width)
        self.num_heads = max(1, width // 64) if heads is None else heads
        if not is_int(self.num_heads, 1) or width % self.num_heads:
            default = " (one per 64 channels); set heads" if heads is None else ""
            raise InvalidOption(f"heads must divide the width of {width} channels; got {self.num_heads}{default}")
        hidden = round(mlp_ratio * width)
        if hidden < 0:
            raise InvalidOption(f"mlp_ratio is 0 (no MLP) or more; got {mlp_ratio}")
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        nn.init.trunc_normal_(self.latent, std=width**-0.5)
        self.q = linear(width, width)
        self.kv = linear(width, 2 * width)
        self.proj = linear(width, width)
        self.norm = nn.LayerNorm(width, eps=norm_eps) if norm else nn.Identity()
        layers = (("fc1", linear(width, hidden)), ("act", nn.GELU()), ("fc2", linear(hidden, width))) if hidden else ()
        self.mlp = nn.Sequential(OrderedDict(layers)) if layers else None

    def forward(self, patches: Tensor) -> Tensor:
        heads = (self.num_heads, patches.shape[-1] // self.num_heads)
        q = self.q(self.latent).expand(len(patches), -1, -1).unflatten(-1, heads).transpose(1, 2)
        k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in self.kv(patches).chunk(2, -1))
        x = self.proj((weights_of_few(q, k).to(v.dtype) @ v).transpose(1, 2).flatten(1))
        return self.norm(x) if self.mlp is None else x + self.mlp(self.norm(x))
