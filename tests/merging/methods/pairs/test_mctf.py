"""MCTF against a loop in float64 written from the paper's formulas."""

from __future__ import annotations

from typing import Any

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
    merged,
    unit,
)
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption
from vitrail.merging import Context
from vitrail.merging.methods.pairs import MCTF
from vitrail.models import ViTConfig


def by_loop(context: Context, image: int, r: int, ts: float = 1, ti: float = 20, tz: float = 40) -> set[frozenset[int]]:
    """Return the groups of one image: two halves, one after the other."""
    tokens, free = unit(context.x[image]), free_of(context, image)
    attention = context.attention()[image].mean(0).tolist()
    size = [1.0] * len(tokens) if context.size is None else context.size[image].tolist()
    most_calm, most_small = max(1 / attention[i] for i in free), max(1 / size[i] for i in free)

    def score(i: int, j: int) -> float:
        cosine = float(tokens[i] @ tokens[j])
        calm = (1 / attention[i] / most_calm) * (1 / attention[j] / most_calm)
        small = (1 / size[i] / most_small) * (1 / size[j] / most_small)
        return ((cosine + 1) / 2) ** (1 / ts) * calm ** (1 / ti) * small ** (1 / tz)

    groups = {i: {i} for i in range(len(tokens)) if size[i] > 0}
    even, odd = [i for i in free if i % 2 == 0], [i for i in free if i % 2 == 1]
    for sources, destinations, count in ((even, odd, (r + 1) // 2), (odd, even, r // 2)):
        left = [j for j in destinations if j in groups]
        if not count:
            continue
        best = {i: max(left, key=lambda j: score(i, j)) for i in sources}
        for i in sorted(sources, key=lambda i: -score(i, best[i]))[:count]:
            groups[best[i]] |= groups.pop(i)
    return {frozenset(group) for group in groups.values()}


def most(context: Context, image: int) -> int:
    """Return the largest count whose halves both find sources, and a destination that remains."""
    free = free_of(context, image)
    even, odd = sum(i % 2 == 0 for i in free), sum(i % 2 == 1 for i in free)
    fits = [r for r in range(1, 40) if (r + 1) // 2 <= even - (r > 1) and r // 2 <= odd and odd]
    return max(fits, default=0)


@every_case
def test_groups_against_a_loop(case: Case) -> None:
    for seed in range(3):
        context = context_of(case, seed)
        capacity = min(most(context, image) for image in range(3))
        if not case.padded:
            assert MCTF().capacity(case.length, context.protected) == capacity
        for r in range(1, capacity + 1):
            step = MCTF().reduce(context, r).assignment
            check_places(step, context)
            for image in range(3):
                found = groups_of(step, context, image)
                assert found == by_loop(context, image, r)
                assert sum(len(group) - 1 for group in found) == r


@every_case
def test_merged_tokens_are_means_by_attention_and_size(case: Case) -> None:
    context = context_of(case, 5)
    reduction = MCTF().reduce(context, 4)
    tokens, sizes = merged(MCTF(), context, reduction)
    for image in range(3):
        attention = context.attention()[image].mean(0)
        size = torch.ones(case.length).double() if context.size is None else context.size[image]
        for group in groups_of(reduction.assignment, context, image):
            place = int(reduction.assignment.target[image, min(group)])
            weights = {i: attention[i] * size[i] for i in group}
            mean = sum(weights[i] * context.x[image, i] for i in group) / sum(weights.values())
            torch.testing.assert_close(tokens[image, place], mean)
            assert sizes[image, place] == sum(size[i] for i in group)
            if len(group) == 1:
                assert torch.equal(tokens[image, place], context.x[image, min(group)])


@pytest.mark.parametrize("name", ["tau_similarity", "tau_information", "tau_size"])
def test_each_temperature_matters(name: str) -> None:
    short = {"tau_similarity": "ts", "tau_information": "ti", "tau_size": "tz"}[name]
    changed = 0
    for seed in range(3):
        context = context_of(CASES["sizes"], seed)
        step = MCTF(**{name: 0.5}).reduce(context, 4).assignment
        for image in range(3):
            found = groups_of(step, context, image)
            assert found == by_loop(context, image, 4, **{short: 0.5})
            changed += found != by_loop(context, image, 4)
    assert changed


def test_counts_per_image_and_limits() -> None:
    context = context_of(CASES["masks"], 3)
    step = MCTF().reduce(context, torch.tensor([99, 0, 3])).assignment
    for image, r in enumerate((most(context, 0), 0, 3)):
        assert groups_of(step, context, image) == by_loop(context, image, r)


def test_a_token_without_attention_keeps_its_value() -> None:
    context = context_of(CASES["plain"], dtype=torch.float32)
    received = torch.zeros(3, 2, 12)
    context.attend = lambda _: received
    reduction = MCTF().reduce(context, 4)
    tokens, sizes = merged(MCTF(), context, reduction)
    assert tokens.isfinite().all()
    assert torch.equal(tokens[:, :2], context.x[:, :2])
    assert sizes.sum(1).tolist() == [12] * 3


def test_in_a_model() -> None:
    config = ViTConfig(**{**SMALL, "depth": 3})
    model, x = built(config), random_images(config)
    outputs = []
    for options in ({}, {"tau_similarity": 40.0, "tau_information": 0.1}, {"features": "keys"}):
        with torch.no_grad(), vitrail.merge(model, r=4, method={"name": "mctf", **options}) as merging:
            outputs.append(model(x))
            assert merging.config["method"] == ({"name": "mctf", **options} if options else "mctf")
            assert merging.tokens_per_layer() == [13, 9, 5]
            again = merging.config
        with torch.no_grad(), vitrail.merge(model, **again):
            assert torch.equal(model(x), outputs[-1])
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_more_than_half_of_the_tokens_can_merge_in_one_layer() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config)
    with torch.no_grad(), vitrail.merge(model, r=[14, 0], method="mctf") as merging:
        assert model(x).isfinite().all()
        assert merging.tokens_per_layer() == [3, 3]


@pytest.mark.parametrize("options", [{"tau_size": 0}, {"tau_information": -1}, {"tau_similarity": "1"}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        MCTF(**options)
