"""ALGM's two steps against plain loops."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean, pstdev
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
from vitrail.errors import InvalidOption
from vitrail.merging import ModelShape
from vitrail.merging.methods.dynamic import LocalGlobal
from vitrail.models import ViTConfig


def windows_by_hand(
    x: Tensor, grid: tuple[int, int, int], special: int, threshold: float, cap: int, fixed: set[int]
) -> set[frozenset[int]]:
    t, h, w = grid
    found = []
    for step in range(t):
        for i in range(0, h - 1, 2):
            for j in range(0, w - 1, 2):
                members = [special + (step * h + i + a) * w + j + b for a in (0, 1) for b in (0, 1)]
                mean = fmean(cosine(x[a], x[b]) for a, b in combinations(members, 2))
                if mean >= threshold and not fixed & set(members):
                    found.append((mean, members))
    found = sorted(found, key=lambda one: -one[0])[: cap // 3]
    rest = set(range(len(x))) - {member for _, members in found for member in members}
    return {frozenset(members) for _, members in found} | {frozenset([one]) for one in rest}


@pytest.mark.parametrize("grid", [(1, 4, 4), (1, 5, 3), (2, 2, 5), (1, 1, 12)])
@pytest.mark.parametrize("threshold", [-1.0, 0.1, 0.3])
@pytest.mark.parametrize("cap", [3, 7, 1000])
def test_uniform_windows_merge(grid: tuple[int, int, int], threshold: float, cap: int) -> None:
    torch.manual_seed(0)
    length = 2 + grid[0] * grid[1] * grid[2]
    x = torch.randn(3, length, 3).double()
    method = LocalGlobal(threshold)
    found = method.reduce(context(x, grid=grid, protected=2, depth=8), cap)
    assert_in_place(found)
    for image in range(3):
        assert groups_after(found, image) == windows_by_hand(x[image], grid, 2, threshold, cap, {0, 1})
    mask = torch.rand(3, length) < 0.2
    found = method.reduce(context(x, grid=grid, protected=mask, depth=8), torch.tensor([cap, 3, 0]))
    for image, most in enumerate((cap, 3, 0)):
        fixed = {0, 1} | set(mask[image].nonzero()[:, 0].tolist())
        assert groups_after(found, image) == windows_by_hand(x[image], grid, 2, threshold, most, fixed)


@pytest.mark.parametrize("deviations", [-1.0, 0.5, 1.0])
def test_similar_tokens_merge_anywhere_later(deviations: float) -> None:
    torch.manual_seed(1)
    x, size = torch.randn(4, 15, 3).double(), torch.ones(4, 15)
    size[1, 9:] = 0
    method = LocalGlobal(deviations=deviations)
    found = method.reduce(context(x, layer=4, depth=8, protected=1, size=size, padded=True), 5)
    for image in range(4):
        tokens = size[image].nonzero()[:, 0].tolist()
        scores = {(a, b): cosine(x[image, a], x[image, b]) for a, b in bipartite(tokens[1:])}
        level = fmean(scores.values()) + deviations * pstdev(scores.values())
        pairs = [pair for pair in best_pairs(scores) if pair[0] >= level][: min(5, len(tokens[1:]) // 2)]
        assert groups_after(found, image, size > 0) == merge_pairs(tokens, pairs)


def test_layers() -> None:
    x = torch.randn(1, 9, 3)
    for layer in (1, 2, 3, 5, 7):
        assert LocalGlobal().reduce(context(x, layer=layer, depth=8), 5) is None
    assert LocalGlobal().layers(6) == [1, 0, 0, 0, 1, 0]
    assert LocalGlobal().layers(24).index(1, 1) == 6
    assert LocalGlobal(global_layer=2).layers(3) == [1, 0, 1]


@pytest.mark.parametrize(("width", "threshold"), [(192, 0.90), (384, 0.88), (768, 0.94), (1024, 0.95), (1280, 0.95)])
def test_the_threshold_follows_the_width(width: int, threshold: float) -> None:
    """A window of three equal tokens and one at an angle, just above and just below the threshold."""
    method = LocalGlobal()
    method.build(ModelShape(8, width, 4, 16))
    for change, count in ((1e-6, 1), (-1e-6, 4)):
        angle = 2 * (threshold + change) - 1  # mean of three pairs of 1 and three of this
        x = torch.tensor([[[1.0, 0.0]] * 3 + [[angle, (1 - angle**2) ** 0.5]]], dtype=torch.float64)
        assert len(groups_after(method.reduce(context(x, grid=(1, 2, 2), depth=8), 100), 0)) == count


def test_in_a_model() -> None:
    config = ViTConfig(**{**SMALL, "image_size": 28, "depth": 4})
    model, x = built(config), random_images(config, batch=4)
    x[0, :, :24, :24] = x[0, :, :4, :4].repeat(1, 6, 6)
    options: dict[str, Any] = {"threshold": 0.5, "global_layer": 2}
    with torch.no_grad(), vitrail.merge(model, method={"name": "local_global", **options}) as merging:
        assert merging.config["method"] == {"name": "local_global", **options}
        with merging.track() as trace:
            model(x)
    lengths = trace.tokens_per_layer
    assert torch.equal(lengths[:, 0], lengths[:, 1])
    assert torch.equal(lengths[:, 2], lengths[:, 3])
    assert ((50 - lengths[:, 0]) % 3 == 0).all()
    assert (lengths[:, 2] < lengths[:, 1]).all()
    assert lengths[0, 0] < lengths[1:, 0].min(), "the flat image merges more windows"
    with pytest.raises(InvalidOption, match="global_layer"):
        vitrail.merge(model, method=LocalGlobal(global_layer=4))


@pytest.mark.parametrize(
    "options", [{"threshold": "a"}, {"global_layer": 0}, {"deviations": None}, {"features": "x"}, {"bucket": -1}]
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        LocalGlobal(**options)
