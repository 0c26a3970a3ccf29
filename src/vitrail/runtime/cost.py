"""What a model costs, as a function of how many tokens each layer merges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from vitrail.adapters import Found
from vitrail.adapters.base import BlockAdapter
from vitrail.merging import Method, ToMe


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

    Attributes:
        per_patch: weights outside of blocks that meet every patch.
        fixed: those that are met once.
        late: how many tokens have entered in each block since the first one.
    """

    per_patch: int
    fixed: int
    blocks: tuple[BlockCost, ...]
    late: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, found: Found) -> CostModel:
        """Count the weights of a model by where tokens meet them."""
        patch_parts = found.adapter.patch_parts(found.trunk)
        counted = {id(part) for root in (*patch_parts, *found.blocks) for part in root.modules()}
        rest = [part for part in model.modules() if id(part) not in counted]
        return cls(
            per_patch=sum(map(_per_patch, patch_parts)),
            fixed=_weights(rest),
            blocks=tuple(map(_block_cost, found.block_adapters, found.blocks)),
            late=late_tokens(found),
        )

    def parts(
        self,
        special: int,
        patches: int,
        per_layer: Sequence[int],
        beside: Sequence[int] = (),
        read: bool = False,
        method: Method | None = None,
    ) -> dict[str, int]:
        """Return the cost of one input by part, for these merges of each layer.

        With ``beside``, this many added tokens run beside the others in each layer; the others read them (``read``) or
        do not.
        """
        method = ToMe() if method is None else method
        kept = special + patches
        extra = list(beside) or [0] * len(per_layer)
        found = dict.fromkeys(("patches", "projections", "attention", "feed", "matching", "rest"), 0)
        found |= {"patches": self.per_patch * patches, "rest": self.fixed}
        for block, r, late, more in zip(self.blocks, per_layer, self.late, extra, strict=True):
            length = kept + late
            if r:
                found["matching"] += method.flops(length, block.feature)
            fed = length - r
            length = fed if method.place == "before" else length
            found["projections"] += (length + more) * block.attend
            found["attention"] += (length * length + more * (length + more)) * block.pair
            found["attention"] += length * more * block.pair if read else 0
            kept -= 0 if method.scope == "block" else r
            found["feed"] += (fed + more) * block.feed
        return found

    def counter(
        self,
        special: int,
        patches: int,
        beside: Sequence[int] = (),
        read: bool = False,
        method: Method | None = None,
    ) -> Callable[[Sequence[int]], int]:
        """Return the cost of one input as a function of the merges of each layer."""
        return lambda per_layer: sum(self.parts(special, patches, per_layer, beside, read, method).values())


def late_tokens(found: Found) -> tuple[int, ...]:
    """Say how many tokens have entered in each block since the first one."""
    layouts = [found.adapter.layout_in(found.trunk, layer) for layer in range(len(found.blocks))]
    return tuple(layout.num_special - layouts[0].num_special for layout in layouts)


def _block_cost(parts: BlockAdapter, block: nn.Module) -> BlockCost:
    heads, channels = parts.head_shape(block)
    attend, feed = (
        _weights(part for root in roots for part in root.modules())
        for roots in (parts.attend_parts(block), parts.feed_parts(block))
    )
    return BlockCost(attend, feed, 2 * heads * channels + parts.pair_weights(block), channels)


def _per_patch(root: nn.Module) -> int:
    """Count how many weights a patch meets; what comes before a stride is met at each of the places that it skips."""
    times, total = 1, 0
    for part in reversed(list(root.modules())):
        total += times * _weights([part])
        times *= prod(part.stride) if isinstance(part, nn.Conv2d | nn.Conv3d) else 1
    return total


def _weights(parts: Iterable[nn.Module]) -> int:
    """Count the weights of matrices and kernels among modules."""
    weights = [getattr(part, "weight", None) for part in parts]
    return sum(weight.numel() for weight in weights if isinstance(weight, nn.Parameter) and weight.dim() > 1)
