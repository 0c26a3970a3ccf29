"""A three-block toy ViT, and the adapter that a new library would need: one file and one dict entry."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail.adapters
from vitrail.adapters.base import BlockAdapter, BlockCall, TrunkAdapter
from vitrail.adapters.forward_pass import open_pass
from vitrail.data.spec import InputSpec
from vitrail.tokens import Role, TokenLayout


class ToyBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ToyViT(nn.Module):
    """Class token, 4 × 4 patches of 4 pixels, three blocks, one linear head."""

    def __init__(self, width: int = 16, heads: int = 2, depth: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(ToyBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0] + x[:, 1:].mean(1))


class ToyBlockAdapter(BlockAdapter):
    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        return BlockCall()

    def attend_norm(self, block: Any, x: Tensor) -> Tensor:
        return block.norm1(x)

    def qkv(self, block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (block.heads, -1)).transpose(1, 2) for part in block.qkv(h).chunk(3, -1))
        return q, k, v

    def attention_dropout(self, block: Any) -> float:
        return 0.0

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        return block.proj(attended)

    def attend_branch(self, block: Any, y: Tensor) -> Tensor:
        return y

    def feed_norm(self, block: Any, x: Tensor) -> Tensor:
        return block.norm2(x)

    def feed(self, block: Any, h: Tensor) -> Tensor:
        return block.mlp(h)

    def feed_branch(self, block: Any, y: Tensor) -> Tensor:
        return y

    def attend_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.qkv, block.proj)

    def feed_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.mlp,)

    def head_shape(self, block: Any) -> tuple[int, int]:
        return block.heads, block.proj.in_features // block.heads


class ToyEntryPoint:
    def forward(self: Any, images: Tensor) -> Tensor:
        with open_pass(self, self._vitrail_adapter.layout(self, images.shape[-2:])):
            return super().forward(images)  # type: ignore[misc]


class ToyAdapter(TrunkAdapter):
    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: nn.Module) -> BlockAdapter:
        return ToyBlockAdapter()

    def layout(self, trunk: Any, size: tuple[int, int] | None = None) -> TokenLayout:
        height, width = size or (16, 16)
        return TokenLayout.of(Role.CLASS, grid=(1, height // 4, width // 4))

    def resizes(self, trunk: Any) -> bool:
        return True

    def preprocessing(self, trunk: Any) -> InputSpec:
        return InputSpec((16, 16), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

    def entry_points(self) -> type:
        return ToyEntryPoint

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.patch,)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyViT:
    """A toy model whose library is known to Vitrail for the length of a test."""
    library = types.ModuleType("vitrail.adapters.toy")
    library.trunks = lambda: {ToyViT: ToyAdapter()}  # type: ignore[attr-defined]
    monkeypatch.setitem(vitrail.adapters.sys.modules, "toy", types.ModuleType("toy"))
    monkeypatch.setitem(vitrail.adapters.sys.modules, "vitrail.adapters.toy", library)
    monkeypatch.setitem(vitrail.adapters.ADAPTERS, "toy", "toy")
    torch.manual_seed(0)
    return ToyViT().double().eval()
