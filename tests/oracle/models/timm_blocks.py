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
from timm.models.vision_transformer import (
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
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


def describe_relpos(model: VisionTransformerRelPos, images: Tensor) -> Recipe:
    """A VisionTransformerRelPos on these images; the bias of an MLP is the library's own."""
    tokens, prefix = model.patch_embed(images), model.num_prefix_tokens
    if prefix:
        tokens = torch.cat([model.cls_token.expand(len(images), -1, -1), tokens], dim=1)
    grid = model.patch_embed.grid_size

    def bias_of(block: nn.Module) -> Tensor:
        module = block.attn.rel_pos if block.attn.rel_pos is not None else model.shared_rel_pos
        table = getattr(module, "relative_position_bias_table", None)
        found = module.get_bias()[0] if table is None else relative_bias([table], *grid, special=prefix)
        assert found is not None
        return found

    return Recipe(
        tokens=tokens,
        prefix=prefix,
        blocks=[replace(_parts(block, None), bias=bias_of(block)) for block in model.blocks],
        finish=lambda x: {"output": model.forward_head(model.norm(x))},
        features=model.norm,
    )


def relative_bias(tables: list[Tensor | None], height: int, width: int, special: int = 1) -> Tensor | None:
    """(H, N, N) from tables of one row per offset, then class to patch, patch to class, class to class."""
    given = [table for table in tables if table is not None]
    if not given:
        return None
    table = sum(given[1:], given[0])
    offsets = (2 * height - 1) * (2 * width - 1)
    cells = [*[None] * special, *((i, j) for i in range(height) for j in range(width))]

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


def _in_parallel(block: ParallelScalingBlock) -> Parts:
    """Attention and MLP read the same tokens, and their sum is added: nothing is left to feed."""
    hidden, width = block.in_split[0], block.head_dim
    early = getattr(block, "qkv_bias", None)  # timm before 1.0.28

    def rows(start: int, end: int | None) -> Callable[[Tensor], Tensor]:
        weight, bias = block.in_proj.weight[start:end], block.in_proj.bias
        if early is not None:
            bias = torch.cat([early, block.mlp_bias])
        return lambda y: y @ weight.T if bias is None else y @ weight.T + bias[start:end]

    def heads(part: int) -> Callable[[Tensor], Tensor]:
        size = block.in_split[1]
        project = rows(hidden + part * size, hidden + (part + 1) * size)
        return lambda y: project(y).reshape(len(y), -1, width)

    def beside(y: Tensor) -> Tensor:
        inner = rows(0, hidden)(y)
        return block.mlp_act(inner if block.mlp_bias is None or early is not None else inner + block.mlp_bias)

    def project(mixed: Tensor, y: Tensor) -> Tensor:
        if getattr(block, "out_proj", None) is not None:
            return block.out_proj(torch.cat([mixed, beside(y)], -1))
        return block.attn_out_proj(mixed) + block.mlp_out_proj(beside(y))

    return Parts(
        scale=width**-0.5,
        q=heads(0),
        k=heads(1),
        v=heads(2),
        q_norm=block.q_norm,
        k_norm=block.k_norm,
        project=identity,
        project_with_input=project,
        feed=lambda x: 0 * x,
        before_attend=block.in_norm,
        gain_attend=block.ls,
    )


def _several(block: ParallelThingsBlock) -> Parts:
    """The heads of all attentions side by side, each with the norm of its own."""
    each = [_project_heads(one.attn) for one in block.attns]
    norms = [(one.attn.q_norm, one.attn.k_norm, identity) for one in block.attns]

    def heads(part: int) -> Callable[[Tensor], Tensor]:
        def apply(x: Tensor) -> Tensor:
            pairs = zip(block.attns, each, norms, strict=True)
            return torch.cat([norm[part](own[part](one.norm(x))) for one, own, norm in pairs], 1)

        return apply

    def project(mixed: Tensor) -> Tensor:
        pieces = zip(block.attns, mixed.chunk(len(block.attns), -1), strict=True)
        return sum(one.ls(one.attn.proj(piece)) for one, piece in pieces)

    width = block.attns[0].attn.head_dim
    return Parts(
        scale=width**-0.5,
        q=heads(0),
        k=heads(1),
        v=heads(2),
        project=project,
        feed=lambda x: sum(one.ls(one.mlp(one.norm(x))) for one in block.ffns),
    )


def _differential(block: nn.Module) -> Parts:
    """Two softmaxes for each head of values, and their difference."""
    attention, width = block.attn, block.attn.head_dim
    q, k, v = _project_heads(attention)
    first = torch.exp((attention.lambda_q1 * attention.lambda_k1).sum())
    factor = first - torch.exp((attention.lambda_q2 * attention.lambda_k2).sum()) + attention.lambda_init

    def values(x: Tensor) -> Tensor:
        wide = v(x).reshape(len(x), attention.num_heads, 2 * width)
        return torch.stack([wide[:, head // 2] for head in range(2 * attention.num_heads)], 1)

    def project(mixed: Tensor) -> Tensor:
        heads = mixed.reshape(len(mixed), attention.num_heads, 2, 2 * width)
        kept = attention.sub_norm(heads[:, :, 0] - factor * heads[:, :, 1]) * (1 - attention.lambda_init)
        return attention.proj(attention.norm(kept.reshape(len(mixed), -1)))

    return Parts(
        scale=width**-0.5,
        q=lambda x: q(x).reshape(len(x), -1, width),
        k=lambda x: k(x).reshape(len(x), -1, width),
        v=values,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        project=project,
        feed=block.mlp,
        before_attend=block.norm1,
        before_feed=block.norm2,
        gain_attend=_gain(block, 1),
        gain_feed=_gain(block, 2),
    )


def _parts(block: nn.Module, angles: Angles | None) -> Parts:
    if isinstance(block, ParallelScalingBlock):
        return _in_parallel(block)
    if isinstance(block, ParallelThingsBlock):
        return _several(block)
    if type(block.attn).__name__ == "DiffAttention":
        return _differential(block)
    attention = block.attn
    q, k, v = _project_heads(attention)
    after = isinstance(block, (ResPostBlock, EvaBlockPostNorm, ResPostRelPosBlock))
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
