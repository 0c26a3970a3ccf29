"""A closer look at a few pictures: what special tokens look at layer by layer, head by head, and by rollout.

Rollout needs the attention of every token in every layer. It is followed while the model runs, so that the attention
of one layer and one picture is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.analysis.attention import Rollout, token_maps
from vitrail.errors import BrokenPass
from vitrail.report.again import Again
from vitrail.report.study import Study, spread
from vitrail.runtime.checks import merged_trunk
from vitrail.surgery.hooks import watch
from vitrail.surgery.recording import evaluating, to_model
from vitrail.tokens import TokenLayout

PICTURES = 3
"""Pictures that are looked at layer by layer."""

LAYERS = 6
"""Layers that are drawn, the first and the last among them."""

MOST_BYTES = 2**31
"""What the attention of one layer may take for rollout."""


@dataclass(frozen=True, eq=False)
class Closer:
    """What S special tokens of one picture look at; each map sums to one.

    Attributes:
        layers: (S, h, w) for some layers, the mean over heads.
        heads: (H, S, h, w) in the last layer.
        rollout: (S, h, w) what each token holds of the input patches after all layers; None where it is not followed.
    """

    layers: dict[int, Tensor]
    heads: Tensor
    rollout: Tensor | None


def drawn_layers(depth: int, most: int = LAYERS) -> tuple[int, ...]:
    """Choose layers, evenly spread from the first to the last.

    >>> drawn_layers(12), drawn_layers(4)
    ((0, 2, 4, 7, 9, 11), (0, 1, 2, 3))
    """
    if depth <= most:
        return tuple(range(depth))
    return tuple(round(place * (depth - 1) / (most - 1)) for place in range(most))


def look_closer(model: nn.Module, study: Study, again: Again) -> tuple[dict[str, Any], dict[int, Closer]]:
    """Look at a few of the pictures that are shown; give what was done in plain values, and maps by picture."""
    pictures = spread(study.shown, PICTURES)
    depth = len(find(model).blocks)
    why = _no_rollout(model, study)
    found: dict[int, Closer] = {}
    for piece in again.of(pictures, 1).pieces():
        for index, image in zip(piece.indices, piece.images, strict=True):
            found[index] = _look(model, image.unsqueeze(0), study.layout, drawn_layers(depth), follow=why is None)
    section = {"pictures": sorted(found), "layers": list(drawn_layers(depth)), "rollout": why is None}
    return section if why is None else {**section, "note": why}, found


def _no_rollout(model: nn.Module, study: Study) -> str | None:
    """Say why rollout cannot be followed; None where it can."""
    if merged_trunk(model) is not None:
        return "rollout follows single tokens, and those of this model are merged"
    size = 4 * study.attention.shape[1] * study.layout.num_tokens**2
    if size > MOST_BYTES:
        return f"rollout is left out: the attention of one layer would take {size / 2**30:.1f} GiB for one picture"
    return None


@torch.no_grad()
def _look(model: nn.Module, image: Tensor, layout: TokenLayout, layers: Sequence[int], follow: bool) -> Closer:
    special, followed = layout.num_special, Rollout()

    def keep(rows: Tensor) -> Tensor:
        if follow:
            followed.add(rows)
        return rows[:, :, :special].float().cpu()

    queries = range(layout.num_tokens if follow else special)
    watching = watch(model, ("attention",), None if follow else list(layers), queries, keep)
    with watching.hooked(), evaluating(model):
        model(to_model(model, image))
    seen = watching.take()
    if len(seen) != 1:
        raise BrokenPass(f"one call of the model ran its blocks {len(seen)} times; inspect the trunk by itself")
    rows = seen[0].by_layer["attention"]
    last = token_maps(rows[layers[-1]], layout)[0]
    return Closer(
        {layer: _flat(token_maps(rows[layer], layout)[0].mean(0)) for layer in layers},
        _flat(last),
        _flat(token_maps(followed.result[:, None, :special], layout)[0, 0].cpu()) if follow else None,
    )


def _flat(maps: Tensor) -> Tensor:
    """Put the frames (..., t, h, w) of a map under each other: (..., t·h, w)."""
    return maps.flatten(-3, -2)
