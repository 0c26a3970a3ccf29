"""Reading the config off one of timm's models, part by part; a part that ours do not have is an error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from vitrail.errors import UnsupportedModel
from vitrail.models.config import CLASS_TOKEN, DISTILLATION_TOKEN, ViTConfig, depth_rule
from vitrail.tokens import Role, TokenSpec

_POOLS: dict[str, Literal["token", "mean", "attention"]] = {"token": "token", "avg": "mean", "map": "attention"}


def read_config(model: nn.Module) -> ViTConfig:
    """Give the config of one of timm's models as ours would have it."""
    from timm.models.cait import Cait
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    readers = {Cait: _cait, VisionTransformer: _vit, VisionTransformerDistilled: _vit}
    reader = readers.get(type(model))
    if reader is None:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot become one of our models; expected timm's "
            f"{', '.join(kind.__name__ for kind in readers)}"
        )
    return reader(model)


def _vit(model: Any) -> ViTConfig:
    from timm.layers import Attention, AttentionPoolLatent
    from timm.models.vision_transformer import Block

    _refuse(
        {
            "its patches are dropped while training": not isinstance(model.patch_drop, nn.Identity),
            "it pools special tokens too": model.pool_include_prefix,
            f"it pools by {model.global_pool!r}": model.global_pool not in ("token", "avg", "map"),
            "it has blocks of another class": any(type(block) is not Block for block in model.blocks),
            "its norm comes after a token is picked": model.global_pool == "token" and _is_norm(model.fc_norm),
            "it attends in another way": any(type(block.attn) is not Attention for block in model.blocks),
        }
    )
    for block in model.blocks:
        attention = block.attn
        _refuse(
            {
                "its attention has a gate": getattr(attention, "gate", None) is not None,
                "its attention has a norm of its output": not isinstance(attention.norm, nn.Identity),
                "its heads do not add up to its width": attention.qkv.out_features != 3 * model.embed_dim,
            }
        )
    pool = model.attn_pool
    if pool is not None:
        plain = type(pool) is AttentionPoolLatent and pool.latent_len == 1 and pool.pos_embed is None
        right = plain and pool.num_heads == model.blocks[0].attn.num_heads and isinstance(pool.q, nn.Linear)
        normed = right and _is_norm(pool.norm) and isinstance(pool.q_norm, nn.Identity)
        _refuse({"its attention pooling is of another kind": not normed or _mlp(pool.mlp) != "gelu"})
    first = model.blocks[0]
    scaled = not isinstance(first.ls1, nn.Identity)
    return replace(
        _common(model, [model.norm_pre, model.norm, model.fc_norm, first.attn.q_norm]),
        tokens=_tokens(model),
        position="none" if model.pos_embed is None else "learned",
        layer_scale=float(first.ls1.init_values) if scaled else None,
        qk_norm=_is_norm(first.attn.q_norm),
        proj_bias=first.attn.proj.bias is not None,
        pool=_POOLS[model.global_pool],
        final_norm="tokens" if _is_norm(model.norm) else "pooled" if _is_norm(model.fc_norm) else "none",
        pre_norm=_is_norm(model.norm_pre),
        **_drop_path([block.drop_path1 for block in model.blocks]),
    )


def _cait(model: Any) -> ViTConfig:
    from timm.models.cait import ClassAttn, LayerScaleBlock, LayerScaleBlockClassAttn, TalkingHeadAttn

    gathering = list(model.blocks_token_only)
    _refuse(
        {
            f"it pools by {model.global_pool!r}": model.global_pool not in ("token", "avg"),
            "it has blocks of another class": any(type(block) is not LayerScaleBlock for block in model.blocks)
            or any(type(block) is not LayerScaleBlockClassAttn for block in gathering),
            "it attends in another way": any(type(block.attn) is not TalkingHeadAttn for block in model.blocks)
            or any(type(block.attn) is not ClassAttn for block in gathering),
            "it has no class-attention layers": not gathering,
            "its two stages have MLPs of different kinds": {_mlp(block.mlp) for block in gathering} != {"gelu"}
            or any(block.mlp.fc1.out_features != model.blocks[0].mlp.fc1.out_features for block in gathering),
        }
    )
    return replace(
        _common(model, [model.norm, *(block.norm1 for block in gathering)]),
        tokens=(replace(CLASS_TOKEN, enters=-1, position=False),),
        layer_scale=depth_rule(len(model.blocks)),  # timm does not keep the first value
        pool=_POOLS[model.global_pool],
        class_attention=len(gathering),
        talking_heads=True,
        **_drop_path([block.drop_path for block in model.blocks]),
    )


