"""Mutual nearest neighbors (MPM) against a loop in float64."""

from __future__ import annotations

import pytest
import torch

import vitrail
from tests.merging.methods.pairs.cases import (
    CASES,
    Case,
    check_places,
    context_of,
    every_case,
    free_of,
    groups_of,
    unit,
)
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption
from vitrail.merging import Context
from vitrail.merging.methods.pairs import Mutual
from vitrail.models import ViTConfig


def by_loop(context: Context, image: int, r: int) -> set[frozenset[int]]:
    """Return the groups of one image."""
    tokens, free = unit(context.x[image]), free_of(context, image)

    def cosine(i: int, j: int) -> float:
        return float(tokens[i] @ tokens[j])

    nearest = {i: max((j for j in free if j != i), key=lambda j: cosine(i, j)) for i in free}
    pairs = [(i, j) for i, j in nearest.items() if i < j and nearest[j] == i]
    chosen = sorted(pairs, key=lambda pair: -cosine(*pair))[:r]
    gone = {j for _, j in chosen}
    present = [i for i in range(len(tokens)) if context.size is None or context.size[image, i] > 0]
    return {frozenset(pair) for pair in chosen} | {
        frozenset({i}) for i in present if i not in gone and i not in dict(chosen)
    }


@every_case
def test_groups_against_a_loop(case: Case) -> None:
    counts = set()
    for seed in range(4):
        context = context_of(case, seed)
        for r in (1, 2, 99):
            reduction = Mutual().reduce(context, r)
            assert reduction is not None
            step = reduction.assignment
            check_places(step, context)
            for image in range(3):
                found = groups_of(step, context, image)
                assert found == by_loop(context, image, r)
                counts.add(sum(len(group) - 1 for group in found))
    assert len(counts) > 2


def test_counts_per_image() -> None:
    context = context_of(CASES["plain"], 1)
    reduction = Mutual().reduce(context, torch.tensor([0, 1, 99]))
    assert reduction is not None
    for image, r in enumerate((0, 1, 99)):
        assert groups_of(reduction.assignment, context, image) == by_loop(context, image, r)


def test_ties_and_nothing_to_merge() -> None:
    x = torch.ones(1, 5, 3)
    context = Context(0, (1, 1, 5), x)
    reduction = Mutual("tokens").reduce(context, 9)
    assert reduction is not None
    # the nearest of 0 is 1, that of all others is 0
    assert groups_of(reduction.assignment, context, 0) == {frozenset({0, 1}), *(frozenset({i}) for i in (2, 3, 4))}
    assert Mutual().reduce(Context(0, (1, 1, 5), x, protected=4), 9) is None
    assert Mutual().reduce(Context(0, (1, 1, 5), x, protected=5), 9) is None
    assert Mutual().reduce(Context(0, (1, 1, 5), x), torch.tensor([0])) is None


@pytest.mark.parametrize(
    ("depth", "blocks"), [(12, [1, 4]), (24, [2, 8]), (48, [4, 16]), (6, [0, 2]), (3, [0, 1]), (1, [0])]
)
def test_default_layers(depth: int, blocks: list[int]) -> None:
    shares = Mutual().layers(depth)
    assert [i for i, share in enumerate(shares) if share] == blocks
    assert sum(shares) == 1


def test_in_a_model() -> None:
    """By default all pairs merge before the second and the fifth block, and a batch equals its images."""
    config = ViTConfig(**{**SMALL, "depth": 12, "image_size": 24})
    model, x = built(config), random_images(config, batch=4)
    with torch.no_grad(), vitrail.merge(model, method="mutual") as merging:
        with merging.track() as trace:
            together = model(x)
        lengths = trace.tokens_per_layer
        assert (lengths[:, 0] == 37).all()
        assert (lengths[:, 1] < 37).all()
        assert torch.equal(lengths[:, 1], lengths[:, 3])
        assert (lengths[:, 4] < lengths[:, 3]).all()
        assert torch.equal(lengths[:, 4], lengths[:, 11])
        assert len(set(lengths[:, 4].tolist())) > 1
        torch.testing.assert_close(torch.cat([model(image[None]) for image in x]), together, rtol=0, atol=1e-10)
    with torch.no_grad(), vitrail.merge(model, r=[2, 0, 3, *[0] * 9], method="mutual") as merging:
        with merging.track() as trace:
            model(x)
        assert trace.tokens_per_layer[:, [0, 1, 2, 3]].tolist() == [[35, 35, 32, 32]] * 4


def test_the_first_pairs_of_a_model_are_those_of_the_embedding() -> None:
    config = ViTConfig(**{**SMALL, "depth": 12, "image_size": 24})
    model, x = built(config), random_images(config)
    inputs: list[torch.Tensor] = []
    hook = model.blocks[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(x)
        hook.remove()
        with vitrail.merge(model, r=[0, 18, *[0] * 10], method="mutual") as merging, merging.track() as trace:
            model(x)
    context = Context(1, (1, 6, 6), inputs[0], protected=1)
    for image in range(2):
        assert groups_of(trace.latest.assignment, context, image) == by_loop(context, image, 99)


def test_wrong_options() -> None:
    with pytest.raises(InvalidOption, match="features"):
        Mutual(features="colors")
