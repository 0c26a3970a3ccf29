"""A three-block toy ViT, and its adapter, registered from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail
from vitrail.adapters import ADAPTERS, BlockAdapter, BlockNames, InputSpec, NamedBlock, TrunkAdapter, known_block
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


TOY_BLOCK = NamedBlock(
    BlockNames(norm1="norm1", qkv="qkv", proj="proj", norm2="norm2", mlp="mlp", heads="heads", tokens="x")
)


class ToyAdapter(TrunkAdapter):
    argument = "images"

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: nn.Module) -> BlockAdapter:
        return known_block(block, {ToyBlock: TOY_BLOCK})

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = size or (16, 16)
        return TokenLayout.of(Role.CLASS, grid=(1, height // 4, width // 4))

    def resizes(self, trunk: Any) -> bool:
        return True

    def input_spec(self, trunk: Any) -> InputSpec:
        return InputSpec((16, 16), argument="images")

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.patch,)


@pytest.fixture
def toy() -> Iterator[ToyViT]:
    """A toy model whose adapter is registered for the length of a test, as a user registers one."""
    vitrail.register_adapter(ToyViT, ToyAdapter())
    torch.manual_seed(0)
    yield ToyViT().double().eval()
    del ADAPTERS[ToyViT]
