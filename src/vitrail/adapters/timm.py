"""timm: ``VisionTransformer`` (DeiT, DINOv2, CLIP and SigLIP towers among them) and ``Eva`` (DINOv3 among them)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
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
from vitrail.adapters.forward_pass import open_pass
from vitrail.adapters.pre_norm import PreNormBlock
from vitrail.adapters.timm_rotary import ROTARY
from vitrail.data.spec import InputSpec
from vitrail.errors import ModelLoadError, UnsupportedModel
from vitrail.tokens import Role, TokenLayout


def load(name: str, pretrained: bool = True, **options: Any) -> nn.Module:
    """Create a timm model by name."""
    try:
        import timm
    except ImportError as error:
        raise ModelLoadError(f"timm:{name} needs timm; install it with `pip install vitrail[timm]`") from error
    if not timm.is_model(name.split(".")[0]) and not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        raise ModelLoadError(f"timm has no model named {name!r}; `timm.list_models('*vit*')` lists those it has")
    try:
        return timm.create_model(name, pretrained=pretrained, **options).eval()
    except Exception as error:
        hint = (
            " Check the network, name a folder with its weights (timm:local-dir:FOLDER), or go on with random weights "
            "(pretrained=False) where they do not matter."
            if pretrained
            else ""
        )
        raise ModelLoadError(f"timm could not build {name!r}: {str(error).rstrip('.')}.{hint}") from error


class TimmBlock(PreNormBlock):
    """``Block``: pre-norm, with ``LayerScale`` modules."""

    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        names = ("attn_mask", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return BlockCall(given.get("attn_mask"), bool(given.get("is_causal", False)))

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        attention = block.attn
        y = attention.norm(attended)
        if attention.gate is not None:
            y = y * attention.gate(h).sigmoid()
        return attention.proj_drop(attention.proj(y))

    def dense(self, block: Any) -> DenseBlock | None:
        from timm.layers import LayerNorm, LayerScale, Mlp

        attention, mlp = block.attn, block.mlp
        norms = (block.norm1, block.norm2)
        linears = (attention.qkv, attention.proj, mlp.fc1, mlp.fc2) if type(mlp) is Mlp else ()
        plain = (
            linears
            and all(is_plain(norm, nn.LayerNorm, LayerNorm) and norm.bias is not None for norm in norms)
            and all(is_plain(linear, nn.Linear) and linear.bias is not None for linear in linears)
            and all(
                is_plain(part, nn.Identity) for part in (attention.q_norm, attention.k_norm, attention.norm, mlp.norm)
            )
            and all(is_plain(scale, nn.Identity, LayerScale) for scale in (block.ls1, block.ls2))
            and all(is_plain(whole, type(whole)) for whole in (attention, mlp))
            and attention.gate is None
            and is_plain(mlp.act, nn.GELU)
            and not at_work(attention.attn_drop)
        )
        if not plain:
            return None
        gammas = tuple(getattr(scale, "gamma", None) for scale in (block.ls1, block.ls2))
        after_mlp = at_work(mlp.drop2, block.drop_path2)
        drops = (at_work(attention.proj_drop, block.drop_path1), at_work(mlp.drop1), after_mlp)
        return DenseBlock(
            attention.num_heads, norms[0], (attention.qkv,), attention.proj, norms[1], mlp.fc1, mlp.fc2,
            gammas, None, mlp.act.approximate, drops,  # type: ignore[arg-type]
        )  # fmt: skip


class TimmPostNormBlock(TimmBlock):
    """``ResPostBlock``: the norms act on each branch's output."""

    def dense(self, block: Any) -> DenseBlock | None:
        return None

    def attend_norm(self, block: Any, x: Tensor) -> Tensor:
        return x

    def attend_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.drop_path1(block.norm1(y))

    def feed_norm(self, block: Any, x: Tensor) -> Tensor:
        return x

    def feed_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.drop_path2(block.norm2(y))


