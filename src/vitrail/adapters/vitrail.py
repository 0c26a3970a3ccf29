"""Models of our own: ViT, DeiT and CaiT, with tokens of any roles.

Blocks are those in which patches attend; the class-attention stage, where patches no longer change, comes after them
and sees every patch again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import (
    BlockAdapter,
    BlockCall,
    DenseBlock,
    Rotary,
    TrunkAdapter,
    at_work,
    forward_class,
    is_plain,
)
from vitrail.adapters.forward_pass import hand_over, open_pass
from vitrail.adapters.pre_norm import PreNormBlock
from vitrail.adapters.saved import EMBEDDED, PREFIX, load_saved, named
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedInput, UnsupportedModel
from vitrail.models import ViT, create_model
from vitrail.models.layers import Block, LayerScale, Mlp, TalkingHeadsAttention
from vitrail.models.position import coordinates, rotary_frequencies, rotate
from vitrail.tokens import Role, TokenLayout, TokenSpec


def load(name: str, pretrained: bool = True, **options: Any) -> nn.Module:
    """Create a model by name, or read one that comes with us, one that was saved to a folder, or that of a run."""
    folder = named(f"{PREFIX}{name}")
    if folder.is_dir() or name in EMBEDDED:
        return load_saved(folder)
    if "/" in name or name.startswith("."):
        raise ModelLoadError(f"there is no folder {name!r}; expected that of a run, or of a model that was saved")
    if pretrained:
        raise ModelLoadError(
            f"there are no trained weights for {name!r}; expected {', '.join(PREFIX + one for one in EMBEDDED)}, or a "
            "folder that a model was saved to. Or go on with random weights (pretrained=False)"
        )
    try:
        return create_model(name, **options).eval()
    except InvalidOption as error:
        raise ModelLoadError(str(error)) from error


class OwnBlock(PreNormBlock):
    """``Block``: pre-norm, with layer scale, and fused attention."""

    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        given = {**dict(zip(("rope", "mask"), args, strict=False)), **kwargs}
        return BlockCall(mask=given.get("mask"), rope=given.get("rope"), among_special=True)

    def rotate(self, block: Any, x: Tensor, table: Tensor) -> Tensor:
        return rotate(x, table)

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        return block.attn.proj_drop(block.attn.proj(attended))

    def dense(self, block: Any) -> DenseBlock | None:
        attention, mlp = block.attn, block.mlp
        linears = (attention.qkv, attention.proj, mlp.fc1, mlp.fc2)
        plain = (
            is_plain(mlp, Mlp)
            and all(is_plain(norm, nn.LayerNorm) for norm in (block.norm1, block.norm2))
            and all(is_plain(linear, nn.Linear) and linear.bias is not None for linear in linears)
            and all(is_plain(norm, nn.Identity) for norm in (attention.q_norm, attention.k_norm))
            and all(is_plain(scale, nn.Identity, LayerScale) for scale in (block.ls1, block.ls2))
            and is_plain(attention, type(attention))
            and not at_work(attention.attn_drop)
        )
        if not plain:
            return None
        gamma1, gamma2 = (getattr(scale, "gamma", None) for scale in (block.ls1, block.ls2))
        after = at_work(attention.proj_drop, block.drop_path1)
        return DenseBlock(
            attention.num_heads, block.norm1, (attention.qkv,), attention.proj, block.norm2, mlp.fc1, mlp.fc2,
            (gamma1, gamma2), None, "none", (after, at_work(mlp.drop1), at_work(mlp.drop2, block.drop_path2)),
        )  # fmt: skip


class TalkingHeadsBlock(OwnBlock):
    """A block whose heads mix their scores before the softmax and their weights after it."""

    fused = False

    def weigh(self, block: Any, scores: Tensor, bias: Tensor | None = None) -> Tensor:
        """A key that counts s times is what s equal keys are together, also for the bias of the second map."""
        attention = block.attn
        mixed = attention.proj_l(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = super().weigh(block, mixed, bias)
        floor = attention.proj_w.bias[:, None, None]
        if bias is not None:
            floor = floor * bias.exp().to(weights.dtype)
        return F.linear(weights.permute(0, 2, 3, 1), attention.proj_w.weight).permute(0, 3, 1, 2) + floor

    def dense(self, block: Any) -> DenseBlock | None:
        return None

    def attend_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.attn.qkv, block.attn.proj)

    def pair_weights(self, block: Any) -> int:
        return block.attn.proj_l.weight.numel() + block.attn.proj_w.weight.numel()


class OwnEntryPoint:
    """The way into a model of ours; opens a pass with the layout of the input at hand."""

    _vitrail_adapter: OwnTrunk

    def forward_features(self: Any, x: Tensor) -> Tensor:
        adapter = self._vitrail_adapter
        layout = adapter.layout(self, tuple(x.shape[2:]))
        with open_pass(self, layout, adapter.rotary(self, layout.grid)):
            return super().forward_features(x)  # type: ignore[misc]

    def _enter(self: Any, x: Tensor, entered: Sequence[TokenSpec], here: Sequence[TokenSpec], special: Any) -> Tensor:
        woven: Tensor = super()._enter(x, entered, here, special)  # type: ignore[misc]
        layout = TokenLayout.from_specs(entered, (1, 1, 1))
        spans = zip(entered, layout.spans(), strict=False)
        places = [place for spec, (_, where) in spans if spec not in here for place in where]
        hand_over(x, woven, places, layout.special)
        return woven


class OwnTrunk(TrunkAdapter):
    """``ViT``."""

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: Any) -> BlockAdapter:
        if forward_class(block) is not Block:
            raise UnsupportedModel(f"blocks of class {type(block).__name__} are not those of our models")
        return TalkingHeadsBlock() if isinstance(block.attn, TalkingHeadsAttention) else OwnBlock()

    def layout(self, trunk: Any, size: Any = None) -> TokenLayout:
        return trunk.layout(size, layer=0)

    def layout_in(self, trunk: Any, layer: int, size: Any = None) -> TokenLayout:
        return trunk.layout(size, layer=layer if layer >= 0 else trunk.config.depth + layer)

    def stage(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks_token_only)

    def stage_attention(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return block.weights(*args, **kwargs)

    def resizes(self, trunk: Any) -> bool:
        return True

    def preprocessing(self, trunk: Any) -> InputSpec:
        size = trunk.config.image_size
        return InputSpec((size, size) if isinstance(size, int) else tuple(size)[-2:], MEAN, STD)

    def entry_points(self) -> type:
        return OwnEntryPoint

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        gathering = [part for block in trunk.blocks_token_only for part in (block.attn.k, block.attn.v)]
        return (trunk.patch_embed, *gathering)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        return {(spec.role, spec.name): trunk.tokens[spec.name] for spec in trunk.config.tokens}

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        return trunk.config.num_classes

    def rotary(self, trunk: Any, grid: tuple[int, int, int]) -> Rotary | None:
        config = trunk.config
        if config.position != "rotary":
            return None
        if trunk.training and config.patch_drop:
            raise UnsupportedInput(
                "this model leaves patches out in training and has rotary position: where a patch came from is then "
                "not known; train it with patch_drop=0, or merge in eval mode only"
            )
        weight = trunk.patch_embed.proj.weight
        dtype, axes = torch.promote_types(weight.dtype, torch.float32), len(config.patch)
        frequencies = rotary_frequencies(config.head_width, axes, weight.device, dtype)
        return Rotary(coordinates(grid, axes, weight.device, dtype), frequencies[None, None], False)


def trunks() -> dict[type, TrunkAdapter]:
    """Give our model classes."""
    return {ViT: OwnTrunk()}
