"""Takes Swin, Hiera, MViT, ViTDet and SAM's image encoders apart for the oracle of merging in windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import timm.models.swin_transformer as timm_swin
import timm.models.vision_transformer_sam as timm_sam
import torch
import torch.nn.functional as F
import transformers.models.sam2.modeling_sam2 as sam2
import transformers.models.swin.modeling_swin as hf_swin
import transformers.models.vitdet.modeling_vitdet as vitdet
from torch import Tensor, nn

from tests.oracle.core import Parts, identity
from tests.oracle.windows import Block, Step, Window, numbered, windows_of


@dataclass(frozen=True)
class Windowed:
    """A model with one image: tokens entering the first block, steps, and what follows the last one."""

    tokens: Tensor  # (N, D)
    steps: list[Step]
    finish: Callable[[Tensor], Tensor]


def split(linear: Callable[[Tensor], Tensor], heads: int, part: int) -> Callable[[Tensor], Tensor]:
    """Queries, keys or values (N, H, d) of a packed projection."""
    return lambda y: linear(y).chunk(3, -1)[part].unflatten(-1, (heads, -1))


def plain(block: Any, heads: int, norms: tuple[Any, Any], mlp: Any, scale: float, attention: Any = None) -> Parts:
    """A block whose norms come first, with one packed projection."""
    attention = block.attn if attention is None else attention
    qkv = attention.qkv
    return Parts(
        scale=scale,
        q=split(qkv, heads, 0),
        k=split(qkv, heads, 1),
        v=split(qkv, heads, 2),
        project=attention.proj,
        feed=mlp,
        before_attend=norms[0],
        before_feed=norms[1],
    )


def cosine(block: Any, qkv: Any) -> Parts:
    """A block of Swin V2: cosine attention, norms last."""
    heads = block.attn.num_heads

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)

    scale = torch.exp(block.attn.logit_scale.clamp(max=math.log(100))).view(1, heads, 1)
    return Parts(
        scale=1.0,
        q=split(qkv, heads, 0),
        k=split(qkv, heads, 1),
        v=split(qkv, heads, 2),
        q_norm=lambda q: unit(q) * scale,
        k_norm=unit,
        project=block.attn.proj,
        feed=block.mlp,
        after_attend=block.norm1,
        after_feed=block.norm2,
    )


def on_grid(module: Callable[[Tensor], Tensor], height: int, width: int) -> Callable[[Tensor], Tensor]:
    """A module on a map (1, h, w, D) as a function of tokens (N, D)."""
    return lambda tokens: module(tokens.view(1, height, width, -1)).flatten(0, 2)


def describe_timm_swin(model: Any, image: Tensor) -> Windowed:
    """timm's SwinTransformer or SwinTransformerV2: rolled first, then padded."""
    x = model.patch_embed(image)
    _, height, width, _ = x.shape
    grid, steps = (height, width), list[Step]()
    for stage in model.layers:
        if not isinstance(stage.downsample, torch.nn.Identity):
            steps.append(on_grid(stage.downsample, *grid))
            grid = -(-grid[0] // 2), -(-grid[1] // 2)
        for block in stage.blocks:
            (rows, columns), (down, right) = block.window_size, block.shift_size
            places = torch.roll(numbered(*grid), (-down, -right), (1, 2))
            places = F.pad(places, (0, 0, 0, -grid[1] % columns, 0, -grid[0] % rows))
            mask = block.get_attn_mask(places)
            windows = windows_of(
                timm_swin.window_partition(places, (rows, columns)).flatten(1), None if mask is None else mask == 0
            )
            attention = block.attn
            if hasattr(attention, "cpb_mlp"):
                given = (attention.q_bias, attention.k_bias, attention.v_bias)
                bias_of_qkv = torch.cat([x.new_zeros(attention.dim) if one is None else one for one in given])
                weight = attention.qkv.weight
                parts = cosine(block, lambda y, w=weight, b=bias_of_qkv: y @ w.T + b)
                table = attention.cpb_mlp(attention.relative_coords_table).view(-1, attention.num_heads)
                bias = 16 * torch.sigmoid(table[attention.relative_position_index]).permute(2, 0, 1)
            else:
                parts = plain(block, attention.num_heads, (block.norm1, block.norm2), block.mlp, attention.scale)
                bias = attention._get_rel_pos_bias()[0]
            steps.append(Block(parts, windows, bias))
    return Windowed(x[0].flatten(0, 1), steps, _head_of_grid(model.norm, model.forward_head, grid))


def _head_of_grid(norm: Any, head: Any, grid: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    return lambda tokens: head(norm(tokens.view(1, *grid, -1)))


def describe_torchvision_swin(model: Any, image: Tensor) -> Windowed:
    """torchvision's SwinTransformer: padded first, then rolled."""
    x = model.features[0](image)
    grid, steps = (x.shape[1], x.shape[2]), list[Step]()
    for part in list(model.features)[1:]:
        if not isinstance(part, torch.nn.Sequential):
            steps.append(on_grid(part, *grid))
            grid = -(-grid[0] // 2), -(-grid[1] // 2)
            continue
        for block in part:
            rows, columns = block.attn.window_size
            places = F.pad(numbered(*grid), (0, 0, 0, -grid[1] % columns, 0, -grid[0] % rows))
            _, tall, wide, _ = places.shape
            down = 0 if rows >= tall else block.attn.shift_size[0]
            right = 0 if columns >= wide else block.attn.shift_size[1]
            places = torch.roll(places, (-down, -right), (1, 2))
            region = torch.zeros(tall, wide)
            for i in range(tall):
                for j in range(wide):
                    region[i, j] = 3 * _third(i, tall, rows, down) + _third(j, wide, columns, right)
            label = timm_swin.window_partition(region.view(1, tall, wide, 1), (rows, columns)).flatten(1)
            windows = windows_of(
                timm_swin.window_partition(places, (rows, columns)).flatten(1),
                label[:, :, None] == label[:, None],
            )
            bias = block.attn.get_relative_position_bias()[0]
            if hasattr(block.attn, "logit_scale"):
                linear, width = block.attn.qkv, block.attn.qkv.in_features
                keep = torch.cat([torch.ones(width), torch.zeros(width), torch.ones(width)]).to(x)
                parts = cosine(block, lambda y, one=linear, keep=keep: y @ one.weight.T + one.bias * keep)
            else:
                scale = (block.attn.qkv.in_features // block.attn.num_heads) ** -0.5
                parts = plain(block, block.attn.num_heads, (block.norm1, block.norm2), block.mlp, scale)
            steps.append(Block(parts, windows, bias))

    def finish(tokens: Tensor) -> Tensor:
        return model.head(model.norm(tokens).mean(0, keepdim=True))

    return Windowed(x[0].flatten(0, 1), steps, finish)


def _third(place: int, length: int, window: int, shift: int) -> int:
    """Which part of an axis a cell is in: before the last window, in it, or behind the wrap."""
    return 0 if not shift or place < length - window else 1 if place < length - shift else 2


def hf_swin_parts(layer: Any) -> tuple[Parts, Tensor]:
    """Return the parts of a block of transformers' Swin, and its bias (H, N, N); older versions name them otherwise."""
    attention = layer.attention
    if hasattr(attention, "self"):
        inner, output = getattr(attention, "self"), attention.output.dense  # noqa: B009
        projections, feed = (inner.query, inner.key, inner.value), nn.Sequential(layer.intermediate, layer.output)
        bias = inner.relative_position_bias_table[inner.relative_position_index].permute(2, 0, 1)
    else:
        inner, output = attention, attention.o_proj
        projections, feed = (attention.q_proj, attention.k_proj, attention.v_proj), layer.mlp
        bias = attention.relative_position_bias()[0]

    def project(linear: Any) -> Callable[[Tensor], Tensor]:
        return lambda y: linear(y).unflatten(-1, (inner.num_attention_heads, -1))

    q, k, v = map(project, projections)
    parts = Parts(
        scale=(projections[0].out_features // inner.num_attention_heads) ** -0.5,
        q=q,
        k=k,
        v=v,
        project=output,
        feed=feed,
        before_attend=layer.layernorm_before,
        before_feed=layer.layernorm_after,
    )
    return parts, bias


def describe_hf_swin(model: Any, image: Tensor) -> Windowed:
    """transformers' SwinForImageClassification: padded first, then rolled."""
    swin = model.swin
    x, grid = swin.embeddings(image)
    steps = list[Step]()
    for stage in swin.encoder.layers:
        for layer in stage.blocks:
            small = min(grid) <= layer.window_size
            window, shift = (min(grid), 0) if small else (layer.window_size, layer.shift_size)
            places = F.pad(numbered(*grid), (0, 0, 0, -grid[1] % window, 0, -grid[0] % window))
            _, tall, wide, _ = places.shape
            places = torch.roll(places, (-shift, -shift), (1, 2))
            mask = None if small else layer.get_attn_mask(tall, wide, torch.float64, torch.device("cpu"))
            windows = windows_of(
                hf_swin.window_partition(places, window).flatten(1), None if mask is None else mask == 0
            )
            parts, bias = hf_swin_parts(layer)
            steps.append(Block(parts, windows, bias))
        if stage.downsample is not None:
            steps.append(lambda tokens, down=stage.downsample, size=grid: down(tokens[None], size)[0])
            grid = (grid[0] + 1) // 2, (grid[1] + 1) // 2

    def finish(tokens: Tensor) -> Tensor:
        return model.classifier(swin.layernorm(tokens).mean(0, keepdim=True))

    return Windowed(x[0], steps, finish)


def describe_sam(model: Any, image: Tensor) -> Windowed:
    """transformers' SamVisionModel: windows padded at the right and the bottom, positions that meet the queries."""
    trunk = model.vision_encoder
    x = trunk.patch_embed(image)
    x = x if trunk.pos_embed is None else x + trunk.pos_embed
    grid, steps = (x.shape[1], x.shape[2]), list[Step]()
    for layer in trunk.layers:
        attention = layer.attn
        norms = layer.layer_norm1, layer.layer_norm2
        parts = plain(layer, attention.num_attention_heads, norms, layer.mlp, attention.scale)
        steps.append(in_windows(parts, grid, layer.window_size, layer.window_partition, attention))

    def finish(tokens: Tensor) -> Tensor:
        return trunk.neck(tokens.view(1, *grid, -1))

    return Windowed(x[0].flatten(0, 1), steps, finish)


def in_windows(parts: Parts, grid: tuple[int, int], side: int, partition: Any, attention: Any) -> Block:
    """A block as in ViTDet: square windows, all tokens where the side is 0, and vectors for distances of cells."""
    places, size = numbered(*grid), grid
    if side:
        places, size = partition(places, side)[0], (side, side)
    down, right = getattr(attention, "rel_pos_h", None), getattr(attention, "rel_pos_w", None)
    if down is None or right is None:
        return Block(parts, windows_of(places.flatten(1), None))
    cells = [(i, j) for i in range(size[0]) for j in range(size[1])]
    rows = [
        torch.stack([down[i - k + size[0] - 1] + right[j - m + size[1] - 1] for k, m in cells]) for i, j in cells
    ]  # one vector for each offset
    return Block(parts, windows_of(places.flatten(1), None), None, torch.stack(rows))


def describe_timm_sam(model: Any, image: Tensor) -> Windowed:
    """timm's VisionTransformerSAM."""
    x = model.patch_embed(image)
    x = x if model.pos_embed is None else x + model.pos_embed
    grid, steps = (x.shape[1], x.shape[2]), list[Step]()
    for block in model.blocks:
        attention = block.attn
        parts = replace(
            plain(block, attention.num_heads, (block.norm1, block.norm2), block.mlp, attention.head_dim**-0.5),
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            gain_attend=block.ls1,
            gain_feed=block.ls2,
        )
        steps.append(in_windows(parts, grid, block.window_size, timm_sam.window_partition, attention))

    def finish(tokens: Tensor) -> Tensor:
        return model.forward_head(model.neck(tokens.view(1, *grid, -1).permute(0, 3, 1, 2)))

    return Windowed(x[0].flatten(0, 1), steps, finish)


def describe_vitdet(model: Any, image: Tensor) -> Windowed:
    """transformers' VitDetModel, whose tokens are maps (D, h, w)."""
    x = model.embeddings(image)
    grid, steps = (x.shape[2], x.shape[3]), list[Step]()

    def as_map(tokens: Tensor) -> Tensor:
        return tokens.T.reshape(1, -1, *grid)

    for layer in model.encoder.layer:
        if layer.use_residual_block:
            steps.append(lambda tokens, layer=layer: layer(as_map(tokens))[0][0].flatten(1).T)
            continue
        attention, norms = layer.attention, (layer.norm1, layer.norm2)
        parts = plain(layer, attention.num_heads, norms, layer.mlp, attention.scale, attention)
        steps.append(in_windows(parts, grid, layer.window_size, vitdet.window_partition, attention))
    return Windowed(x[0].flatten(1).T, steps, as_map)


def describe_mvit(model: Any, image: Tensor) -> Windowed:
    """timm's MultiScaleVit; blocks that pool queries or keys run as they are."""
    x, grid = model.patch_embed(image)
    x, grid, steps = x if model.pos_embed is None else x + model.pos_embed, tuple(grid), list[Step]()
    for block in (block for stage in model.stages for block in stage.blocks):
        attention = block.attn
        pools = attention.pool_q, attention.pool_k
        if any(pool is not None and max(pool.stride) > 1 for pool in pools) or block.dim != block.dim_out:
            steps.append(lambda tokens, block=block, grid=grid: block(tokens[None], list(grid))[0][0])
            step = 1 if attention.pool_q is None else attention.pool_q.stride[0]
            grid = tuple(-(-side // step) for side in grid)
            continue

        def mix(cells: Tensor, name: str, attention: Any = attention, grid: Any = grid) -> Tensor:
            pool, norm = getattr(attention, f"pool_{name}"), getattr(attention, f"norm_{name}")
            heads = [pool(head.T.reshape(1, -1, *grid))[0].flatten(1).T for head in cells.unbind(1)]
            return norm(torch.stack(heads, 1))

        norms = block.norm1, block.norm2
        parts = plain(block, attention.num_heads, norms, block.mlp, attention.scale)
        own = in_windows(parts, (grid[0], grid[1]), 0, None, attention)
        steps.append(replace(own, mix=mix, residual=attention.residual_pooling))
    return Windowed(x[0], steps, lambda tokens: model.forward_head(model.norm(tokens[None])))


def describe_hiera(model: Any, image: Tensor) -> Windowed:
    """timm's Hiera: a token of each mask unit, then the next of each; blocks that pool run as they are."""
    x = model.unroll(model._pos_embed(model.patch_embed(image)))
    length, steps = x.shape[1], list[Step]()
    for block in model.blocks:
        attention = block.attn
        if attention.q_stride > 1 or block.do_expand:
            steps.append(lambda tokens, block=block: block(tokens[None])[0])
            length //= attention.q_stride
            continue
        units = length // attention.window_size if attention.use_mask_unit_attn else 1
        cells = [[place * units + unit for place in range(length // units)] for unit in range(units)]
        cells = [_by_rows(own, model, length) for own in cells]  # as an image has them
        everything = torch.ones(length // units, length // units, dtype=torch.bool)
        scale = attention.head_dim**-0.5
        parts = Parts(
            scale=scale,
            q=split(attention.qkv, attention.heads, 0),
            k=split(attention.qkv, attention.heads, 1),
            v=split(attention.qkv, attention.heads, 2),
            project=attention.proj,
            feed=block.mlp,
            before_attend=block.norm1,
            before_feed=block.norm2,
            gain_attend=getattr(block, "ls1", identity),
            gain_feed=getattr(block, "ls2", identity),
        )
        steps.append(Block(parts, [Window(list(own), everything) for own in cells]))
    return Windowed(x[0], steps, lambda tokens: model.forward_head(tokens[None]))


def _by_rows(cells: list[int], model: Any, length: int) -> list[int]:
    """Places in the sequence of some tokens, sorted by their place in the grid, which Reroll tells."""
    block = next(one for one, (_, size) in model.reroll.schedule.items() if math.prod(size) == length)
    places = model.reroll(torch.arange(length).view(1, length, 1), block).flatten().tolist()
    where = {place: index for index, place in enumerate(places)}
    return sorted(cells, key=where.__getitem__)


def describe_sam2(model: Any, image: Tensor) -> Windowed:
    """transformers' Sam2HieraDetModel; blocks that pool run as they are."""
    x = model.patch_embed(image)
    x = x + model._get_pos_embed(x.shape[1:3])
    grid, steps = (x.shape[1], x.shape[2]), list[Step]()
    for block in model.blocks:
        if block.query_stride or block.dim != block.dim_out:
            steps.append(on_grid(block, *grid))
            grid = (grid[0] // 2, grid[1] // 2) if block.query_stride else grid
            continue
        places = numbered(*grid)
        if block.window_size:
            places, _ = sam2.window_partition(places, block.window_size)
        norms = block.layer_norm1, block.layer_norm2
        parts = plain(block, block.attn.num_attention_heads, norms, block.mlp, block.attn.scale)
        steps.append(Block(parts, windows_of(places.flatten(1), None)))
    return Windowed(x[0].flatten(0, 1), steps, lambda tokens: tokens.view(1, *grid, -1))
