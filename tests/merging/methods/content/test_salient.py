"""Content-aware matching against plain loops."""

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
    context,
    cosine,
    entropy,
    groups_after,
    merge_pairs,
)
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.merging import ModelShape
from vitrail.merging.methods.content import IMPORTANCE, Salient
from vitrail.merging.methods.content.importance import importance_of, motion_map
from vitrail.models import ViTConfig


def by_hand(
    x: Tensor, importance: list[float], r: int, strength: float, keep: float, free: list[int], tokens: list[int]
) -> set[frozenset[int]]:
    low = min((importance[i] for i in free), default=0)
    high = max((importance[i] for i in free), default=0)
    scaled = {i: (importance[i] - low) / (high - low) if high > low else 0 for i in free}
    spared = sorted(free, key=lambda i: (-scaled[i], i))[: math.floor(keep * len(free))]
    candidates = [i for i in free if i not in spared]
    scores = {
        (a, b): cosine(x[a], x[b]) - strength * (scaled[a] + scaled[b]) / 2
        for a in candidates[::2]
        for b in candidates[1::2]
    }
    return merge_pairs(tokens, best_pairs(scores)[:r])


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("strength", [0.0, 0.5, 10.0])
@pytest.mark.parametrize("protected", [0, 2])
def test_unimportant_pairs_merge_first(keep: float, strength: float, protected: int) -> None:
    torch.manual_seed(0)
    x, map_ = torch.randn(3, 13, 4).double(), torch.rand(3, 13).double()
    method = Salient("map", strength=strength, keep=keep)
    for r in range(1, method.capacity(13, protected) + 1):
        found = method.reduce(context(x, protected=protected, guide={"map": map_}), r)
        assert found.assignment.length == 13 - r
        assert_in_place(found)
        for image in range(3):
            free = list(range(protected, 13))
            wanted = by_hand(x[image], map_[image].tolist(), r, strength, keep, free, list(range(13)))
            assert groups_after(found, image) == wanted
    assert method.capacity(13, protected) == (13 - protected - math.floor(keep * (13 - protected))) // 2


@pytest.mark.parametrize("keep", [0.0, 0.29])
def test_masks_and_padding(keep: float) -> None:
    torch.manual_seed(1)
    x, map_ = torch.randn(4, 12, 4).double(), torch.rand(4, 12).double()
    mask, size = torch.rand(4, 12) < 0.3, torch.ones(4, 12)
    method = Salient("map", strength=1.0, keep=keep)
    r = method.capacity(12, mask)
    found = method.reduce(context(x, protected=mask, guide={"map": map_}), r)
    for image in range(4):
        free = (~mask[image]).nonzero()[:, 0].tolist()
        wanted = by_hand(x[image], map_[image].tolist(), r, 1.0, keep, free, list(range(12)))
        assert groups_after(found, image) == wanted
    size[1, 9:] = 0
    size[2, 11:] = 0
    counts = torch.tensor([2, 1, 0, 2])
    found = method.reduce(context(x, guide={"map": map_}, size=size, padded=True), counts)
    for image in range(4):
        tokens = size[image].nonzero()[:, 0].tolist()
        wanted = by_hand(x[image], map_[image].tolist(), int(counts[image]), 1.0, keep, tokens, tokens)
        assert groups_after(found, image, size > 0) == wanted
    assert_in_place(found, size > 0)


def test_importance_by_loops() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 9, 4).double()
    rows = torch.randn(2, 3, 9, 9).double().softmax(-1)
    here = context(x, protected=1, class_token=0)
    here.attend = lambda queries: rows.mean(2) if queries is None else rows[:, :, list(queries)]

    def scaled(values: list[float]) -> list[float]:
        low, high = min(values[1:]), max(values[1:])
        return [0.0] + [(value - low) / (high - low) for value in values[1:]]

    for image in range(2):
        mean = rows[image].mean(0)
        wanted = {
            "class_attention": mean[0].tolist(),
            "received_attention": [sum(mean[:, j].tolist()) / 9 for j in range(9)],
            "attention_entropy": [-entropy(mean[i].tolist()) for i in range(9)],
            "norm": [math.sqrt(sum(v * v for v in x[image, i].tolist())) for i in range(9)],
        }
        assert set(wanted) == set(IMPORTANCE) - {"motion"}
        for name, values in wanted.items():
            assert importance_of(here, name)[image].tolist() == pytest.approx(scaled(values), abs=1e-12)
    flat = importance_of(context(torch.ones(2, 5, 3)), "norm")
    assert not flat.any()


