"""Conversion from and to timm: ``from_timm``, ``to_timm``; outputs stay equal.

A model is convertible if the other library holds all of it: a timm model if it equals, module by module, what timm
builds from the configuration read from it; a `ViT` if its configuration, built by timm, is read back as it was. So no
list of supported options is needed, and options of future timm versions are noticed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any, Literal

import torch
from torch import nn

from vitrail._arguments import checked
from vitrail.errors import InvalidOption, UnsupportedModel
from vitrail.models.config import CLASS_TOKEN, DISTILLATION_TOKEN, ViTConfig, depth_rule
from vitrail.models.saving import load_states
from vitrail.models.timm.weights import TIMM_TOKENS, check_vit, load_timm_state_dict, timm_state_dict
from vitrail.models.vit import ViT
from vitrail.tokens import Role, TokenSpec

_POOLS: dict[str, Literal["token", "mean", "attention"]] = {"token": "token", "avg": "mean", "map": "attention"}

_IRRELEVANT = {
    *("training", "grad_checkpointing", "fused_attn", "init_values", "weight_init_mode", "fix_init"),
    *("dynamic_img_size", "dynamic_img_pad", "strict_img_size", "flatten", "output_fmt"),
    *("num_classes", "no_embed_class", "distilled_training"),  # parameter shapes tell
}
"""Attributes of timm modules that do not change the output for the model's own input size."""

_TOKENS = (
    "special tokens other than one class token, then one for distillation or registers (timm: all visible, entering "
    "first or in class attention, with positions for all or none, and with the model's classes)"
)


@checked
def from_timm(model: nn.Module) -> ViT:
    """Convert timm's ``VisionTransformer`` (including DeiT and DINOv2) or ``Cait`` to a `ViT`, copying the weights.

    Raises :class:`~vitrail.errors.UnsupportedModel` if the model has a part that `ViT` does not have.
    """
    config = _read_config(model)
    states = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        converted = ViT(config)
    load_timm_state_dict(converted, states, assign=True)
    return converted.train(model.training)


@checked
def to_timm(model: ViT) -> nn.Module:
    """Convert a `ViT` to a timm model, copying the weights; raise if timm has no equal."""
    check_vit(model)
    _refuse_changed(model)
    converted = _build_timm(model.config)
    states = {name: value.detach().clone() for name, value in timm_state_dict(model).items()}
    load_states(converted, states, assign=True)
    return converted.train(model.training)


def _read_config(model: nn.Module) -> ViTConfig:
    """Return the configuration of the `ViT` that equals a timm model; raise if there is none."""
    from timm.models.cait import Cait
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    _refuse_changed(model)
    kinds = (VisionTransformer, VisionTransformerDistilled, Cait)
    if type(model) not in kinds:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be converted to vitrail.ViT; expected timm's "
            f"{', '.join(kind.__name__ for kind in kinds)}"
        )
    refused = "this timm model cannot be converted to vitrail.ViT"
    try:
        config = _read(model, staged=type(model) is Cait)
    except (AttributeError, IndexError, InvalidOption) as error:
        raise UnsupportedModel(f"{refused}: {error}") from error
    differences = _differences(model, _build_timm(config))
    if differences:
        listed = "; ".join(differences[:4]) + ("; ..." if len(differences) > 4 else "")
        raise UnsupportedModel(f"{refused}, which has no equal of: {listed}")
    return config


def _refuse_changed(model: nn.Module) -> None:
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


def _build_timm(config: ViTConfig) -> nn.Module:
    """Build the timm model of a configuration on the meta device; raise if timm has no equal."""
    from timm.models.cait import Cait
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    distilled = any(spec.role is Role.DISTILLATION for spec in config.tokens)
    kind = Cait if config.class_attention else VisionTransformerDistilled if distilled else VisionTransformer
    refused = "timm has no equal of this model"
    try:
        with torch.device("meta"):
            made: nn.Module = kind(**_options(config))
        held = _essence(_read(made, staged=kind is Cait))
    except Exception as error:  # timm raises many kinds
        raise UnsupportedModel(f"{refused}: {error}; use save_pretrained instead") from error
    lost = [name for name, value in _essence(config).items() if not _same(value, held[name])]
    lacking = [_TOKENS if name == "tokens" else f"{name}={getattr(config, name)!r}" for name in lost]
    unlike = {  # timm builds these, and computes something else
        f"fuse={config.fuse!r}": config.fuse == "softmax" or (config.fuse != "logits" and distilled),
        "SwiGLU with attention pooling": config.mlp == "swiglu" and config.pool == "attention",
        "a distillation token with pooled patches": distilled and config.pool != "token",
        "a distillation token without position": distilled and not all(map(config.positioned, config.tokens)),
    }
    lacking += [what for what, found in unlike.items() if found]
    if lacking:
        raise UnsupportedModel(f"{refused}, which has {'; '.join(lacking)}; use save_pretrained instead")
    return made


def _essence(config: ViTConfig) -> dict[str, Any]:
    """Return what conversion must keep: no initial values, names of tokens, or options without effect."""
    specs = [(spec.role, spec.count, spec.visible, spec.classes) for spec in config.tokens]
    places = [(config.positioned(spec), config.entry(spec)) for spec in config.tokens]
    return {
        **vars(config),
        "image_size": config.image,
        "patch_size": config.patch,
        "mlp_ratio": config.hidden,
        "layer_scale": config.layer_scale is not None,
        "drop_path": [round(rate, 6) for rate in config.drop_paths],
        "tokens": [*zip(specs, places, strict=True)],
        **dict.fromkeys(("fuse", "drop_path_uniform")),
    }


