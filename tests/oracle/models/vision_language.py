"""Vision-language models of the transformers library taken apart: from a tower's tokens to the language model.

Written from the library's source; nothing is shared with Vitrail. Each function returns what the language model
receives for the images, one tensor (tokens, channels) for each image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.oracle import describe, run
from tests.oracle.core import Parts, Recipe, Result, Token, attend, feed, full_length, identity, matching_metric, merge
from tests.oracle.models.transformers_clip import clip_parts
from tests.oracle.models.transformers_vit import heads_of


def tower_result(tower: Any, images: Tensor, r: Any, **call: Any) -> Result:
    """Run a tower with the oracle's merging."""
    return run(describe(tower, images, **call), r)


def llava(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the hidden states of some layers, without the class token or with it, projected."""
    config, core = model.config, model.model
    result = tower_result(core.vision_tower, inputs["pixel_values"], r)
    states: list[Any] = [None, *result.hidden]  # none of these models reads the embedding
    chosen = config.vision_feature_layer
    layers = [chosen] if isinstance(chosen, int) else chosen
    first = {"default": 1, "full": 0}[config.vision_feature_select_strategy]
    features = torch.cat([states[layer][:, first:] for layer in layers], -1)
    projector = core.multi_modal_projector
    return list(projector.linear_2(projector.act(projector.linear_1(features))))


def paligemma(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the normalized last tokens, projected."""
    core = model.model
    result = tower_result(core.vision_tower, inputs["pixel_values"], r)
    return list(core.multi_modal_projector.linear(result.features))


def gemma3(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the means of 2 × 2 normalized last tokens, normalized again and projected."""
    core = model.model
    projector = core.multi_modal_projector
    features = tower_result(core.vision_tower, inputs["pixel_values"], r).features
    pooled = in_cells(features, 4, 2).unflatten(2, (4, -1)).mean(2)
    return list(projector.mm_soft_emb_norm(pooled) @ projector.mm_input_projection_weight)


def tiled(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the small copy, and behind it the rows of two tiles one upon the other, each with a newline."""
    images = inputs["pixel_values"]
    tokens = torch.stack(llava(model, {"pixel_values": images.flatten(0, 1)}, r)).unflatten(0, images.shape[:2])
    newline = model.model.image_newline.unsqueeze(0)
    found = []
    for whole, *tiles in tokens:
        rows = [torch.cat([row, newline]) for tile in tiles for row in tile.chunk(4)]
        found.append(torch.cat([whole, *rows]))
    return found


def vipllava(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the patches of some hidden states, side by side in channels, normalized and projected."""
    core = model.model
    result = tower_result(core.vision_tower, inputs["pixel_values"], r)
    features = torch.cat([result.hidden[layer][:, 1:] for layer in (-2, 0)], -1)
    projector = core.multi_modal_projector
    hidden = projector.linear_1(projector.projector_layernorm(features))
    return list(projector.linear_2(projector.act(hidden)))


def shortened(features: Tensor, length: int) -> Tensor:
    """Return the tokens (N, D) of an image merged to a number, at most a quarter of them at a time."""
    tokens = [Token(vector, [place]) for place, vector in enumerate(features)]
    while len(tokens) > length:
        metric = matching_metric(torch.stack([one.vector for one in tokens]).unsqueeze(1))
        tokens = merge(tokens, metric, set(), min(len(tokens) - length, max(1, len(tokens) // 4)), "original")
    return torch.stack([one.vector for one in tokens])


def idefics3(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the tokens of 2 × 2 patches, projected, for each prompt the images one after another."""
    core, images = model.model, inputs["pixel_values"]
    tower = core.vision_model
    masks = torch.ones(images.shape[0] * images.shape[1], 4, 4, dtype=torch.bool)
    tokens = tower.embeddings(images.flatten(0, 1), masks)
    recipe = Recipe(tokens, 0, [clip_parts(layer) for layer in tower.encoder.layers], no_outputs, tower.post_layernorm)
    cells = in_cells(run(recipe, r).features, 4, model.config.scale_factor)
    return list(core.connector.modality_projection.proj(cells).unflatten(0, images.shape[:2]).flatten(1, 2))


def internvl(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the tokens of 2 × 2 patches, normalized and projected."""
    core = model.model
    tower, projector = core.vision_tower, core.multi_modal_projector
    parts = [internvl_parts(layer) for layer in tower.encoder.layer]
    recipe = Recipe(tower.embeddings(inputs["pixel_values"]), 1, parts, no_outputs, tower.layernorm)
    cells = in_cells(run(recipe, r).features[:, 1:], 4, 2)
    return list(projector.linear_2(projector.act(projector.linear_1(projector.layer_norm(cells)))))


def internvl_parts(layer: Any) -> Parts:
    """Take a block of InternVL's tower apart."""
    attention = layer.attention
    width = attention.head_dim

    def normed(linear: Any, norm: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: norm(linear(x)).reshape(len(x), -1, width)

    return Parts(
        scale=width**-0.5,
        q=normed(attention.q_proj, attention.q_norm),
        k=normed(attention.k_proj, attention.k_norm),
        v=heads_of(attention.v_proj, width),
        project=attention.projection_layer,
        feed=layer.mlp,
        before_attend=layer.layernorm_before,
        before_feed=layer.layernorm_after,
        gain_attend=lambda x: x * layer.lambda_1,
        gain_feed=lambda x: x * layer.lambda_2,
    )


def in_cells(tokens: Tensor, side: int, step: int) -> Tensor:
    """Return the patches (B, side², D) of each cell of step × step side by side, the cells row by row.

    Within a cell the channels are those of its first row of patches, then of the next.
    """
    cells = []
    for row in range(0, side, step):
        for column in range(0, side, step):
            members = [(row + down) * side + column + right for down in range(step) for right in range(step)]
            cells.append(torch.cat([tokens[:, member] for member in members], -1))
    return torch.stack(cells, 1)


def no_outputs(x: Tensor) -> dict[str, Tensor]:
    """Return nothing: only the tokens of a tower are used."""
    return {}


def qwen(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the merged cells of 2 × 2 patches of each image, and behind them in channels those of middle layers."""
    tower, found = model.model.visual, []
    patches = tower.patch_embed(inputs["pixel_values"])
    if hasattr(tower, "pos_embed"):
        patches = patches + learned_positions(tower, inputs["image_grid_thw"])
    start = 0
    for frames, height, width in inputs["image_grid_thw"].tolist():
        pieces = []
        for _ in range(frames):
            pieces.append(qwen_frame(tower, patches[start : start + height * width], height, width, r))
            start += height * width
        found.append(torch.cat(pieces))
    return found


def qwen_frame(tower: Any, patches: Tensor, height: int, width: int, r: Any) -> Tensor:
    """Run one frame, whose patches come cell after cell."""
    places = cell_places(height, width)
    rows = [places.index((row, column)) for row in range(height) for column in range(width)]
    grid = [(float(row), float(column)) for row in range(height) for column in range(width)]
    parts = [qwen_parts(block, tower.rotary_pos_emb.inv_freq.double()) for block in tower.blocks]
    result = run(Recipe(patches[rows].unsqueeze(0), 0, parts, no_outputs, identity, grid), r)
    cells = [row * width + column for row, column in places]
    if hasattr(tower, "window_size"):
        recipe = Recipe(patches[rows].unsqueeze(0), 0, parts, no_outputs, identity, grid)
        return tower.merger(in_windows(tower, recipe, height, width, r)[cells])
    merged = [tower.merger(result.hidden[-1][0, cells])]
    for index, layer in enumerate(getattr(tower, "deepstack_visual_indexes", ())):
        merged.append(tower.deepstack_merger_list[index](result.hidden[layer][0, cells]))
    return torch.cat(merged, -1)


def in_windows(tower: Any, recipe: Recipe, height: int, width: int, r: Any) -> Tensor:
    """Run one frame of a tower with windows: (N, D), row by row.

    Tokens merge inside their window, which keeps the share of its patches that an image without windows would keep.
    """
    side, patches = tower.window_size // tower.patch_size, height * width
    counts = [r] * len(recipe.blocks) if isinstance(r, int) else r
    windows: dict[tuple[int, int], list[Token]] = {}
    for place in range(patches):
        row, column = divmod(place, width)
        windows.setdefault((row // side, column // side), []).append(Token(recipe.tokens[0, place], [place]))
    own = {key: len(tokens) for key, tokens in windows.items()}
    for layer, parts in enumerate(recipe.blocks):
        if layer in tower.fullatt_block_indexes:
            everyone = [token for tokens in windows.values() for token in tokens]
            metric = iter(attend(parts, recipe, everyone, True))
            metrics = {key: [next(metric) for _ in tokens] for key, tokens in windows.items()}
        else:
            metrics = {key: attend(parts, recipe, tokens, True) for key, tokens in windows.items()}
        left = patches - sum(counts[: layer + 1])
        for key, tokens in windows.items():
            count = len(tokens) - max(1, round(own[key] * left / patches))
            windows[key] = merge(tokens, metrics[key], set(), count, "paper")
            feed(parts, windows[key])
    return full_length([token for tokens in windows.values() for token in tokens], patches)


def cell_places(height: int, width: int) -> list[tuple[int, int]]:
    """Return row and column of each patch, cell of 2 × 2 after cell."""
    cells = [(top, left) for top in range(0, height, 2) for left in range(0, width, 2)]
    return [(top + down, left + right) for top, left in cells for down in range(2) for right in range(2)]


def learned_positions(tower: Any, grids: Tensor) -> Tensor:
    """Return the learned positions of all patches, resized to each grid with corners aligned."""
    side = tower.num_grid_per_side
    table = tower.pos_embed.weight.T.reshape(1, -1, side, side)
    found = []
    for frames, height, width in grids.tolist():
        resized = torch.nn.functional.interpolate(table, (height, width), mode="bilinear", align_corners=True)[0]
        found += [resized[:, row, column] for row, column in cell_places(height, width)] * frames
    return torch.stack(found)


def qwen_parts(block: Any, bands: Tensor) -> Parts:
    """Take a block of a Qwen tower apart."""
    attention = block.attn
    heads, width = attention.num_heads, attention.head_dim
    weights, biases = attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3)

    def part(index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: (x @ weights[index].T + biases[index]).reshape(len(x), heads, width)

    def rotate(x: Tensor, position: tuple[float, float]) -> Tensor:
        angle = torch.cat([position[0] * bands, position[1] * bands])
        left, right = x.chunk(2, -1)
        turned = left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()
        return torch.cat(turned, -1)

    return Parts(
        scale=width**-0.5,
        q=part(0),
        k=part(1),
        v=part(2),
        project=attention.proj,
        feed=block.mlp,
        rotate=rotate,
        before_attend=block.norm1,
        before_feed=block.norm2,
    )