class TimmEvaBlock(TimmBlock):
    """``EvaBlock``: pre-norm, layer scale as plain parameters, rotary position in attention."""

    def dense(self, block: Any) -> DenseBlock | None:
        return None

    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        names = ("rope", "attn_mask", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return BlockCall(given.get("attn_mask"), bool(given.get("is_causal", False)), given.get("rope"))

    def qkv(self, block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = block.attn
        batch, length, _ = h.shape
        if attention.qkv is None:
            parts: tuple[Tensor, ...] = (attention.q_proj(h), attention.k_proj(h), attention.v_proj(h))
        else:
            parts = _packed_qkv(attention, h).chunk(3, -1)
        q, k, v = (part.reshape(batch, length, -1, attention.head_dim).transpose(1, 2) for part in parts)
        return attention.q_norm(q), attention.k_norm(k), v

    def rotate(self, block: Any, x: Tensor, table: Tensor) -> Tensor:
        from timm.layers import apply_rot_embed_cat

        front = x.shape[2] - table.shape[-2]
        half = block.attn.rotate_half
        return torch.cat([x[:, :, :front], apply_rot_embed_cat(x[:, :, front:], table, half=half)], dim=2)

    def shift_prefix(self, block: Any, by: int) -> None:
        block.attn.num_prefix_tokens += by

    def attend_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.drop_path1(y if block.gamma_1 is None else block.gamma_1 * y)

    def feed_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.drop_path2(y if block.gamma_2 is None else block.gamma_2 * y)


class TimmEvaPostNormBlock(TimmEvaBlock):
    """``EvaBlockPostNorm``: the norms act on each branch's output."""

    attend_norm = TimmPostNormBlock.attend_norm
    attend_branch = TimmPostNormBlock.attend_branch
    feed_norm = TimmPostNormBlock.feed_norm
    feed_branch = TimmPostNormBlock.feed_branch


def _packed_qkv(attention: Any, h: Tensor) -> Tensor:
    """Project as the library does: ``EvaAttention`` keeps query and value biases apart and has none for keys."""
    if getattr(attention, "q_bias", None) is None:
        return attention.qkv(h)
    bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
    if attention.qkv_bias_separate:
        return attention.qkv(h) + bias
    return F.linear(h, attention.qkv.weight, bias)


class TimmEntryPoints:
    """Ways into a timm trunk; each opens a pass with the layout of the input at hand."""

    _vitrail_adapter: TrunkAdapter

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._vitrail_pass(x):
            return super().forward_features(x, *args, **kwargs)  # type: ignore[misc]

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        gridded = kwargs.get("output_fmt", args[4] if len(args) > 4 else "NCHW") == "NCHW"
        with self._vitrail_pass(x, expose=True, gridded=gridded):
            return super().forward_intermediates(x, *args, **kwargs)  # type: ignore[misc]

    def _vitrail_pass(
        self: Any, x: Tensor, expose: bool = False, gridded: bool = False
    ) -> AbstractContextManager[None]:
        adapter = self._vitrail_adapter
        layout = adapter.layout(self, (x.shape[-2], x.shape[-1]))
        return open_pass(self, layout, adapter.rotary(self, layout.grid), expose, gridded)


class TimmVisionTransformer(TrunkAdapter):
    """``VisionTransformer`` and its subclasses."""

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: nn.Module) -> BlockAdapter:
        from timm.layers import Attention
        from timm.models.vision_transformer import Block, ResPostBlock

        known: dict[type, BlockAdapter] = {Block: TimmBlock(), ResPostBlock: TimmPostNormBlock()}
        return _known_block(block, known, (Attention,))

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        special: list[tuple[Role, int]] = [(Role.CLASS, int(trunk.cls_token is not None))]
        special.append((Role.DISTILLATION, int(getattr(trunk, "dist_token", None) is not None)))
        special.append((Role.REGISTER, trunk.num_prefix_tokens - sum(count for _, count in special)))
        embed = trunk.patch_embed
        grid = embed.grid_size if size is None else embed.dynamic_feat_size(size)
        return TokenLayout.of(*special, grid=(1, *grid))

    def resizes(self, trunk: Any) -> bool:
        return trunk.dynamic_img_size

    def preprocessing(self, trunk: Any) -> InputSpec:
        given = getattr(trunk, "pretrained_cfg", None) or {}
        size = trunk.patch_embed.img_size or given.get("input_size", (3, 224, 224))[-2:]
        half = (0.5, 0.5, 0.5)
        return InputSpec(tuple(size), tuple(given.get("mean", half)), tuple(given.get("std", half)))

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        names = {Role.CLASS: "cls_token", Role.DISTILLATION: "dist_token", Role.REGISTER: "reg_token"}
        found = {(role, ""): getattr(trunk, name, None) for role, name in names.items()}
        return {role: value for role, value in found.items() if value is not None}

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        return trunk.num_classes

    def entry_points(self) -> type:
        return TimmEntryPoints

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        pool = getattr(trunk.attn_pool, "kv", None)  # other poolings have no weights for patches
        return (trunk.patch_embed,) if pool is None else (trunk.patch_embed, pool)


class TimmEva(TimmVisionTransformer):
    """``Eva``: the same outside, rotary position inside."""

    def block_adapter(self, block: nn.Module) -> BlockAdapter:
        from timm.layers import AttentionRope
        from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm

        known: dict[type, BlockAdapter] = {EvaBlock: TimmEvaBlock(), EvaBlockPostNorm: TimmEvaPostNormBlock()}
        return _known_block(block, known, (EvaAttention, AttentionRope))

    def check(self, trunk: Any) -> None:
        if trunk.rope is not None and type(trunk.rope).__name__ not in ROTARY:
            raise UnsupportedModel(
                f"the rotary position {type(trunk.rope).__name__} of this Eva model is not supported; "
                f"supported are {', '.join(ROTARY)}"
            )

    def rotary(self, trunk: Any, grid: tuple[int, int, int]) -> Rotary | None:
        if trunk.rope is None:
            return None
        dropped = trunk.training and trunk.patch_drop is not None
        return ROTARY[type(trunk.rope).__name__](trunk.rope, grid[1:], dropped)


def _known_block(block: Any, known: dict[type, BlockAdapter], attentions: tuple[type, ...]) -> BlockAdapter:
    adapter = known.get(forward_class(block))
    if adapter is None:
        raise UnsupportedModel(
            f"blocks of class {type(block).__name__} are not supported: Vitrail merges between attention and MLP, "
            f"and knows {', '.join(kind.__name__ for kind in known)} of timm. If it is a wrapper, merge before wrapping"
        )
    if forward_class(block.attn) not in attentions:
        raise UnsupportedModel(
            f"attention of class {type(block.attn).__name__} is not supported in {type(block).__name__}; "
            f"supported are {', '.join(kind.__name__ for kind in attentions)}"
        )
    return adapter


def trunks() -> dict[type, TrunkAdapter]:
    """Give timm's supported model classes."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    return {VisionTransformer: TimmVisionTransformer(), Eva: TimmEva()}
