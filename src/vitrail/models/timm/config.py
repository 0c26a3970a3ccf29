"""Derive a ``ViTConfig`` from a timm model; raise if the model has a part that ``ViT`` does not have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isclose
from typing import Any, Literal

from torch import nn

from vitrail.errors import UnsupportedModel
from vitrail.models.config import CLASS_TOKEN, DISTILLATION_TOKEN, ViTConfig, depth_rule
from vitrail.tokens import Role, TokenSpec

_FREE = {"training", "fused_attn", "init_values", "grad_checkpointing"}
"""Attributes that may differ between blocks without changing the output."""

_POOLS: dict[str, Literal["token", "mean", "attention"]] = {"token": "token", "avg": "mean", "map": "attention"}


def read_config(model: nn.Module) -> ViTConfig:
    """Return the configuration of the `ViT` that equals a timm model."""
    from timm.models.cait import Cait
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    refuse_changed(model)
    readers = {Cait: _cait, VisionTransformer: _vit, VisionTransformerDistilled: _vit}
    reader = readers.get(type(model))
    if reader is None:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be converted to vitrail.ViT; expected timm's "
            f"{', '.join(kind.__name__ for kind in readers)}"
        )
    return reader(model)


def refuse_changed(model: nn.Module) -> None:
    """Raise if a model has surgery, hooks or a replaced forward, which the conversion would silently drop."""
    for name, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if "_vitrail_plan" in vars(part):
            raise UnsupportedModel(
                "the model is merged or has added tokens; remove the merging (`Merging.of(model).remove()`) or the "
                "added tokens (`AddedTokens.of(model).remove()`) first"
            )
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            what = "a replaced forward" if "forward" in vars(part) else "hooks"
            raise UnsupportedModel(
                f"{name or 'the model'} has {what}, which the conversion would drop; remove it first"
            )


def _vit(model: Any) -> ViTConfig:
    from timm.layers import Attention, AttentionPoolLatent
    from timm.models.vision_transformer import Block

    _refuse(
        {
            "it drops patches in training": not isinstance(model.patch_drop, nn.Identity),
            "it pools special tokens, too": model.pool_include_prefix,
            f"it pools by {model.global_pool!r}": model.global_pool not in ("token", "avg", "map"),
            "its norm follows the pooling of a token": model.global_pool == "token" and _is_norm(model.fc_norm),
        }
    )
    _check_blocks(model, model.blocks, Block, Attention)
    first = model.blocks[0]
    attention = first.attn
    scaled = not isinstance(first.ls1, nn.Identity)
    _refuse(
        {
            "its attention is gated": getattr(attention, "gate", None) is not None,
            "its attention output is normalized": not isinstance(attention.norm, nn.Identity),
            "its heads do not add up to its width": attention.qkv.out_features != 3 * model.embed_dim,
            "only one of queries and keys has a norm": _is_norm(attention.q_norm) != _is_norm(attention.k_norm),
            "only one of its branches is scaled": scaled != (not isinstance(first.ls2, nn.Identity)),
        }
    )
    pool = model.attn_pool
    if pool is not None:
        plain = type(pool) is AttentionPoolLatent and pool.latent_len == 1 and pool.pos_embed is None
        right = plain and pool.num_heads == attention.num_heads and _is_scaled(pool, model.embed_dim)
        normed = right and _is_norm(pool.norm) and isinstance(pool.q_norm, nn.Identity)
        normed = normed and _are_linear(pool.q, pool.kv, pool.proj)
        _refuse({"its attention pooling is not supported": not normed or _mlp(pool.mlp) != "gelu"})
    return replace(
        _common(model, [model.norm_pre, model.norm, model.fc_norm, attention.q_norm, attention.k_norm]),
        tokens=_tokens(model),
        position="none" if model.pos_embed is None else "learned",
        layer_scale=float(first.ls1.init_values) if scaled else None,
        qk_norm=_is_norm(attention.q_norm),
        proj_bias=attention.proj.bias is not None,
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
            "it has no class-attention layers": not gathering,
        }
    )
    _check_blocks(model, model.blocks, LayerScaleBlock, TalkingHeadAttn)
    _check_blocks(model, gathering, LayerScaleBlockClassAttn, ClassAttn)
    first, last = model.blocks[0], gathering[0]
    _refuse(
        {
            "its two stages have different MLPs": _mlp(last.mlp) != "gelu"
            or last.mlp.fc1.out_features != first.mlp.fc1.out_features,
            "its two stages have different numbers of heads": last.attn.num_heads != first.attn.num_heads,
        }
    )
    return replace(
        _common(model, [model.norm, last.norm1, last.norm2]),
        tokens=(replace(CLASS_TOKEN, enters=-1, position=False),),
        layer_scale=depth_rule(len(model.blocks)),  # timm does not store the initial value
        pool=_POOLS[model.global_pool],
        class_attention=len(gathering),
        talking_heads=True,
        **_drop_path([block.drop_path for block in model.blocks]),
    )


def _common(model: Any, norms: Iterable[nn.Module]) -> ViTConfig:
    """Read the options that all timm models share, without special tokens."""
    from timm.layers import PatchEmbed

    first = model.blocks[0]
    embed = model.patch_embed
    norms = [norm for norm in (*norms, first.norm1, first.norm2) if not isinstance(norm, nn.Identity)]
    kind = _mlp(first.mlp)
    _refuse({"its MLPs use neither GELU nor packed SwiGLU": kind is None})
    heads = [getattr(model, name) for name in ("head", "head_dist") if hasattr(model, name)]
    sizes = {head.out_features if _are_linear(head) and head.bias is not None else 0 for head in heads}
    drops = {model.pos_drop.p, first.attn.proj_drop.p, *(getattr(first.mlp, name).p for name in ("drop1", "drop2"))}
    _refuse(
        {
            "its norms are not all LayerNorm": any(not _is_norm(norm) for norm in norms),
            "its norms have different epsilons": len({getattr(norm, "eps", None) for norm in norms}) > 1,
            "its patch embedding is not a plain PatchEmbed": type(embed) is not PatchEmbed
            or not isinstance(embed.norm, nn.Identity)
            or type(embed.proj) is not nn.Conv2d
            or embed.img_size is None,
            "its heads are not linear layers with a bias and the same number of classes": len(sizes) > 1
            or (sizes == {0} and not all(type(head) is nn.Identity for head in heads)),
            "its dropout rates differ, or it has dropout before the head": len(drops) > 1 or model.head_drop.p > 0,
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
        num_classes=sizes.pop(),  # model.num_classes may be outdated after a head was replaced
        tokens=(),
        pool="mean",
        mlp=kind,  # type: ignore[arg-type]
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
            f"this distilled model was built with reg_tokens={registers}, which timm ignores; build it with "
            "reg_tokens=0, or build a vitrail.ViT with both roles"
        )
    position = model.pos_embed is not None and not model.no_embed_class
    specs = [replace(CLASS_TOKEN, position=position)] if model.cls_token is not None else []
    if distilled:
        specs.append(replace(DISTILLATION_TOKEN, position=position))
    if registers:
        specs.append(TokenSpec("register", Role.REGISTER, count=registers, position=position))
    return tuple(specs)


def _mlp(mlp: Any) -> str | None:
    """Return the option ``mlp`` that equals a timm MLP; None if there is none."""
    from timm.layers import GluMlp, Mlp

    if not isinstance(getattr(mlp, "norm", None), nn.Identity):
        return None
    if not _are_linear(getattr(mlp, "fc1", None), getattr(mlp, "fc2", None)):
        return None
    if type(mlp) is Mlp:
        return "gelu" if type(mlp.act) is nn.GELU and mlp.act.approximate == "none" else None
    return "swiglu" if type(mlp) is GluMlp and type(mlp.act) is nn.SiLU and not mlp.gate_last else None


def _check_blocks(model: Any, blocks: Iterable[Any], kind: type, attending: type) -> None:
    """Raise if blocks have no equal in `ViT`, or differ from each other."""
    blocks = list(blocks)
    _refuse({"it has other blocks": any(type(block) is not kind for block in blocks) or not blocks})
    _refuse({"its attention is not supported": any(type(block.attn) is not attending for block in blocks)})
    first = _traits(blocks[0])
    for number, block in enumerate(blocks):
        traits = _traits(block)
        differing = sorted(path or "itself" for path in first.keys() | traits if traits.get(path) != first.get(path))
        _refuse({f"block {number} differs from block 0 in {', '.join(differing)}": bool(differing)})
    attention = blocks[0].attn
    layers = [part for name, part in attention.named_children() if name in ("qkv", "q", "k", "v", "proj")]
    _refuse(
        {
            "a linear layer of its attention is wrapped or replaced": not _are_linear(*layers),
            "its attention has another scale": not _is_scaled(attention, model.embed_dim),
        }
    )


def _traits(block: nn.Module) -> dict[str, Any]:
    """Return the class and plain attributes of each part of a block, without drop path, which varies with depth."""
    plain = (bool, int, float, str, tuple, type(None))
    return {
        path: (type(part), {k: v for k, v in vars(part).items() if isinstance(v, plain) and k not in _FREE})
        for path, part in block.named_modules()
        if not path.startswith("drop_path")
    }


def _drop_path(parts: list[Any]) -> dict[str, Any]:
    rates = [getattr(part, "drop_prob", 0.0) for part in parts]
    uniform = len(rates) > 1 and rates[0] == rates[-1] > 0
    steps = max(1, len(rates) - 1)
    wanted = [rates[-1] if uniform else rates[-1] * layer / steps for layer in range(len(rates))]
    odd = any(not isclose(rate, one, abs_tol=1e-6) for rate, one in zip(rates, wanted, strict=True))
    _refuse({"its drop path neither rises linearly from 0 nor is uniform": odd and len(rates) > 1})
    return {"drop_path": rates[-1], "drop_path_uniform": uniform}


def _are_linear(*parts: Any) -> bool:
    return all(type(part) is nn.Linear for part in parts)


def _is_scaled(attention: Any, width: int) -> bool:
    return isclose(attention.scale, (width // attention.num_heads) ** -0.5)


def _is_norm(part: nn.Module) -> bool:
    from timm.layers import LayerNorm

    return type(part) in (nn.LayerNorm, LayerNorm) and part.bias is not None


def _refuse(reasons: dict[str, bool]) -> None:
    found = [reason for reason, true in reasons.items() if true]
    if found:
        raise UnsupportedModel(f"this timm model cannot be converted to vitrail.ViT: {'; '.join(found)}")
