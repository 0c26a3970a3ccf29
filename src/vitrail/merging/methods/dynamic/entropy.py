"""Entropy: images that hold little merge more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail._checks import is_number
from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import Protected, front_edges, mask_edges
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, ModelShape, Reduction, register_method
from vitrail.merging.methods.dynamic.base import Calibrated
from vitrail.merging.pixels import pixels_by_patch

PIXEL_ENTROPY = "vitrail_pixel_entropy"
"""Name of the guide that holds the entropy of each patch's pixels."""

BINS = 16
"""Bins of the histogram of a patch's pixels."""

CENTERS = {"attention": 0.97, "input": 0.45}
"""Entropies of ordinary photographs, for models that were not calibrated."""

SPREADS = {"attention": 0.01, "input": 0.08}
"""Their standard deviations."""

PerLayer = float | Sequence[float]


@register_method("entropy")
class Entropy(Calibrated):
    """Merge ToMe's pairs, more of them in images of low entropy.

    In each layer an image merges ``planned·f`` tokens, ``f = 1 + strength·(center − entropy) / spread``, limited to
    0 … 2. ``merging.calibrate(images)`` measures center (mean) and spread (standard deviation) on images, so that the
    mean number of patches left is the planned one; without it they are rough defaults. Needs ``r``, ``keep`` or
    ``gflops``.

    Args:
        source: ``"attention"``: how evenly the patches receive attention in this layer (low: few of them matter);
            ``"input"``: mean entropy of the pixels of a patch (low: flat areas).
        strength: change of the number for one spread of the entropy; 0 merges the same number in every image.
        center: entropy at which an image merges the planned number; one value, or one per layer.
        spread: deviation of the entropy from the center that counts as one; one value, or one per layer.
        features: features to compare; see ``vitrail.merging.FEATURES``.
        bucket: see :class:`DynamicMethod`.
    """

    places_groups = True
    calibrated = ("center", "spread")
    step = 0.1

    def __init__(
        self,
        source: Literal["attention", "input"] = "attention",
        *,
        strength: float = 0.25,
        center: PerLayer | None = None,
        spread: PerLayer | None = None,
        features: Features = "keys",
        bucket: int | None = None,
    ) -> None:
        super().__init__(bucket)
        if source not in CENTERS:
            raise InvalidOption(f"source is 'attention' or 'input'; got {source!r}")
        if not is_number(strength) or strength < 0:
            raise InvalidOption(f"strength is 0 or more; got {strength!r}")
        self.source, self.strength, self.features = source, float(strength), check_features(features)
        self.center = CENTERS[source] if center is None else _per_layer("center", center)
        self.spread = SPREADS[source] if spread is None else _per_layer("spread", spread, above=0)

    @property
    def budgeted(self) -> bool:
        return True

    @property
    def options(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("source", "strength", "center", "spread", "features")}
        defaults = {
            "source": "attention", "strength": 0.25, "center": CENTERS[self.source], "spread": SPREADS[self.source],
            "features": "keys",
        }  # fmt: skip
        return {name: value for name, value in values.items() if value != defaults[name]} | super().options

    def check(self, shape: ModelShape) -> None:
        for name in self.calibrated:
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != shape.depth:
                raise InvalidOption(
                    f"{name} has {len(value)} entries, and this model has {shape.depth} layers; give one per layer, or "
                    "one for all"
                )

    def maps(self, inputs: Tensor, grid: tuple[int, int, int]) -> Mapping[str, Tensor]:
        return {PIXEL_ENTROPY: pixel_entropy(inputs, grid)} if self.source == "input" else {}

    def capacity(self, tokens: int, protected: Protected) -> int:
        return front_edges(tokens, protected) if isinstance(protected, int) else int(mask_edges(protected).min())

    @torch.no_grad()
    def entropy(self, context: Context) -> Tensor:
        """Compute the entropy of each image (B,), from 0 to 1."""
        if self.source == "attention":
            return attention_entropy(context)
        share = _shares(context, context.guide[PIXEL_ENTROPY])
        return (share * context.guide[PIXEL_ENTROPY]).sum(1)

    def amount(self, context: Context, planned: int) -> Tensor:
        found, layer = self.entropy(context), context.layer
        if self.measured is not None:
            self.measured[layer].append(found.cpu())
            return torch.full(found.shape, planned, device=found.device)
        center = self.center[layer] if isinstance(self.center, list) else self.center
        spread = self.spread[layer] if isinstance(self.spread, list) else self.spread
        factor = 1 + self.strength * (center - found) / spread
        return (planned * factor.clamp(0, 2)).round().long()

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        features = compute_features(context, self.features).detach()
        return Reduction(context.match(features, r))

    def settle(self, measured: Sequence[Sequence[Tensor]]) -> None:
        found = [torch.cat(list(values)).double() if values else None for values in measured]
        self.center = [CENTERS[self.source] if one is None else float(one.mean()) for one in found]
        self.spread = [
            SPREADS[self.source] if one is None else max(float(one.std(correction=0)), 1e-4) for one in found
        ]

    def shift(self, by: float) -> None:
        assert isinstance(self.center, list)
        assert isinstance(self.spread, list)
        self.center = [center + by * spread for center, spread in zip(self.center, self.spread, strict=True)]

    def flops(self, tokens: int, head_width: int) -> int:
        return ((tokens + 1) // 2) * (tokens // 2) * head_width


def attention_entropy(context: Context) -> Tensor:
    """Return the entropy of the attention that mergeable tokens receive (B,), from 0 to 1.

    A token of size s counts as s tokens of the same attention, so merging by itself changes little.
    """
    received = context.attention()
    received = received.mean(1, dtype=torch.promote_types(received.dtype, torch.float32))
    received = received.masked_fill(~context.mergeable, 0)
    share = received / received.sum(1, keepdim=True).clamp(min=torch.finfo(received.dtype).tiny)
    size = torch.ones_like(share) if context.size is None else context.size.to(share.dtype)
    size = size.masked_fill(~context.mergeable, 0)
    found = torch.xlogy(share, size.clamp(min=1)).sum(1) - torch.xlogy(share, share).sum(1)
    most = size.sum(1).log()
    return torch.where(most > 0, found / torch.where(most > 0, most, 1), 0).nan_to_num(0.0).clamp(0, 1)


def _shares(context: Context, like: Tensor) -> Tensor:
    """Return the share of each mergeable token (B, N) in the mean over patches."""
    size = torch.ones_like(like) if context.size is None else context.size.to(like.dtype)
    size = size.masked_fill(~context.mergeable, 0)
    return size / size.sum(1, keepdim=True).clamp(min=1)


def pixel_entropy(inputs: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Compute the entropy of the histogram of each patch's pixels (B, P), from 0 to 1.

    Pixels are the mean over channels, in 16 bins between the lowest and the highest of the image.
    """
    pixels = pixels_by_patch(inputs, grid).mean(1)
    low, high = pixels.amin((1, 2), keepdim=True), pixels.amax((1, 2), keepdim=True)
    span = high - low
    bins = ((pixels - low) / torch.where(span > 0, span, 1) * BINS).nan_to_num(0.0).long().clamp(0, BINS - 1)
    counts = torch.zeros(*pixels.shape[:2], BINS, dtype=pixels.dtype, device=pixels.device)
    share = counts.scatter_add(2, bins, torch.ones_like(pixels)) / pixels.shape[2]
    most = math.log(min(BINS, pixels.shape[2])) or 1.0
    return -torch.xlogy(share, share).sum(2) / most


def _per_layer(name: str, value: object, above: float = -math.inf) -> float | list[float]:
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not values or not all(is_number(one) and one > above for one in values):
        bound = "" if above == -math.inf else f" above {above}"
        raise InvalidOption(f"{name} is a number{bound}, or a list with one for each layer; got {value!r}")
    return [float(one) for one in values] if isinstance(value, Sequence) else float(values[0])  # type: ignore[arg-type]