def _read(model: Any, staged: bool) -> ViTConfig:
    """Read a configuration, assuming that all blocks are alike and all parts are ordinary."""
    embed, first = model.patch_embed, model.blocks[0]
    attention, mlp = first.attn, first.mlp
    rates = [getattr(block.drop_path if staged else block.drop_path1, "drop_prob", 0.0) for block in model.blocks]
    config = ViTConfig(
        image_size=tuple(embed.img_size or ()),
        patch_size=tuple(embed.patch_size),
        in_chans=embed.proj.in_channels,
        width=model.embed_dim,
        depth=len(model.blocks),
        heads=attention.num_heads,
        mlp_ratio=mlp.fc1.out_features / model.embed_dim,
        num_classes=getattr(model.head, "out_features", 0),  # model.num_classes may be outdated
        tokens=(replace(CLASS_TOKEN, enters=-1, position=False),) if staged else _tokens(model),
        layer_scale=depth_rule(len(model.blocks)) if staged else getattr(first.ls1, "init_values", None),
        mlp="swiglu" if type(mlp).__name__ == "GluMlp" else "gelu",
        qkv_bias=attention.qkv.bias is not None,
        norm_eps=first.norm1.eps,
        pool=_POOLS.get(model.global_pool, model.global_pool),
        drop_path=rates[-1],
        drop_path_uniform=rates[0] == rates[-1] > 0,
        dropout=attention.proj_drop.p,
        attention_dropout=attention.attn_drop.p,
        class_attention=len(model.blocks_token_only) if staged else 0,
        talking_heads=staged,
    )
    if staged:
        return config
    return replace(
        config,
        position="none" if model.pos_embed is None else "learned",
        qk_norm=_exists(attention.q_norm),
        proj_bias=attention.proj.bias is not None,
        final_norm="tokens" if _exists(model.norm) else "pooled" if _exists(model.fc_norm) else "none",
        pre_norm=_exists(model.norm_pre),
    )


def _exists(part: nn.Module) -> bool:
    return not isinstance(part, nn.Identity)


def _tokens(model: Any) -> tuple[TokenSpec, ...]:
    position = model.pos_embed is not None and not model.no_embed_class
    specs = [replace(CLASS_TOKEN, position=position)] if model.cls_token is not None else []
    if getattr(model, "dist_token", None) is not None:  # timm ignores registers of distilled models
        specs.append(replace(DISTILLATION_TOKEN, position=position))
    elif model.num_reg_tokens:
        specs.append(TokenSpec("register", Role.REGISTER, count=model.num_reg_tokens, position=position))
    return tuple(specs)


def _differences(model: nn.Module, twin: nn.Module) -> list[str]:
    """Describe the modules in which a model differs from another."""
    own, expected = ({path: _traits(part) for path, part in one.named_modules()} for one in (model, twin))
    found = []
    for path in dict.fromkeys((*own, *expected)):
        one, other = own.get(path, {"class": "missing"}), expected.get(path, {"class": "missing"})
        names = [name for name in {**one, **other} if not _same(one.get(name), other.get(name))]
        if names:
            values = [str(one[name]) if name == "class" else f"{name}={one.get(name)}" for name in names]
            found.append(f"{path or 'the model'} ({values[0] if 'class' in names else ', '.join(values)})")
    return found


def _traits(part: nn.Module) -> dict[str, Any]:
    """Return the class, plain attributes and parameter shapes of a module."""
    plain = (bool, int, float, str, tuple)
    kind = type(part).__name__ if type(part).__module__.startswith(("torch.nn.", "timm.")) else str(type(part))
    attributes = {
        name: value
        for name, value in vars(part).items()
        if isinstance(value, plain) and name not in _IRRELEVANT and not name.startswith("_")
    }
    shapes = {name: tuple(value.shape) for name, value in part.named_parameters(recurse=False)}
    return {"class": kind, **attributes, **shapes}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return bool(one == other)


def _options(config: ViTConfig) -> dict[str, Any]:
    """Return a config as arguments of timm's classes."""
    from timm.layers import LayerNorm, SwiGLUPacked

    ratio = (config.hidden + 0.5) / config.width  # timm rounds down
    options: dict[str, Any] = {
        "img_size": config.image[-2:],
        "patch_size": config.patch[-2:],
        "in_chans": config.in_chans,
        "num_classes": config.num_classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio,
        "qkv_bias": config.qkv_bias,
        "global_pool": {pool: name for name, pool in _POOLS.items()}[config.pool],
        "norm_layer": partial(LayerNorm, eps=config.norm_eps),
        "pos_drop_rate": config.dropout,
        "proj_drop_rate": config.dropout,
        "attn_drop_rate": config.attention_dropout,
        "drop_path_rate": config.drop_path,
    }
    if config.class_attention:
        return {**options, "depth_token_only": config.class_attention, "mlp_ratio_token_only": ratio}
    counts = {TIMM_TOKENS.get(spec.role): spec.count for spec in config.tokens}
    embedded = any(config.positioned(spec) for spec in config.tokens)
    if config.mlp == "swiglu":
        options.update(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU)
    return {
        **options,
        "init_values": config.layer_scale,
        "class_token": "cls_token" in counts,
        "reg_tokens": counts.get("reg_token", 0),
        "no_embed_class": bool(config.tokens) and not embedded,
        "pos_embed": "learn" if config.position == "learned" else "none",
        "qk_norm": config.qk_norm,
        "proj_bias": config.proj_bias,
        "pre_norm": config.pre_norm,
        "final_norm": config.final_norm != "none",
        "fc_norm": config.final_norm == "pooled",
        "dynamic_img_size": True,
    }
