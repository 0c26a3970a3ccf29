"""Takes timm's VisionTransformer, Eva and Beit apart for the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
)
from timm.models.beit import Beit
from timm.models.eva import Eva, EvaBlockPostNorm
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor, nn

from tests.oracle.core import Parts, Position, Recipe, Rotate, identity

Angles = Callable[[Position], Tensor]
"""Angles (d,) or (H, d), one per channel, at a position."""


def describe_vit(model: VisionTransformer, images: Tensor) -> Recipe:
    """A VisionTransformer, or a class derived from it, on these images."""
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    return Recipe(
        tokens=tokens,
        prefix=model.num_prefix_tokens,
        blocks=[_parts(block, None) for block in model.blocks],
        finish=lambda x: {"output": model.forward_head(model.norm(x))},
        features=model.norm,
    )


def describe_eva(model: Eva, images: Tensor) -> Recipe:
    """An Eva on these images, with the positions that its rotary embedding gives to the patches."""
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(images))[0])
    height, width = model.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
    turns: list[Angles | None] = [None] * len(model.blocks)
    positions = None
    if model.rope is not None:
        positions = rope_positions(model.rope, height, width)
        turns = [rope_angles(model.rope, layer) for layer in range(len(model.blocks))]
    return Recipe(
        tokens=tokens,
        prefix=model.num_prefix_tokens,
        blocks=[_parts(block, turn) for block, turn in zip(model.blocks, turns, strict=True)],
        finish=lambda x: {"output": model.forward_head(model.norm(x))},
        features=model.norm,
        positions=positions,
    )


def describe_beit(model: Beit, images: Tensor) -> Recipe:
    """A Beit on these images, with the bias of each block between all tokens."""
    patches = model.patch_embed(images)
    tokens = torch.cat([model.cls_token.expand(len(images), -1, -1), patches], dim=1)
    if model.pos_embed is not None:
        tokens = tokens + model.pos_embed
    tables = [block.attn.relative_position_bias_table for block in model.blocks]
    shared = None if model.rel_pos_bias is None else model.rel_pos_bias.relative_position_bias_table
    height, width = model.patch_embed.grid_size
    return Recipe(
        tokens=tokens,
        prefix=1,
        blocks=[
            replace(_parts(block, None), bias=relative_bias([own, shared], height, width))
            for block, own in zip(model.blocks, tables, strict=True)
        ],
        finish=lambda x: {"output": model.forward_head(model.norm(x))},
        features=model.norm,
    )


def relative_bias(tables: list[Tensor | None], height: int, width: int) -> Tensor | None:
    """(H, N, N) from tables of one row per offset, then class to patch, patch to class, class to class."""
    given = [table for table in tables if table is not None]
    if not given:
        return None
    table = sum(given[1:], given[0])
    offsets = (2 * height - 1) * (2 * width - 1)
    cells = [None, *((i, j) for i in range(height) for j in range(width))]

    def row(query: tuple[int, int] | None, key: tuple[int, int] | None) -> Tensor:
        if query is None or key is None:
            return table[offsets + (2 if query is key else 0 if query is None else 1)]
        down, right = query[0] - key[0] + height - 1, query[1] - key[1] + width - 1
        return table[down * (2 * width - 1) + right]

    return torch.stack([torch.stack([row(query, key) for key in cells], -1) for query in cells], 1)


def rope_positions(rope: nn.Module, height: int, width: int) -> list[Position]:
    """(row, column) of every patch, row by row, in the unit of the rotary embedding."""
    cells = [(float(i), float(j)) for i in range(height) for j in range(width)]
    if isinstance(rope, RotaryEmbeddingMixed):
        return cells
    if isinstance(rope, RotaryEmbeddingDinoV3):
        both = {"max": max(height, width), "min": min(height, width)}
        tall, wide = both.get(rope.normalize_coords, height), both.get(rope.normalize_coords, width)
        offset = 0.5 + rope.grid_offset
        return [(2 * (i + offset) / tall - 1, 2 * (j + offset) / wide - 1) for i, j in cells]
    assert isinstance(rope, RotaryEmbeddingCat)
    assert not rope.in_pixels
    reference = rope.ref_feat_shape or (height, width)
    offset = rope.grid_offset
    return [((i + offset) * reference[0] / height, (j + offset) * reference[1] / width) for i, j in cells]


def rope_angles(rope: nn.Module, layer: int) -> Angles:
    """The angle of every channel at a position."""
    if isinstance(rope, RotaryEmbeddingMixed):
        frequencies = rope.freqs[:, layer]  # (2, H, d / 2)
        first = 0 if rope.grid_indexing == "ij" else 1

        def mixed(at: Position) -> Tensor:
            angles = at[first] * frequencies[0] + at[1 - first] * frequencies[1]
            return angles.repeat_interleave(2, dim=-1)

        return mixed
    if isinstance(rope, RotaryEmbeddingDinoV3):
        periods = rope.periods.double()
        steps, first = 2 * math.pi / periods, 0
    else:
        assert isinstance(rope, RotaryEmbeddingCat)
        bands = rope.dim // 4
        steps = torch.tensor([rope.temperature ** (-i / bands) for i in range(bands)], dtype=torch.float64)
        first = 0 if rope.grid_indexing == "ij" else 1

    def axial(at: Position) -> Tensor:
        angles = torch.cat([at[first] * steps, at[1 - first] * steps])
        return torch.cat([angles, angles]) if getattr(rope, "rotate_half", False) else angles.repeat_interleave(2)

    return axial


def turn(angles: Angles, halves: bool) -> Rotate:
    """Rotary embedding of one token's heads (H, d): channel c turns with its partner."""

    def partner_of(c: int, width: int) -> tuple[int, float]:
        if halves:
            return (c + width // 2, -1.0) if c < width // 2 else (c - width // 2, 1.0)
        return (c + 1, -1.0) if c % 2 == 0 else (c - 1, 1.0)

    def rotate(heads: Tensor, at: Position) -> Tensor:
        angle = angles(at).to(heads.dtype)
        pairs = [partner_of(c, heads.shape[-1]) for c in range(heads.shape[-1])]
        signs = heads.new_tensor([sign for _, sign in pairs])
        across = heads[:, [partner for partner, _ in pairs]]
        return heads * torch.cos(angle) + signs * across * torch.sin(angle)

    return rotate


def _project_heads(attention: nn.Module) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Query, key and value of rows (N, D), as (N, H, d), from a packed or three separate projections."""
    head_dim = attention.proj.in_features // attention.num_heads
    if attention.qkv is not None:
        weights = attention.qkv.weight.chunk(3)
        if attention.qkv.bias is not None:
            biases = attention.qkv.bias.chunk(3)
        elif getattr(attention, "q_bias", None) is not None:
            biases = (attention.q_bias, attention.k_bias, attention.v_bias)
        else:
            biases = (None, None, None)
    else:
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights, biases = tuple(m.weight for m in linears), tuple(m.bias for m in linears)

    def one(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        def apply(x: Tensor) -> Tensor:
            y = x @ weight.T if bias is None else x @ weight.T + bias
            return y.reshape(len(x), -1, head_dim)

        return apply

    return tuple(one(w, b) for w, b in zip(weights, biases, strict=True))


def _gain(block: nn.Module, number: int) -> Callable[[Tensor], Tensor]:
    """LayerScale, whichever way the block keeps it."""
    gamma = getattr(block, f"gamma_{number}", None)
    if gamma is None:
        gamma = getattr(getattr(block, f"ls{number}", None), "gamma", None)
    return identity if gamma is None else lambda x: x * gamma


def _parts(block: nn.Module, angles: Angles | None) -> Parts:
    attention = block.attn
    q, k, v = _project_heads(attention)
    after = isinstance(block, (ResPostBlock, EvaBlockPostNorm))
    gate = getattr(attention, "gate", None)
    return Parts(
        scale=(attention.proj.in_features // attention.num_heads) ** -0.5,
        q=q,
        k=k,
        v=v,
        q_norm=getattr(attention, "q_norm", identity),
        k_norm=getattr(attention, "k_norm", identity),
        rotate=None if angles is None else turn(angles, getattr(attention, "rotate_half", False)),
        inner_norm=getattr(attention, "norm", identity),
        gate=None if gate is None else lambda y: torch.sigmoid(gate(y)),
        project=attention.proj,
        feed=block.mlp,
        before_attend=identity if after else block.norm1,
        after_attend=block.norm1 if after else identity,
        before_feed=identity if after else block.norm2,
        after_feed=block.norm2 if after else identity,
        gain_attend=_gain(block, 1),
        gain_feed=_gain(block, 2),
    )
