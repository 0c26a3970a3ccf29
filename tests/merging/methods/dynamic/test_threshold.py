"""Thresholds against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.methods.loops import (
    assert_in_place,
    best_pairs,
    bipartite,
    context,
    cosine,
    groups_after,
    merge_pairs,
)
from tests.models.mixes import SMALL, built, random_images
from vitrail import kernels
from vitrail.errors import InvalidOption
from vitrail.merging.methods.dynamic import Threshold
from vitrail.models import ViTConfig


def by_hand(
    x: Tensor, threshold: float, cap: int, protected: set[int], size: list[float] | None = None
) -> set[frozenset[int]]:
    tokens = [i for i in range(len(x)) if size is None or size[i] > 0]
    free = [i for i in tokens if i not in protected]
    scores = {}
    for a, b in bipartite(free):
        scores[a, b] = cosine(x[a], x[b])
        if size is not None:
            scores[a, b] = 1 - 2 * size[a] * size[b] / (size[a] + size[b]) * (1 - scores[a, b])
    pairs = [pair for pair in best_pairs(scores) if pair[0] >= threshold]
    return merge_pairs(tokens, pairs[: min(cap, len(free) // 2)])


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.5, 1.5])
@pytest.mark.parametrize("length", [2, 7, 12])
@pytest.mark.parametrize("cap", [1, 100])
def test_pairs_above_the_threshold_merge(threshold: float, length: int, cap: int) -> None:
    torch.manual_seed(length)
    x = torch.randn(4, length, 3).double()
    found = Threshold(threshold).reduce(context(x, protected=1), cap)
    assert_in_place(found)
    for image in range(4):
        assert groups_after(found, image) == by_hand(x[image], threshold, cap, {0})


def test_a_mask_and_padding() -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 11, 3).double()
    mask = torch.rand(3, 11) < 0.3
    size = torch.tensor([[1.0] * 11, [2.0] * 8 + [0.0] * 3, [1.0, 3.0] * 4 + [2.0] + [0.0] * 2])
    mask &= size > 0
    found = Threshold(0.2).reduce(context(x, protected=mask, size=size, padded=True), 100)
    assert_in_place(found, size > 0)
    for image in range(3):
        protected = set(mask[image].nonzero()[:, 0].tolist())
        sizes = [1.0 if one else 0.0 for one in size[image].tolist()]
        assert groups_after(found, image, size > 0) == by_hand(x[image], 0.2, 100, protected, sizes)


def test_the_error_of_a_merge_grows_with_both_sizes() -> None:
    torch.manual_seed(4)
    x = torch.randn(3, 10, 3).double()
    size = torch.tensor([[1.0] * 10, [5.0, 1.0, 2.0, 8.0, 1.0, 1.0, 3.0, 2.0, 1.0, 1.0], [4.0] * 7 + [0.0] * 3])
    method = Threshold(0.4, size_aware=True)
    found = method.reduce(context(x, size=size.double(), padded=True), 100)
    groups = [groups_after(found, image, size > 0) for image in range(3)]
    assert groups == [by_hand(x[i], 0.4, 100, set(), size[i].tolist()) for i in range(3)]
    plain = Threshold(0.4).reduce(context(x, size=size.double(), padded=True), 100)
    assert groups_after(plain, 0, size > 0) == groups[0]
    assert groups_after(plain, 2, size > 0) != groups[2]


def test_thresholds_per_layer() -> None:
    decayed = Threshold(0.9, decay=0.1, floor=0.5)
    for layer in range(8):
        assert decayed.threshold_of(layer) == pytest.approx(max(0.9 - (math.exp(0.1 * layer) - 1), 0.5))
    assert decayed.threshold_of(0) == 0.9
    assert decayed.threshold_of(7) == 0.5
    listed = Threshold([0.5, None, -1.0])
    x = torch.randn(2, 8, 4)
    assert listed.reduce(context(x, layer=1), 9) is None
    assert groups_after(listed.reduce(context(x, layer=2), 9), 0) == by_hand(x[0], -1.0, 9, set())


@pytest.mark.parametrize(
    "options",
    [{"threshold": "high"}, {"threshold": [0.5, "a"]}, {"decay": -1}, {"threshold": [0.1], "decay": 0.1},
     {"size_aware": 1}, {"features": "colour"}, {"bucket": 0}, {"threshold": math.nan}, {"threshold": True}],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=list(options)[-1]):
        Threshold(**options)


def test_options_make_the_same_method_again() -> None:
    for options in ({}, {"threshold": [0.5, None], "bucket": 4}, {"threshold": 0.7, "decay": 0.1, "floor": 0.2},
                    {"size_aware": True, "features": "values"}):  # fmt: skip
        assert Threshold(**options).options == options


def model_of(**options: Any) -> tuple[Any, Tensor]:
    config = ViTConfig(**{**SMALL, "image_size": 24, "depth": 4, **options})
    return built(config), random_images(config, batch=40)


def test_the_number_of_thresholds_is_checked_before_the_model_changes() -> None:
    model, x = model_of()
    before = model(x[:1])
    with pytest.raises(InvalidOption, match="4 layers"):
        vitrail.merge(model, method=Threshold([0.5] * 3))
    assert torch.equal(model(x[:1]), before)


def test_a_limit_per_layer() -> None:
    model, x = model_of()
    with torch.no_grad(), vitrail.merge(model, r=[1, 0, 5, 0], method=Threshold(-1.0)) as m, m.track() as trace:
        model(x[:3])
    assert trace.tokens_per_layer.tolist() == [[36, 36, 31, 31]] * 3


@pytest.mark.parametrize("bucket", [4, 16, 64])
def test_padding_in_buckets_changes_lengths_alone(bucket: int) -> None:
    model, x = model_of()
    lengths = []

    class Watched(Threshold):
        def reduce(self, context: Any, r: Any) -> Any:
            lengths.append(context.x.shape[1])
            return super().reduce(context, r)

    with torch.no_grad(), vitrail.merge(model, method=Threshold(0.5)) as m, m.track() as plain:
        wanted = model.forward_features(x)
    method = Watched(0.5, bucket=bucket)
    with torch.no_grad(), vitrail.merge(model, method=method) as merging, merging.track() as trace:
        found = model.forward_features(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert torch.equal(trace.tokens_per_layer, plain.tokens_per_layer)
    assert torch.equal(trace.groups, plain.groups)
    assert torch.equal(trace.flops, plain.flops)
    kept = plain.tokens_per_layer.max(0).values.tolist()
    expected = [37]
    for most in kept[:-1]:
        expected.append(min(expected[-1], -(-most // bucket) * bucket))
    assert lengths == expected


def test_the_default_bucket() -> None:
    assert kernels.bucket_of(Threshold(), torch.zeros(1)) == 1
    assert kernels.bucket_of(Threshold(bucket=8), torch.zeros(1)) == 8
