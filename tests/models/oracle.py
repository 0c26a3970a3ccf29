"""A slow reference of ``ViT``: all tokens are present from the start, and masks select who takes part."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.models import ViT
from vitrail.models.position import rotary_table, rotate


@torch.no_grad()
def features_of(model: ViT, x: Tensor) -> Tensor:
    """Compute what ``forward_features`` must return, at the model's own input size.

    Patches stand in front here, so that a mistake in the model's order of tokens shows.
    """
    config = model.config
    patches = model.patch_embed(x)
    count = patches.shape[1]
    names = [spec.name for spec in config.tokens for _ in range(spec.count)]
    specs = {spec.name: spec for spec in config.tokens}
    special = torch.cat([model.tokens[name] for name in specs], 1) if specs else patches[:1, :0]
    if model.pos_embed is not None:
        positions = list(model.pos_embed[0].split(1))
        for index, name in enumerate(names):
            if config.positioned(specs[name]):
                special = special.index_add(1, torch.tensor([index]), positions.pop(0)[None])
        patches = patches + torch.cat(positions)
    u = torch.cat([patches, special.expand(len(x), -1, -1)], 1)

    entry = torch.tensor([0] * count + [config.entry(specs[name]) for name in names])
    visible = torch.tensor([True] * count + [specs[name].visible for name in names])
    gathers = entry >= config.depth
    identity = torch.eye(len(entry), dtype=torch.bool)
    layers = [*model.blocks, *model.blocks_token_only]
    for layer, block in enumerate(layers):
        stage = layer >= config.depth
        here = entry <= layer
        reads = (visible | identity) & here & here[:, None]
        y = u + block.ls1(_attend(model, block.attn, block.norm1(u), reads, stage, count))
        y = y + block.ls2(block.mlp(block.norm2(y)))
        changes = here & (gathers if stage else ~gathers)
        u = torch.where(changes[:, None], y, u)
    u = model.norm(u)
    return torch.cat([u[:, count:], u[:, :count]], 1)


def _attend(model: ViT, attention: torch.nn.Module, h: Tensor, reads: Tensor, stage: bool, patches: int) -> Tensor:
    config = model.config
    heads = (config.heads, config.head_width)
    parts = (attention.q(h), attention.k(h), attention.v(h)) if stage else attention.qkv(h).chunk(3, -1)
    q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in parts)
    q, k = attention.q_norm(q), attention.k_norm(k)
    if config.position == "rotary" and not stage:
        table = rotary_table(config.grid, config.head_width, 2, h)
        q, k = (torch.cat([rotate(z[:, :, :patches], table), z[:, :, patches:]], 2) for z in (q, k))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / config.head_width**0.5
    if config.talking_heads and not stage:
        scores = torch.einsum("gh,bhqk->bgqk", attention.proj_l.weight, scores) + attention.proj_l.bias[:, None, None]
    weights = torch.where(reads, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    if config.talking_heads and not stage:
        weights = torch.einsum("gh,bhqk->bgqk", attention.proj_w.weight, weights) + attention.proj_w.bias[:, None, None]
        weights = torch.where(reads, weights, 0.0)
    return attention.proj((weights @ v).transpose(1, 2).flatten(2))
