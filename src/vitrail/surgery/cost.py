"""What a model costs, as a function of how many tokens each layer merges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from vitrail.adapters import Found
from vitrail.adapters.base import BlockAdapter


@dataclass(frozen=True)
class BlockCost:
    """Multiply-adds of one block.

    Attributes:
        attend: weights that meet every token before the merge.
        feed: weights that meet every token after it.
        pair: weights that meet every pair of tokens: the channels of all heads, twice, and what heads talk with.
        feature: channels by which tokens are compared.
    """

    attend: int
    feed: int
    pair: int
    feature: int


@dataclass(frozen=True)
class CostModel:
    """Multiply-adds of matrix products and convolutions for one input.

    One multiply-add counts as one FLOP, as in the literature (ViT-B/16 has 17.6 GFLOPs); norms, activations and
    softmax are left out, as there.
    """

    per_patch: int
    fixed: int
    blocks: tuple[BlockCost, ...]

    @classmethod
    def of(cls, model: nn.Module, found: Found) -> CostModel:
        """Count the weights of a model by where tokens meet them."""
        patch_parts = found.adapter.patch_parts(found.trunk)
        counted = {id(part) for root in (*patch_parts, *found.blocks) for part in root.modules()}
        rest = [part for part in model.modules() if id(part) not in counted]
        return cls(
            per_patch=_weights(part for root in patch_parts for part in root.modules()),
            fixed=_weights(rest),
            blocks=tuple(map(_block_cost, found.block_adapters, found.blocks)),
        )

    def parts(self, special: int, patches: int, per_layer: Sequence[int]) -> dict[str, int]:
        """Give the cost of one input by part, for these merges of each layer."""
        length = special + patches
        found = dict.fromkeys(("patches", "projections", "attention", "feed", "matching", "rest"), 0)
        found |= {"patches": self.per_patch * patches, "rest": self.fixed}
        for block, r in zip(self.blocks, per_layer, strict=True):
            found["projections"] += length * block.attend
            found["attention"] += length * length * block.pair
            if r:
                found["matching"] += ((length + 1) // 2) * (length // 2) * block.feature
            length -= r
            found["feed"] += length * block.feed
        return found

    def counter(self, special: int, patches: int) -> Callable[[Sequence[int]], int]:
        """Give the cost of one input as a function of the merges of each layer."""
        return lambda per_layer: sum(self.parts(special, patches, per_layer).values())


def _block_cost(parts: BlockAdapter, block: nn.Module) -> BlockCost:
    heads, channels = parts.head_shape(block)
    attend, feed = (
        _weights(part for root in roots for part in root.modules())
        for roots in (parts.attend_parts(block), parts.feed_parts(block))
    )
    return BlockCost(attend, feed, 2 * heads * channels + parts.pair_weights(block), channels)


def _weights(parts: Iterable[nn.Module]) -> int:
    """Count the weights of matrices and kernels among modules."""
    weights = [getattr(part, "weight", None) for part in parts]
    return sum(weight.numel() for weight in weights if isinstance(weight, nn.Parameter) and weight.dim() > 1)
