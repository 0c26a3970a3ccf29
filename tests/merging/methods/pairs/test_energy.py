"""Energy (PiToMe) against a loop in float64 written from the paper's formulas."""

from __future__ import annotations

import math
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
    unit,
)
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption
from vitrail.merging import Context
from vitrail.merging.methods.pairs import Energy
from vitrail.models import ViTConfig


def by_loop(context: Context, image: int, r: int, margin: float) -> set[frozenset[int]]:
    """Return the groups of one image."""
    tokens, free = unit(context.k[image].mean(0)), free_of(context, image)
    m = margin * (1 - context.layer / context.depth)

    def cosine(i: int, j: int) -> float:
        return float(tokens[i] @ tokens[j])

    def elu(value: float) -> float:
        return value if value > 0 else math.exp(value) - 1

    energy = {i: sum(elu(cosine(i, j) - m) for j in free) / len(free) for i in free}
    order = sorted(free, key=lambda i: (-energy[i], i))[: 2 * r]
    sources, destinations = order[::2], order[1::2]
    into = {i: max(sorted(destinations), key=lambda j: cosine(i, j)) for i in sources}
    groups = {i: {i} for i in range(len(tokens)) if context.size is None or context.size[image, i] > 0}
    for source, destination in into.items():
        groups[destination] |= groups.pop(source)
    return {frozenset(group) for group in groups.values()}


@every_case
def test_groups_against_a_loop(case: Case) -> None:
    different = 0
    for seed in range(4):
        context = context_of(case, seed, layer=seed)
        capacity = min(len(free_of(context, image)) for image in range(3)) // 2
        if not case.padded:
            assert Energy().capacity(case.length, context.protected) == capacity
        for r in range(1, capacity + 1):
            step = Energy().reduce(context, r).assignment
            check_places(step, context)
            assert (
                step.length
                == max(int((context.size[i] > 0).sum()) if case.sizes else case.length for i in range(3)) - r
            )
            for image in range(3):
                found = groups_of(step, context, image)
                assert found == by_loop(context, image, r, 0.75)
                different += found != by_loop(context, image, r, -0.9)
    assert different, "the margin never mattered"


def test_counts_per_image_and_limits() -> None:
    context = context_of(CASES["masks"], 3)
    most = [len(free_of(context, image)) // 2 for image in range(3)]
    step = Energy().reduce(context, torch.tensor([99, 0, 2])).assignment
    assert step.length == context.x.shape[1], "the second image keeps all of its tokens"
    for image, r in enumerate((most[0], 0, 2)):
        assert groups_of(step, context, image) == by_loop(context, image, r, 0.75)


def test_isolated_tokens_stay() -> None:
    """Copies of one token merge; four tokens unlike all others stay."""
    x = torch.cat([torch.ones(8, 1) * torch.eye(5)[0], torch.eye(5)[1:]]).unsqueeze(0)
    shuffled = torch.tensor([8, 0, 1, 9, 2, 3, 10, 4, 5, 11, 6, 7])
    x = x[:, shuffled]
    context = Context(0, (1, 3, 4), x, project=lambda: (x[:, None], x[:, None], x[:, None]))
    step = Energy().reduce(context, 4).assignment
    # all copies are alike, so ties decide: A is every second copy, and all of A choose the first copy of B
    assert groups_of(step, context, 0) == {
        frozenset({1, 4, 7, 10, 2}),
        *(frozenset({i}) for i in (0, 3, 5, 6, 8, 9, 11)),
    }


def test_ties_go_to_the_lower_index() -> None:
    x = torch.ones(1, 6, 3)
    context = Context(0, (1, 2, 3), x, project=lambda: (x[:, None], x[:, None], x[:, None]))
    # energies are equal: A is 0 and 2, B is 1 and 3, and both of A choose 1
    assert groups_of(Energy().reduce(context, 2).assignment, context, 0) == {
        frozenset({0, 1, 2}), frozenset({3}), frozenset({4}), frozenset({5}),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    context = context_of(CASES["sizes"], dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        step = Energy().reduce(context, 3).assignment
    for image in range(3):
        assert groups_of(step, context, image) == by_loop(context, image, 3, 0.75)


def test_a_broken_image_changes_nothing_for_others() -> None:
    context, broken = context_of(CASES["plain"]), context_of(CASES["plain"])
    broken.k[0] = torch.nan
    found, wanted = Energy().reduce(broken, 3).assignment, Energy().reduce(context, 3).assignment
    assert found.length == wanted.length
    assert torch.equal(found.target[1:], wanted.target[1:])
    assert len(groups_of(found, broken, 0)) == 9


def test_in_a_model() -> None:
    config = ViTConfig(**{**SMALL, "depth": 3})
    model, x = built(config), random_images(config)
    outputs = []
    for options in ({}, {"margin": -0.5}, {"features": "tokens"}):
        with torch.no_grad(), vitrail.merge(model, r=3, method={"name": "energy", **options}) as merging:
            outputs.append(model(x))
            assert merging.config["method"] == ({"name": "energy", **options} if options else "energy")
            assert merging.tokens_per_layer() == [14, 11, 8]
            config_again = merging.config
        with torch.no_grad(), vitrail.merge(model, **config_again):
            assert torch.equal(model(x), outputs[-1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("options", [{"margin": 2}, {"margin": "wide"}, {"margin": True}, {"features": "colors"}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        Energy(**options)
