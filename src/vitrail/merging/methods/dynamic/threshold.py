"""Threshold: every pair that is similar enough merges, as in ATM, DyMU and LTMP at inference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail._checks import is_number
from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import Protected, best_edges, blocked_mask, front_edges, mask_edges, similarity
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, ModelShape, Reduction, register_method
from vitrail.merging.methods.dynamic.base import Calibrated


@register_method("threshold")
class Threshold(Calibrated):
    """Merge every pair of ToMe's matching whose similarity reaches a threshold: easy images keep fewer tokens.

    ``r``, ``keep`` or ``gflops``, if given, limit the merges of each layer. ``merging.calibrate(images, keep=0.5)``
    sets one threshold per layer for a mean budget, as DyMU does.

    Args:
        threshold: the least similarity of pairs that merge; one number, or one per layer, where None merges nothing.
        decay: ATM's β: layer l = 1, 2, … uses ``max(threshold − (exp(decay·(l − 1)) − 1), floor)``.
        floor: ATM's θ_min, the lowest threshold that the decay leads to.
        size_aware: compare ``1 − 2·s_i·s_j / (s_i + s_j)·(1 − cos)`` instead of the cosine: the error of a merge grows
            with the sizes of both tokens. Equal to the cosine for two tokens of size 1.
        features: features to compare; see ``vitrail.merging.FEATURES``.
        bucket: see :class:`DynamicMethod`.
    """

    places_groups = True
    takes_padding = True
    calibrated = ("threshold", "decay")

    def __init__(
        self,
        threshold: float | Sequence[float | None] = 0.9,
        *,
        decay: float = 0.0,
        floor: float = -1.0,
        size_aware: bool = False,
        features: Features = "keys",
        bucket: int | None = None,
    ) -> None:
        super().__init__(bucket)
        listed = isinstance(threshold, Sequence) and not isinstance(threshold, str)
        values = [value for value in threshold if value is not None] if listed else [threshold]  # type: ignore[union-attr]
        if not all(map(is_number, values)):
            raise InvalidOption(
                "threshold is a cosine from -1 to 1, or a list with one for each layer (None merges nothing there); "
                f"got {threshold!r}"
            )
        if not is_number(decay) or decay < 0 or not is_number(floor):
            raise InvalidOption(f"decay is 0 or more and floor is a cosine; got decay={decay!r}, floor={floor!r}")
        if listed and decay:
            raise InvalidOption(f"decay={decay} applies to one threshold; a list of thresholds needs none")
        if not isinstance(size_aware, bool):
            raise InvalidOption(f"size_aware is True or False; got {size_aware!r}")
        self.threshold: float | list[float | None] = list(threshold) if listed else threshold  # type: ignore[arg-type, assignment]
        self.decay, self.floor, self.size_aware = float(decay), float(floor), size_aware
        self.features = check_features(features)

    @property
    def options(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("threshold", "decay", "floor", "size_aware", "features")}
        defaults = {"threshold": 0.9, "decay": 0.0, "floor": -1.0, "size_aware": False, "features": "keys"}
        return {name: value for name, value in values.items() if value != defaults[name]} | super().options

    def check(self, shape: ModelShape) -> None:
        if isinstance(self.threshold, list) and len(self.threshold) != shape.depth:
            raise InvalidOption(
                f"threshold has {len(self.threshold)} entries, and this model has {shape.depth} layers; give one per "
                "layer, or one number for all"
            )

    def threshold_of(self, layer: int) -> float | None:
        """Return the threshold of a layer (0 is the first); None where nothing merges."""
        if isinstance(self.threshold, list):
            return self.threshold[layer]
        return max(self.threshold - (math.exp(self.decay * layer) - 1), self.floor) if self.decay else self.threshold

    def capacity(self, tokens: int, protected: Protected) -> int:
        return front_edges(tokens, protected) if isinstance(protected, int) else int(mask_edges(protected).min())

    @torch.no_grad()
    def scores(self, context: Context) -> Tensor:
        """Compute the similarity of every even token with every odd one (B, A, C); −inf where either cannot merge."""
        features = compute_features(context, self.features)
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(torch.promote_types(features.dtype, torch.float32))
            blocked = blocked_mask(context.protected, context.present, features.shape[1], features.device)
            scores = similarity(features, blocked)
            if not self.size_aware or context.size is None:
                return scores
            size = context.size.to(scores.dtype)
            source, destination = size[:, ::2].unsqueeze(2), size[:, 1::2].unsqueeze(1)
            total = source + destination
            error = 2 * source * destination / total.masked_fill(total == 0, 1) * (1 - scores)
            return torch.where(scores.isinf(), scores, 1 - error)

    @torch.no_grad()
    def edges(self, context: Context) -> tuple[Tensor, Tensor]:
        """Return the best of these scores (B, A) of each even token, and the odd token that it is with."""
        if self.size_aware and context.size is not None:
            return best_edges(self.scores(context))
        features = compute_features(context, self.features)
        return context.matcher.best_edges(features, context.protected, context.present)

    def reduce(self, context: Context, r: int | Tensor) -> Reduction | None:
        threshold = self.threshold_of(context.layer)
        if threshold is None and self.measured is None:
            return None
        best, partner = self.edges(context)
        if threshold is None or self.measured is not None:
            assert self.measured is not None
            found = score_at_rank(best, int(r) * len(best) if isinstance(r, int) else int(r.sum()))
            self.measured[context.layer].append(found.expand(len(best)).cpu())
            amount = (best >= found).sum(1)
        else:
            amount = (best >= threshold).sum(1)
            amount = amount.clamp(max=r) if isinstance(r, int) else torch.minimum(amount, r)
        length, matcher = context.x.shape[1], context.matcher
        return Reduction(matcher.match_edges(best, partner, amount, length, context.protected, context.present))

    def settle(self, measured: Sequence[Sequence[Tensor]]) -> None:
        self.threshold = [float(torch.cat(list(found)).double().mean()) if found else None for found in measured]
        self.decay = 0.0

    def shift(self, by: float) -> None:
        assert isinstance(self.threshold, list)
        self.threshold = [None if value is None else value - by for value in self.threshold]

    def flops(self, tokens: int, head_width: int) -> int:
        return ((tokens + 1) // 2) * (tokens // 2) * head_width


def score_at_rank(best: Tensor, count: int) -> Tensor:
    """Return the ``count``-th highest of the finite scores (B, A) of a batch, the lowest if there are fewer."""
    ordered = best.flatten().sort(descending=True).values
    finite = int(ordered.isfinite().sum())
    if not finite or not count:
        return ordered.new_full((), 2.0)
    return ordered[min(count, finite) - 1]