@pytest.mark.parametrize("frames_first", [False, True])
def test_motion_is_the_change_of_a_tubelet(frames_first: bool) -> None:
    torch.manual_seed(3)
    video, grid = torch.randn(2, 3, 6, 4, 8), (3, 2, 2)
    found = motion_map(video.transpose(1, 2) if frames_first else video, grid)
    for image in range(2):
        for t in range(3):
            for h in range(2):
                for w in range(2):
                    step = max(t, 1)
                    now, before = (
                        video[image, :, 2 * s : 2 * s + 2, 2 * h : 2 * h + 2, 4 * w : 4 * w + 4]
                        for s in (step, step - 1)
                    )
                    assert float(found[image, (t * 2 + h) * 2 + w]) == pytest.approx(float((now - before).abs().mean()))


def test_what_cannot_move() -> None:
    with pytest.raises(UnsupportedInput, match="frames"):
        motion_map(torch.randn(1, 3, 8, 8), (1, 2, 2))
    with pytest.raises(UnsupportedInput, match="overlap"):
        motion_map(torch.randn(1, 3, 4, 8, 9), (2, 2, 2))
    with pytest.raises(UnsupportedModel, match="video"):
        Salient("motion").check(ModelShape(2, 8, 2, 4, grid=(1, 4, 4)))
    with pytest.raises(UnsupportedModel, match="class token"):
        Salient("class_attention").check(ModelShape(2, 8, 2, 4))


@pytest.mark.parametrize(
    "options", [{"importance": ""}, {"importance": 3}, {"strength": -1}, {"keep": 1}, {"keep": True}, {"features": "x"}]
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        Salient(**options)


def test_options_make_the_same_method_again() -> None:
    for options in ({}, {"importance": "norm", "strength": 0.5, "keep": 0.2, "features": "values"}):
        assert Salient(**options).options == options


def test_a_mask_of_the_caller() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config, batch=2)
    mask = torch.zeros(2, 4, 4, dtype=torch.bool)
    mask[0, :2] = mask[1, :, 2:] = True
    with torch.no_grad(), vitrail.merge(model, r=[4, 0], method=Salient("mask", strength=10)) as merging:
        with merging.guide(mask=mask), merging.track() as trace:
            model(x)
        sizes = trace.sizes.gather(1, trace.groups)
        assert (sizes[mask.flatten(1)] == 1).all(), "the masked half stays"
        assert (sizes[~mask.flatten(1)] > 1).sum() >= 10
        with pytest.raises(InvalidOption, match="guide"):
            model(x)


def test_a_video() -> None:
    model = built(ViTConfig(**{**SMALL, "image_size": (4, 16, 16), "patch_size": (2, 4, 4)}))
    x = torch.randn(1, 3, 1, 16, 16, dtype=torch.float64).repeat(2, 1, 4, 1, 1)
    x[:, :, :, :8] += torch.randn(2, 3, 4, 8, 16)
    method = Salient("motion", strength=10)
    with torch.no_grad(), vitrail.merge(model, r=[8, 0], method=method) as merging, merging.track() as trace:
        model(x)
    assert trace.layout.grid == (2, 4, 4)
    moving = torch.zeros(2, 4, 4, dtype=torch.bool)
    moving[:, :2] = True
    sizes = trace.sizes.gather(1, trace.groups)
    assert (sizes[:, moving.flatten()] == 1).all()
    assert [len(groups[~moving.flatten()].unique()) for groups in trace.groups] == [8, 8], "the others halved"


def test_a_guide_that_is_not_shown_is_named() -> None:
    config = ViTConfig(**SMALL)
    model = built(config)
    with (
        vitrail.merge(model, r=1, method=Salient("ahead")),
        pytest.raises(InvalidOption, match=r"importance='ahead' .*with merging\.guide\(ahead=\.\.\.\)"),
    ):
        model(random_images(config))
