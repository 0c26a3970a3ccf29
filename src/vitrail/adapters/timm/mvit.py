"""timm's ``MultiScaleVit`` (MViT v2): every block convolves queries, keys and values over the grid.

Blocks whose keys are one for each token merge. Those that pool queries or keys (the first two stages, and the first
block of each stage) run as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, BlockCall, QkvName, known_block
from vitrail.adapters.named_block import TIMM_NAMES
from vitrail.adapters.timm.windowed import TimmWindowedTrunk
from vitrail.adapters.windows import DecomposedNamedBlock, LayerWindows, Pooling, Windows
from vitrail.errors import UnsupportedModel
from vitrail.tokens import TokenLayout

_MVIT = replace(
    TIMM_NAMES, scale="attn.scale", q_norm=None, k_norm=None, proj_drop=None, attention_dropout=None, dense=None,
    after_attend=("drop_path1",), after_feed=("drop_path2",), arguments=(("feat_size", "grid"),),
)  # fmt: skip


class MvitBlock(DecomposedNamedBlock):
    """A block of MViT v2."""

    mixes = True

    def returned(self, tokens: Tensor, call: BlockCall) -> Any:
        return tokens, call.grid

    def windows(self, block: Any) -> Windows | None:
        widens = block.shortcut_proj_attn is not None or block.shortcut_proj_mlp is not None
        pools = self.stride(block, "q") > 1 or self.stride(block, "k") > 1
        return None if widens or pools else Windows()

    def stride(self, block: Any, part: QkvName) -> int:
        """Return how many tokens along each axis become one query or key."""
        pool = getattr(block.attn, f"pool_{part}")
        if pool is None:
            return 1
        return pool.stride if isinstance(pool.stride, int) else pool.stride[0]

    def mix(self, block: Any, x: Tensor, part: QkvName, grid: tuple[int, int]) -> Tensor:
        pool, norm = (getattr(block.attn, f"{name}_{part}") for name in ("pool", "norm"))
        if pool is not None:
            maps = pool(x.flatten(0, 1).transpose(1, 2).unflatten(2, grid))
            x = maps.flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])
        return x if norm is None else norm(x)

    def attended(self, block: Any, values: Tensor, q: Tensor) -> Tensor:
        return values + q.transpose(1, 2).flatten(2) if block.attn.residual_pooling else values

    def mixing_weights(self, block: Any) -> int:
        return sum(self.taps(block, part) for part in ("q", "k", "v"))

    def taps(self, block: Any, part: QkvName) -> int:
        """Count the weights that multiply each query or key while pooling, in all heads."""
        pool = getattr(block.attn, f"pool_{part}")
        return pool.weight.numel() * block.attn.num_heads if isinstance(pool, nn.Conv2d) else 0

    def pooling(self, block: Any) -> Pooling:
        """Return the cost of a block that runs as it is."""
        attention, mlp = block.attn, (block.mlp.fc1, block.mlp.fc2, block.shortcut_proj_mlp)
        shortcut = block.shortcut_proj_attn
        return Pooling(
            Windows(),
            self.stride(block, "q"),
            attention.qkv.weight.numel(),
            0 if shortcut is None else shortcut.weight.numel(),
            attention.proj.weight.numel() + self.taps(block, "q"),
            2 * attention.dim_out,
            sum(part.weight.numel() for part in mlp if part is not None),
            self.stride(block, "k"),
            self.taps(block, "k") + self.taps(block, "v"),
            self.row_weights(block),
        )


_BLOCK = MvitBlock(_MVIT)


class TimmMvit(TimmWindowedTrunk):
    """``MultiScaleVit`` without a class token, for images of one size."""

    norm = "norm"

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return [block for stage in trunk.stages for block in stage.blocks]

    def block_adapter(self, block: Any) -> BlockAdapter:
        return known_block(block, {"timm.models.mvitv2.MultiScaleBlock": _BLOCK})

    def check(self, trunk: Any) -> None:
        attention = trunk.stages[0].blocks[0].attn
        reason = None
        if trunk.cls_token is not None:
            reason = "with a class token, which stands outside of the grid on which tokens merge"
        elif type(attention).__name__ != "MultiScaleAttention" or attention.unshared:
            reason = "with pooling before the projections, or with a convolution for each head"
        if reason is not None:
            raise UnsupportedModel(
                f"MultiScaleVit {reason}, is not supported; mvitv2_tiny, mvitv2_small, mvitv2_base and mvitv2_large are"
            )

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        if size is None:
            return TokenLayout.of(grid=(1, *self._grid(trunk)))
        steps = trunk.patch_embed.proj.stride
        return TokenLayout.of(grid=(1, *(-(-side // step) for side, step in zip(size, steps, strict=True))))

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        found, step = [], 1
        for block in self.blocks(trunk):
            step *= _BLOCK.stride(block, "q")
            windows = _BLOCK.windows(block)
            found.append(LayerWindows(step, windows, pooling=_BLOCK.pooling(block) if windows is None else None))
        return tuple(found)

    def resizes(self, trunk: Any) -> bool:
        return False

    def input_size(self, trunk: Any) -> tuple[int, ...]:
        pairs = zip(self._grid(trunk), trunk.patch_embed.proj.stride, strict=True)
        return tuple(side * step for side, step in pairs)

    def _grid(self, trunk: Any) -> tuple[int, int]:
        """Return the grid of patches that the model was made for."""
        height, width = trunk.stages[0].feat_size
        stride = _BLOCK.stride(trunk.stages[0].blocks[0], "q")
        return height * stride, width * stride
