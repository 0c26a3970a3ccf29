"""Edges: merges across a boundary cost more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail._checks import is_number
from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import Protected, blocked_mask, front_edges, mask_edges, similarity
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, Method, Reduction, register_method
from vitrail.merging.methods._groups import grid_places, work_dtype
from vitrail.merging.pixels import channels_first, pixels_by_patch

EDGES = "vitrail_edges"
"""Name of the guide, and of the archive's entry, that holds the edge map."""


@register_method("edges")
class Edges(Method):
    """Merge similar pairs, unless a boundary lies between them: for segmentation and other dense tasks.

    The score of a pair is ``cosine − penalty·edge``. The edge is the highest value of an edge map, scaled to 0 … 1 in
    each image, at nine points of the line between the centers of both tokens, each read from the nearest patch. So
    patches on a boundary merge last, also with each other; lines of more than eight patches may miss an edge that is
    one patch wide. Frames of a video lie on top of each other.

    Args:
        boundary: ``"input"``: Sobel gradients of the pixels; otherwise the name of a map passed by
            ``merging.guide(name=...)``.
        penalty: weight of the edge against the cosine. From 2 on, a pair across the strongest edge merges after all
            others.
        features: features to compare; see ``vitrail.merging.FEATURES``.
    """

    places_groups = True

    def __init__(self, boundary: str = "input", *, penalty: float = 0.25, features: Features = "keys") -> None:
        super().__init__()
        if not isinstance(boundary, str) or not boundary:
            raise InvalidOption(
                f"boundary is 'input', or the name of a map passed by merging.guide(); got {boundary!r}"
            )
        if not is_number(penalty) or penalty < 0:
            raise InvalidOption(f"penalty is a number of 0 or more; got {penalty!r}")
        self.boundary, self.penalty, self.features = boundary, float(penalty), check_features(features)

    @property
    def options(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("boundary", "penalty", "features")}
        defaults = {"boundary": "input", "penalty": 0.25, "features": "keys"}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def maps(self, inputs: Tensor, grid: tuple[int, int, int]) -> Mapping[str, Tensor]:
        return {EDGES: edge_map(inputs, grid)} if self.boundary == "input" else {}

    def capacity(self, tokens: int, protected: Protected) -> int:
        return front_edges(tokens, protected) if isinstance(protected, int) else int(mask_edges(protected).min())

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        features = compute_features(context, self.features)
        edges, archive = self._edges(context)
        places, memory = grid_places(context)
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(torch.promote_types(features.dtype, torch.float32))
            blocked = blocked_mask(context.protected, context.present, features.shape[1], features.device)
            crossed = context.matcher.strongest_between(edges, places[:, ::2], places[:, 1::2]).to(features.dtype)
            scores = similarity(features, blocked) - self.penalty * crossed
        step = context.match_scores(scores, r)
        return Reduction(step, memory=memory, archive=archive)

    def _edges(self, context: Context) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the edge map (B, h, w) of the pass, and the archive's new entry."""
        if EDGES in context.archive:
            return context.archive[EDGES], {}
        name = EDGES if self.boundary == "input" else self.boundary
        if name not in context.guide:
            raise InvalidOption(
                f"boundary={name!r} is not a map of this pass; run the model inside `with merging.guide({name}=...):`"
            )
        t, h, w = context.grid
        values = context.guide[name]
        special = values.shape[1] - t * h * w
        values = values[:, special:].to(work_dtype(values)).nan_to_num(0.0).clamp(min=0)
        values = values / values.amax(1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
        edges = values.view(-1, t, h, w).amax(1)
        return edges, {EDGES: edges}


def edge_map(inputs: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Compute the strongest Sobel gradient of each patch's pixels, mean over channels (B, P)."""
    frames = F.pad(channels_first(inputs, grid).mean(1), (1, 1, 1, 1), mode="replicate")
    across = frames[..., 2:] - frames[..., :-2]
    down = frames[..., 2:, :] - frames[..., :-2, :]
    across = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    down = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]
    strength = (across.square() + down.square()).sqrt()
    return pixels_by_patch(strength.unsqueeze(1), grid)[:, 0].amax(2)
