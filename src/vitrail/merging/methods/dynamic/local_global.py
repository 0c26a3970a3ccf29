"""ALGM (Norouzi et al., CVPR 2024): merge similar windows first, and similar tokens anywhere later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail._checks import is_int, is_number
from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import blocked_mask, rank, similarity
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, ModelShape, Reduction, register_method
from vitrail.merging.methods.dynamic.base import DynamicMethod, by_first

THRESHOLDS = {192: 0.90, 384: 0.88, 768: 0.94, 1024: 0.95}
"""ALGM's thresholds for windows by the width of the model."""


@register_method("local_global")
class LocalGlobal(DynamicMethod):
    """Merge uniform 2×2 windows in the first layer, and similar tokens anywhere in one later layer (ALGM).

    A window merges where the mean cosine of its six pairs reaches the threshold; odd rows and columns at the border
    stay. Later, the sources of ToMe's matching merge whose best similarity is at least the mean plus the standard
    deviation of all pairs of the image. Made for segmentation. ``r``, ``keep`` or ``gflops``, if given, limit both
    steps; other layers merge nothing.

    Args:
        threshold: least mean cosine of a window; None: ALGM's for models of this width (0.88 to 0.95).
        global_layer: layer of the second step, 0 is the first; None: 4, and 6 from 24 layers on.
        deviations: standard deviations above the mean from which on a pair merges in the second step.
        features: features to compare; see ``vitrail.merging.FEATURES``.
        bucket: see :class:`DynamicMethod`.
    """

    def __init__(
        self,
        threshold: float | None = None,
        *,
        global_layer: int | None = None,
        deviations: float = 1.0,
        features: Features = "tokens",
        bucket: int | None = None,
    ) -> None:
        super().__init__(bucket)
        if threshold is not None and not is_number(threshold):
            raise InvalidOption(f"threshold is a cosine from -1 to 1, or None; got {threshold!r}")
        if global_layer is not None and not is_int(global_layer, 1):
            raise InvalidOption(f"global_layer is a layer after the first, 1 or more, or None; got {global_layer!r}")
        if not is_number(deviations):
            raise InvalidOption(f"deviations is a number; got {deviations!r}")
        self.threshold, self.global_layer, self.deviations = threshold, global_layer, float(deviations)
        self.features = check_features(features)
        self.width = min(THRESHOLDS)

    @property
    def options(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("threshold", "global_layer", "deviations", "features")}
        defaults = {"threshold": None, "global_layer": None, "deviations": 1.0, "features": "tokens"}
        return {name: value for name, value in values.items() if value != defaults[name]} | super().options

    def check(self, shape: ModelShape) -> None:
        if self.global_layer is not None and self.global_layer >= shape.depth:
            raise InvalidOption(
                f"global_layer is {self.global_layer}, and this model has {shape.depth} layers; give one from 1 to "
                f"{shape.depth - 1}"
            )

    def build(self, shape: ModelShape) -> None:
        self.width = shape.width

    def global_layer_of(self, depth: int) -> int:
        """Return the layer of the second step in a model of this depth."""
        chosen = (6 if depth >= 24 else 4) if self.global_layer is None else self.global_layer
        return min(chosen, depth - 1)

    def layers(self, depth: int) -> Sequence[float]:
        return [float(layer in (0, self.global_layer_of(depth))) for layer in range(depth)]

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction | None:
        if context.layer not in (0, self.global_layer_of(context.depth)):
            return None
        features = compute_features(context, self.features)
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(torch.promote_types(features.dtype, torch.float32))
            reduce = self._reduce_windows if context.layer == 0 else self._reduce_anywhere
            return reduce(context, features, r)

    def _reduce_windows(self, context: Context, features: Tensor, r: int | Tensor) -> Reduction:
        threshold = self.threshold
        if threshold is None:
            threshold = THRESHOLDS[min(THRESHOLDS, key=lambda width: abs(width - self.width))]
        batch, length = features.shape[:2]
        windows = window_members(context.grid, features.device) + length - math.prod(context.grid)
        unit = F.normalize(features, dim=2)[:, windows]
        cosine = (unit.sum(2).square().sum(2) - unit.square().sum((2, 3))) / 12
        free = context.mergeable.expand(batch, -1)[:, windows].all(2)
        cosine = cosine.nan_to_num(-math.inf).masked_fill(~free, -math.inf)
        most = r // 3 if isinstance(r, int) else r.unsqueeze(1) // 3
        merges = (cosine >= threshold) & cosine.isfinite() & (rank(cosine) < most)
        first = torch.arange(length, device=features.device).expand(batch, -1).clone()
        leader = torch.where(merges.unsqueeze(2), windows[:, :1], windows)
        first[:, windows.flatten()] = leader.flatten(1)
        return Reduction(by_first(first, context.present))

    def _reduce_anywhere(self, context: Context, features: Tensor, r: int | Tensor) -> Reduction:
        blocked = blocked_mask(context.protected, context.present, features.shape[1], features.device)
        scores = similarity(features, blocked)
        there = scores.isfinite()
        count = there.sum((1, 2)).clamp(min=1)
        mean = scores.masked_fill(~there, 0).sum((1, 2)) / count
        spread = (scores - mean[:, None, None]).square().masked_fill(~there, 0).sum((1, 2)) / count
        level = mean + self.deviations * spread.sqrt()
        amount = (scores.amax(2) >= level.unsqueeze(1)).sum(1)
        amount = amount.clamp(max=r) if isinstance(r, int) else torch.minimum(amount, r)
        return Reduction(context.match_scores(scores, amount))

    def flops(self, tokens: int, head_width: int) -> int:
        return ((tokens + 1) // 2) * (tokens // 2) * head_width


def window_members(grid: tuple[int, int, int], device: torch.device) -> Tensor:
    """Return the patches of each 2×2 window (windows, 4), row by row; odd rows and columns at the end are left out."""
    t, h, w = grid
    index = torch.arange(t * h * w, device=device).view(t, h, w)[:, : h // 2 * 2, : w // 2 * 2]
    return index.reshape(t, h // 2, 2, w // 2, 2).transpose(2, 3).reshape(-1, 4)
