"""One vector from many patches: their mean, or what one learned query gathers from them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import InvalidOption
from vitrail.merging.attention import weights_of_few


def linear(width: int, outputs: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> nn.Linear:
    """Make a linear layer as heads begin: weights of standard deviation .02 cut at two, biases zero."""
    layer = nn.Linear(width, outputs, device=device, dtype=dtype)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


def check_size(name: str, value: Any) -> None:
    """Refuse a number of channels or outputs that is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidOption(f"{name}={value!r}; expected a whole number, 1 or more")


class AttentionPool(nn.Module):
    """One learned query attends to all patches: (B, P, D) becomes (B, D).

    What it gathers is projected, and then goes through ``x + mlp(norm(x))``, or through the norm alone where there
    is no MLP. Parameters have the names and shapes of timm's latent attention pooling. Every patch counts once:
    merged tokens are unmerged before they come here.

    Args:
        width: channels of a token.
        heads: attention heads; by default one for 64 channels.
        norm: whether there is a LayerNorm.
        mlp_ratio: hidden channels of the MLP, as a multiple of the width; 0 for no MLP.
        norm_eps: epsilon of the norm.
    """

    def __init__(
        self,
        width: int,
        heads: int | None = None,
        *,
        norm: bool = True,
        mlp_ratio: float = 4.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_size("width", width)
        self.num_heads = max(1, width // 64) if heads is None else heads
        whole = isinstance(self.num_heads, int) and self.num_heads >= 1
        if not whole or width % self.num_heads:
            raise InvalidOption(
                f"heads of attention pooling share {width} channels evenly; got {self.num_heads} heads"
                f"{' (one for 64 channels); say how many' if heads is None else ''}"
            )
        hidden = round(mlp_ratio * width)
        if hidden < 0:
            raise InvalidOption(f"mlp_ratio is 0 for no MLP, or more; got {mlp_ratio}")
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        nn.init.trunc_normal_(self.latent, std=width**-0.5)
        self.q = linear(width, width)
        self.kv = linear(width, 2 * width)
        self.proj = linear(width, width)
        self.norm = nn.LayerNorm(width, eps=norm_eps) if norm else nn.Identity()
        self.mlp: nn.Module | None = None
        if hidden:
            layers = (("fc1", linear(width, hidden)), ("act", nn.GELU()), ("fc2", linear(hidden, width)))
            self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, patches: Tensor) -> Tensor:
        heads = (self.num_heads, patches.shape[-1] // self.num_heads)
        q = self.q(self.latent).expand(len(patches), -1, -1).unflatten(-1, heads).transpose(1, 2)
        k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in self.kv(patches).chunk(2, -1))
        x = self.proj((weights_of_few(q, k).to(v.dtype) @ v).transpose(1, 2).flatten(1))
        return self.norm(x) if self.mlp is None else x + self.mlp(self.norm(x))
