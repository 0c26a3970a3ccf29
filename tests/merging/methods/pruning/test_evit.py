"""EViT against a loop: which tokens stay, and what the fused token is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.methods.blocks import BLOCKS, absent, apply, block, free_places, members, size_of
from vitrail.errors import InvalidOption, UnsupportedModel
from vitrail.merging import Context, as_method
from vitrail.merging.methods.pruning import EViT
from vitrail.models import ViT, ViTConfig

every_block = pytest.mark.parametrize("name", BLOCKS)


def class_weights(context: Context, image: int) -> list[float]:
    """Return softmax(q·k/√d + log size) of the class token, the mean over heads, in loops."""
    length, found = context.x.shape[1], [0.0] * context.x.shape[1]
    heads, width = context.q.shape[1], context.q.shape[3]
    for head in range(heads):
        query, keys = context.q[image, head, 0].tolist(), context.k[image, head].tolist()
        scores = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(width) for key in keys]
        parts = [math.exp(score) * size_of(context, image, i) for i, score in enumerate(scores)]
        for i in range(length):
            found[i] += parts[i] / sum(parts) / heads
    return found


def attentive(context: Context, image: int, count: int) -> list[int]:
    weights = class_weights(context, image)
    return sorted(sorted(free_places(context, image), key=lambda i: (-weights[i], i))[:count])


@every_block
@pytest.mark.parametrize("fuse", ["sum", "mean"])
@pytest.mark.parametrize("r", [1, 4, 6])
def test_the_most_attended_stay_and_the_others_become_one(name: str, fuse: str, r: int) -> None:
    context, method = BLOCKS[name], EViT(fuse)
    reduction = method.reduce(context, r)
    merged, state = apply(context, reduction, method)
    assert merged.shape[1] == context.x.shape[1] - r
    for image in range(3):
        free, weights = free_places(context, image), class_weights(context, image)
        kept = attentive(context, image, len(free) - r - 1)
        rest = [i for i in free if i not in kept]
        groups = members(reduction, image)
        assert rest in groups
        total = torch.zeros_like(context.x[image, 0])
        for i in rest:
            total += weights[i] * context.x[image, i]
        if fuse == "mean":
            total /= sum(weights[i] for i in rest)
        fused = groups.index(rest)
        torch.testing.assert_close(merged[image, fused], total)
        assert state.size[image, fused] == 1
        for place, group in enumerate(groups):
            if place != fused:
                assert len(group) == 1
                assert state.size[image, place] == size_of(context, image, group[0])
                if group[0] not in absent(context, image):
                    assert torch.equal(merged[image, place], context.x[image, group[0]])


@every_block
@pytest.mark.parametrize("r", [1, 6])
def test_dropped_tokens_are_restored_from_the_most_similar_kept_one(name: str, r: int) -> None:
    context, method = BLOCKS[name], EViT("drop")
    reduction = method.reduce(context, r)
    merged, state = apply(context, reduction, method)
    for image in range(3):
        free = free_places(context, image)
        kept = attentive(context, image, len(free) - r)
        keys = context.k[image].mean(0)
        keys = keys / keys.norm(dim=1, keepdim=True)
        target = reduction.assignment.target[image].tolist()
        for i in range(context.x.shape[1]):
            if i in free and i not in kept:
                best = max(kept, key=lambda j: (float(keys[i] @ keys[j]), -j))
                assert target[i] == target[best]
            elif i not in absent(context, image):
                assert torch.equal(merged[image, target[i]], context.x[image, i])
                assert state.size[image, target[i]] == size_of(context, image, i)


def test_ties_go_to_the_lower_index() -> None:
    context = block(6)
    context.attend = lambda queries: torch.full((3, 2, 1, 6), 1 / 6)
    assert members(EViT().reduce(context, 2), 0) == [[0], [1], [2], [3, 4, 5]]


def test_a_broken_image_keeps_as_many_tokens() -> None:
    context = block()
    weights = context.attention([0])
    weights[1] = torch.nan
    context.attend = lambda queries: weights
    assert EViT("drop").reduce(context, 5).assignment.target.amax(1).tolist() == [7, 7, 7]


def test_three_blocks_reduce_by_default() -> None:
    model = ViT(ViTConfig(image_size=32, patch_size=4, width=16, depth=12, heads=2, num_classes=3))
    with vitrail.merge(model, keep=0.7**3, method="evit") as merging:
        assert [layer for layer, r in enumerate(merging.r) if r] == [3, 6, 9]
        kept = 64
        for r in (merging.r[layer] for layer in (3, 6, 9)):
            assert abs(kept - r - 0.7 * kept) <= 1
            kept -= r
    with vitrail.merge(model, keep=0.125, method=EViT(rate=0.5)) as merging:
        assert [merging.r[layer] for layer in (3, 6, 9)] == [32, 16, 8]


def test_a_class_token_is_required() -> None:
    model = ViT(
        ViTConfig(image_size=16, patch_size=4, width=16, depth=2, heads=2, num_classes=3, tokens=(), pool="mean")
    )
    with pytest.raises(UnsupportedModel, match="class token"):
        vitrail.merge(model, r=2, method="evit")
    assert type(model) is ViT


def test_options() -> None:
    assert EViT().config == "evit"
    assert as_method(EViT("mean", 0.5).config).options == {"fuse": "mean", "rate": 0.5}
    with pytest.raises(InvalidOption, match="sum, mean, drop"):
        EViT("all")
    for rate in (0, 1, True, "half"):
        with pytest.raises(InvalidOption, match="rate"):
            EViT(rate=rate)  # type: ignore[arg-type]


def test_gradients_flow_through_the_fused_token() -> None:
    context = block()
    context.x.requires_grad_()
    method = EViT()
    merged, _ = apply(context, method.reduce(context, 6), method)
    (gradient,) = torch.autograd.grad(merged[0].sum(), context.x)
    weights = class_weights(context, 0)
    kept = {0, *attentive(context, 0, 5)}
    wanted: Tensor = torch.tensor([1.0 if i in kept else weights[i] for i in range(13)], dtype=torch.float64)
    torch.testing.assert_close(gradient[0], wanted.unsqueeze(1).expand(-1, 8))
