"""timm's blocks with parallel parts: attention beside the MLP (ViT-22B), or several attentions, then several MLPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, BlockCall, is_plain
from vitrail.adapters.named_block import BlockNames, NamedBlock
from vitrail.errors import UnsupportedModel

_SCALING = BlockNames(
    norm1="in_norm",
    qkv="in_proj",
    proj="out_proj",
    norm2="in_norm",
    mlp="mlp_out_proj",
    heads="num_heads",
    head_dim="head_dim",
    q_norm="q_norm",
    k_norm="k_norm",
    after_attend=("ls", "drop_path"),
    attention_dropout="attn_drop",
    arguments=(("attn_mask", "mask"), ("is_causal", "causal")),
)


class ParallelScalingNamedBlock(NamedBlock):
    """A block whose attention and MLP read the same tokens, so that they merge behind both, for the next block."""

    def project(self, block: Any, h: Tensor) -> Tensor:
        return _in_proj(block, h, slice(block.in_split[0], None))

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        hidden = _in_proj(block, h, slice(0, block.in_split[0]))
        if block.mlp_bias is not None and _early_bias(block) is None:
            hidden = hidden + block.mlp_bias
        hidden = block.mlp_drop(block.mlp_act(hidden))
        if _joint_proj(block) is not None:
            return block.out_proj(torch.cat((attended, hidden), dim=-1))
        return block.attn_out_proj(attended) + block.mlp_out_proj(hidden)

    def feed_norm(self, block: nn.Module, x: Tensor) -> Tensor:
        return x

    def feed(self, block: nn.Module, h: Tensor) -> Tensor:
        return h.new_zeros(())

    def feed_branch(self, block: nn.Module, y: Tensor) -> Tensor:
        return y

    def attend_parts(self, block: Any) -> Sequence[nn.Module]:
        parts = (block.in_proj, _joint_proj(block), block.attn_out_proj, block.mlp_out_proj)
        return [part for part in parts if part is not None]

    def feed_parts(self, block: nn.Module) -> Sequence[nn.Module]:
        return ()

    def feed_last(self, block: Any) -> nn.Module:
        if block.mlp_out_proj is None:
            raise UnsupportedModel(f"this {type(block).__name__} has one projection behind attention and MLP")
        last: nn.Module = block.mlp_out_proj
        return last


def _in_proj(block: Any, h: Tensor, rows: slice) -> Tensor:
    """Compute some outputs of the projection that attention and MLP share; all where it was replaced (LoRA)."""
    early = _early_bias(block)
    if early is None and not is_plain(block.in_proj, nn.Linear):
        return block.in_proj(h)[..., rows]
    bias = block.in_proj.bias if early is None else early
    return F.linear(h, block.in_proj.weight[rows], None if bias is None else bias[rows])


def _early_bias(block: Any) -> Tensor | None:
    """Return the bias of all outputs of timm before 1.0.28, which applies its parts in this order."""
    own = getattr(block, "qkv_bias", None)
    return None if own is None else torch.cat((own, block.mlp_bias))


def _joint_proj(block: Any) -> nn.Module | None:
    """Return the projection behind attention and MLP together; None where each has its own."""
    return getattr(block, "out_proj", None)


class ParallelThingsNamedBlock(BlockAdapter):
    """A block of several attentions side by side, which are one with all their heads, and several MLPs."""

    def __init__(self, names: BlockNames) -> None:
        half: dict[str, Any] = {"norm1": "norm", "norm2": "norm", "after_attend": ("ls", "drop_path"), "dense": None}
        self.half = NamedBlock(replace(names, **half))

    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        return self.half.read_call(args, kwargs)

    def attend_norm(self, block: nn.Module, x: Tensor) -> Tensor:
        return x

    def qkv(self, block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = [self.half.qkv(part, part.norm(h)) for part in block.attns]
        q, k, v = (torch.cat(each, 1) for each in zip(*found, strict=True))
        return q, k, v

    def attention_dropout(self, block: Any) -> float:
        return self.half.attention_dropout(block.attns[0])

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        pieces = attended.chunk(len(block.attns), -1)
        return _summed(
            lambda part, piece: self.half.attend_branch(part, self.half.attend_output(part, piece, part.norm(h))),
            block.attns,
            pieces,
        )

    def attend_branch(self, block: nn.Module, y: Tensor) -> Tensor:
        return y

    def feed_norm(self, block: nn.Module, x: Tensor) -> Tensor:
        return x

    def feed(self, block: Any, h: Tensor) -> Tensor:
        return _summed(lambda part, x: part(x), block.ffns, [h] * len(block.ffns))

    def feed_branch(self, block: nn.Module, y: Tensor) -> Tensor:
        return y

    def attend_parts(self, block: Any) -> Sequence[nn.Module]:
        return [part.attn for part in block.attns]

    def feed_parts(self, block: Any) -> Sequence[nn.Module]:
        return [part.mlp for part in block.ffns]

    def head_shape(self, block: Any) -> tuple[int, int]:
        heads, width = self.half.head_shape(block.attns[0])
        return heads * len(block.attns), width


def _summed(run: Callable[[Any, Tensor], Tensor], parts: Any, inputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([run(part, x) for part, x in zip(parts, inputs, strict=True)]).sum(dim=0)


SCALING = ParallelScalingNamedBlock(_SCALING)
"""The adapter of ``ParallelScalingBlock``."""