def _common(model: Any, norms: Iterable[nn.Module]) -> ViTConfig:
    """Read what all of timm's models have; of special tokens, only that they need not be there."""
    from timm.layers import PatchEmbed

    first = model.blocks[0]
    embed = model.patch_embed
    blocks = [part for block in model.blocks for part in (block.norm1, block.norm2)]
    norms = [norm for norm in (*norms, *blocks) if not isinstance(norm, nn.Identity)]
    kinds = {_mlp(block.mlp) for block in model.blocks}
    _refuse(
        {
            "its norms are not all LayerNorm": any(not _is_norm(norm) for norm in norms),
            "its norms have different epsilons": len({getattr(norm, "eps", None) for norm in norms}) > 1,
            "its patch embedding is of another kind": type(embed) is not PatchEmbed
            or not isinstance(embed.norm, nn.Identity)
            or embed.img_size is None,
            "its MLPs are neither of GELU nor of packed SwiGLU": None in kinds or len(kinds) > 1,
            "its dropouts after positions and projections differ, or it has one before the head": model.pos_drop.p
            != first.attn.proj_drop.p
            or model.head_drop.p > 0,
        }
    )
    return ViTConfig(
        image_size=tuple(embed.img_size),
        patch_size=tuple(embed.patch_size),
        in_chans=embed.proj.in_channels,
        width=model.embed_dim,
        depth=len(model.blocks),
        heads=first.attn.num_heads,
        mlp_ratio=first.mlp.fc1.out_features / model.embed_dim,
        num_classes=model.num_classes,
        tokens=(),
        pool="mean",
        mlp=kinds.pop(),  # type: ignore[arg-type]
        qkv_bias=first.attn.qkv.bias is not None,
        norm_eps=first.norm1.eps,
        dropout=first.attn.proj_drop.p,
        attention_dropout=first.attn.attn_drop.p,
    )


def _tokens(model: Any) -> tuple[TokenSpec, ...]:
    registers = getattr(model, "num_reg_tokens", 0)
    distilled = getattr(model, "dist_token", None) is not None
    if distilled and registers:
        raise UnsupportedModel(
            f"this distilled model was asked for {registers} registers, and timm leaves them out of its sequence; "
            "build it with reg_tokens=0, or build one of our models with both roles"
        )
    position = model.pos_embed is not None and not model.no_embed_class
    specs = [replace(CLASS_TOKEN, position=position)] if model.cls_token is not None else []
    if distilled:
        specs.append(replace(DISTILLATION_TOKEN, position=position))
    if registers:
        specs.append(TokenSpec("register", Role.REGISTER, count=registers, position=position))
    return tuple(specs)


def _mlp(mlp: Any) -> str | None:
    """Say which of our MLPs one of timm's is, if any."""
    from timm.layers import GluMlp, Mlp

    if not isinstance(getattr(mlp, "norm", None), nn.Identity):
        return None
    if type(mlp) is Mlp and isinstance(mlp.fc1, nn.Linear):
        return "gelu" if type(mlp.act) is nn.GELU and mlp.act.approximate == "none" else None
    return "swiglu" if type(mlp) is GluMlp and type(mlp.act) is nn.SiLU and not mlp.gate_last else None


def _drop_path(parts: list[Any]) -> dict[str, Any]:
    rates = [getattr(part, "drop_prob", 0.0) for part in parts]
    return {"drop_path": rates[-1], "drop_path_uniform": len(rates) > 1 and rates[0] == rates[-1] > 0}


def _is_norm(part: nn.Module) -> bool:
    from timm.layers import LayerNorm

    return type(part) in (nn.LayerNorm, LayerNorm) and part.bias is not None


def _refuse(reasons: dict[str, bool]) -> None:
    found = [reason for reason, true in reasons.items() if true]
    if found:
        raise UnsupportedModel(f"this model of timm cannot become one of ours: {'; '.join(found)}")
