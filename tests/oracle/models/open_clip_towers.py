"""Takes the vision tower of open_clip apart for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

from tests.oracle.core import Parts, Recipe, identity


def describe_open_clip(model: VisionTransformer, images: Tensor) -> Recipe:
    """A class token, patches, learned positions, a norm; then what the tower pools by."""
    patches = model.conv1(images).flatten(2).transpose(1, 2)
    first = model.class_embedding.expand(len(images), 1, -1)
    return Recipe(
        tokens=model.ln_pre(torch.cat([first, patches], 1) + model.positional_embedding),
        prefix=1,
        blocks=[_parts(block) for block in model.transformer.resblocks],
        finish=lambda x: {"output": _pool(model, x) @ model.proj},
        features=identity if model.attn_pool is not None else model.ln_post,
    )


def _pool(model: VisionTransformer, x: Tensor) -> Tensor:
    """Pool full-length tokens as the options of the tower say."""
    if model.attn_pool is not None:
        if model.attn_pool_contrastive is not None:
            return model.attn_pool_contrastive(model.attn_pool(model.ln_post(x)))
        return model.ln_post(model.attn_pool(x))[:, 0]
    if model.final_ln_after_pool:
        return model.ln_post(x[:, 1:].mean(1))
    x = model.ln_post(x)
    return x[:, 0] if model.pool_type == "tok" else x


def _parts(block: nn.Module) -> Parts:
    attention = block.attn
    heads, width = attention.num_heads, attention.out_proj.in_features // attention.num_heads
    factors = getattr(attention, "head_scale", None)
    inner = getattr(attention, "ln_inner", identity)

    def mix(x: Tensor) -> Tensor:
        """Scale each head, then the norm of all of them."""
        return inner(x if factors is None else x * factors.flatten().repeat_interleave(width))

    def rows(place: int) -> Callable[[Tensor], Tensor]:
        return partial(_project, attention, place, heads, width)

    return Parts(
        scale=width**-0.5,
        q=rows(0),
        k=rows(1),
        v=rows(2),
        q_norm=getattr(attention, "ln_q", identity),
        k_norm=getattr(attention, "ln_k", identity),
        inner_norm=mix,
        project=attention.out_proj,
        feed=block.mlp,
        before_attend=block.ln_1,
        after_attend=getattr(block, "ln_attn", identity),
        before_feed=block.ln_2,
        gain_attend=block.ls_1,
        gain_feed=block.ls_2,
    )


def _project(attention: nn.Module, place: int, heads: int, width: int, x: Tensor) -> Tensor:
    """Queries, keys and values are rows of one weight, in this order."""
    some = slice(place * heads * width, (place + 1) * heads * width)
    y = x @ attention.in_proj_weight[some].T + attention.in_proj_bias[some]
    return y.reshape(len(x), heads, width)
