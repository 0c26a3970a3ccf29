"""``from_timm`` and ``to_timm``: convert models with their weights; outputs stay equal."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from vitrail.errors import UnsupportedModel
from vitrail.models.config import ViTConfig
from vitrail.models.saving import load_states
from vitrail.models.timm.config import read_config, refuse_changed
from vitrail.models.timm.weights import TIMM_TOKENS, check_vit, load_timm_state_dict, timm_state_dict
from vitrail.models.vit import ViT


def from_timm(model: nn.Module) -> ViT:
    """Convert timm's ``VisionTransformer`` (including DeiT and DINOv2) or ``Cait`` to a `ViT`, copying the weights.

    Raises :class:`~vitrail.errors.UnsupportedModel` if the model has a part that `ViT` does not have.
    """
    config = read_config(model)
    states = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        converted = ViT(config)
    load_timm_state_dict(converted, states, assign=True)
    return converted.train(model.training)


def to_timm(model: ViT) -> nn.Module:
    """Convert a `ViT` to a timm model, copying the weights; raise if timm has no equal."""
    from timm.models.cait import Cait
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    check_vit(model)
    refuse_changed(model)
    config = model.config
    _check_known(config)
    options = _options(config)
    if config.class_attention:
        kind = Cait
    elif any(TIMM_TOKENS.get(spec.role) == "dist_token" for spec in config.tokens):
        kind = VisionTransformerDistilled
    else:
        kind = VisionTransformer
    states = {name: value.detach().clone() for name, value in timm_state_dict(model).items()}
    with torch.device("meta"):
        converted = kind(**options)
    load_states(converted, states, assign=True)
    return converted.train(model.training)


def _options(config: ViTConfig) -> dict[str, Any]:
    """Return a config as arguments of timm's classes."""
    from timm.layers import LayerNorm, SwiGLUPacked

    ratio = (config.hidden + 0.5) / config.width  # timm rounds down
    options: dict[str, Any] = {
        "img_size": config.image,
        "patch_size": config.patch,
        "in_chans": config.in_chans,
        "num_classes": config.num_classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio,
        "qkv_bias": config.qkv_bias,
        "init_values": config.layer_scale,
        "global_pool": {"token": "token", "mean": "avg", "attention": "map"}[config.pool],
        "norm_layer": partial(LayerNorm, eps=config.norm_eps),
        "pos_drop_rate": config.dropout,
        "proj_drop_rate": config.dropout,
        "attn_drop_rate": config.attention_dropout,
        "drop_path_rate": config.drop_path,
    }
    if config.class_attention:
        return {**options, "depth_token_only": config.class_attention, "mlp_ratio_token_only": ratio}
    counts = {TIMM_TOKENS[spec.role]: spec.count for spec in config.tokens}
    embedded = any(config.positioned(spec) for spec in config.tokens)
    if config.mlp == "swiglu":
        options.update(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU)
    return {
        **options,
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


def _check_known(config: ViTConfig) -> None:
    """Raise with all options that have no equal in timm."""
    specs = config.tokens
    names = [TIMM_TOKENS.get(spec.role, "") for spec in specs]
    positioned = {config.positioned(spec) for spec in specs}
    staged = bool(config.class_attention)
    late = [spec for spec in specs if config.entry(spec) != (config.depth if staged else 0)]
    reasons = {
        "input of three dimensions": len(config.patch) == 3,
        "a convolutional stem": config.stem != "patches",
        "patch_drop": config.patch_drop > 0,
        "task tokens": "" in names,
        "several class tokens": sum(s.count for s, name in zip(specs, names, strict=True) if name == "cls_token") > 1,
        "several register specs": names.count("reg_token") > 1,
        "a distillation token beside registers, or without a class token": "dist_token" in names
        and set(names) != {"cls_token", "dist_token"},
        "a distillation token without position": "dist_token" in names and positioned != {True},
        "tokens in an order other than class, distillation, registers": names
        != sorted(names, key=[*TIMM_TOKENS.values(), ""].index),
        "tokens that enter at another layer": bool(late),
        "invisible tokens": not all(spec.visible for spec in specs),
        "tokens with their own number of classes": any(spec.classes is not None for spec in specs),
        "positions for some special tokens only": len(positioned) > 1,
        f"position {config.position!r}": config.position not in ("learned", "none"),
        f"fuse={config.fuse!r}": config.fuse == "softmax" or (config.fuse != "logits" and "dist_token" in names),
        "talking heads without class attention": config.talking_heads and not staged,
        "uniform drop path": config.drop_path_uniform and config.drop_path > 0 and not staged,
        "SwiGLU with attention pooling": config.mlp == "swiglu" and config.pool == "attention",
        "a distillation token with pooled patches": "dist_token" in names and config.pool != "token",
    }
    if staged:
        reasons |= {
            "class attention for tokens other than one class token without position": names != ["cls_token"]
            or True in positioned,
            "class attention without talking heads": not config.talking_heads,
            "class attention without layer scale": config.layer_scale is None,
            "class attention without learned positions": config.position != "learned",
            "class attention with rising drop path": not config.drop_path_uniform and config.drop_path > 0,
            "class attention with attention pooling": config.pool == "attention",
            "class attention with qk_norm, SwiGLU, pre_norm, or without proj_bias or the final norm": config.qk_norm
            or config.mlp != "gelu"
            or config.pre_norm
            or not config.proj_bias
            or config.final_norm != "tokens",
        }
    lacking = [reason for reason, true in reasons.items() if true]
    if lacking:
        raise UnsupportedModel(
            f"timm has no equal of this model, which has {'; '.join(lacking)}; use save_pretrained instead"
        )
