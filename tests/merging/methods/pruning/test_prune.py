"""Prune with every matcher: one token of each group stays, by a rule written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.methods.pairs.cases import CASES, Case, context_of, every_case, groups_of, merged
from tests.merging.test_custom_methods import KMeans, Learned, Threshold
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption
from vitrail.merging import METHODS, Assignment, Context, Method, Prune, Reduction, ToMe, as_method
from vitrail.merging.methods.pairs import Energy, Grid
from vitrail.models import ViTConfig

BIPARTITE = ["tome", "mlerp", {"name": "tome", "features": "tokens"}]
OTHERS = ["energy", "mctf", "mutual", {"name": "energy", "margin": 0.1}]


def largest(group: frozenset[int], size: list[float]) -> int:
    return min(group, key=lambda i: (-size[i], i))


def check_against_groups(case: Case, matcher: Any, r: int, stays: Any) -> None:
    context = context_of(case, 4)
    groups = as_method(matcher).reduce(context, r)
    method = Prune(matcher)
    reduction = method.reduce(context, r)
    assert groups is not None
    assert reduction is not None
    assert torch.equal(reduction.assignment.target, groups.assignment.target)
    tokens, sizes = merged(method, context, reduction)
    for image in range(3):
        size = [1.0] * case.length if context.size is None else context.size[image].tolist()
        for group in groups_of(groups.assignment, context, image):
            kept = stays(group, size)
            place = int(groups.assignment.target[image, kept])
            assert torch.equal(tokens[image, place], context.x[image, kept])
            assert sizes[image, place] == size[kept]


@every_case
@pytest.mark.parametrize("matcher", BIPARTITE, ids=str)
def test_the_destination_of_a_bipartite_matching_stays(case: Case, matcher: Any) -> None:
    def stays(group: frozenset[int], size: list[float]) -> int:
        return next(i for i in group if i % 2 or len(group) == 1)

    check_against_groups(case, matcher, 3, stays)


@every_case
@pytest.mark.parametrize("matcher", OTHERS, ids=str)
def test_the_largest_token_stays_otherwise(case: Case, matcher: Any) -> None:
    check_against_groups(case, matcher, 4, largest)


@pytest.mark.parametrize("case", ["plain", "odd", "sizes", "mask"])
def test_the_largest_token_of_a_cluster_stays(case: str) -> None:
    check_against_groups(CASES[case], KMeans(), 6, largest)


@pytest.mark.parametrize("sizes", [False, True])
def test_the_largest_token_of_a_cell_stays(sizes: bool) -> None:
    context = context_of(Case(14, sizes=sizes), grid=(1, 3, 4))
    groups, reduction = Grid().reduce(context, 6), Prune(Grid()).reduce(context, 6)
    assert reduction is not None
    tokens, _ = merged(Prune(Grid()), context, reduction)
    for image in range(3):
        size = [1.0] * 14 if context.size is None else context.size[image].tolist()
        for group in groups_of(groups.assignment, context, image):
            place = int(groups.assignment.target[image, min(group)])
            assert torch.equal(tokens[image, place], context.x[image, largest(group, size)])


class Dropping(Method):
    """Two groups of three; the largest token of each is dropped by the method itself."""

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        return Reduction(Assignment(torch.tensor([[0, 0, 0, 1, 1, 1]]), 2), weight=torch.tensor([[0.0, 1, 1, 1, 1, 0]]))


def test_tokens_that_the_matcher_drops_do_not_stay() -> None:
    x, size = torch.randn(1, 6, 2), torch.tensor([[9.0, 2, 3, 1, 1, 9]])
    context = Context(0, (1, 2, 3), x, size)
    method = Prune(Dropping())
    reduction = method.reduce(context, 4)
    assert reduction is not None
    tokens, sizes = merged(method, context, reduction)
    assert torch.equal(tokens[0], x[0, [2, 3]])
    assert sizes.tolist() == [[3, 1]]


class Relaxed(Method):
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        soft = torch.ones(*context.x.shape[:2], 2)
        return Reduction(Assignment(torch.zeros(context.x.shape[:2], dtype=torch.long), 2), soft=soft)


def test_relaxed_assignments_are_refused() -> None:
    with pytest.raises(InvalidOption, match="relaxed"):
        Prune(Relaxed()).reduce(Context(0, (1, 1, 3), torch.randn(1, 3, 2)), 1)


def test_a_matcher_decides_everything_else() -> None:
    for name in METHODS:
        if name == "prune" or name.startswith("test-"):
            continue
        matcher, method = as_method(name), Prune(name)
        for attribute in ("static", "place", "scope", "places_groups", "keeps_grid", "any_count"):
            assert getattr(method, attribute) == getattr(matcher, attribute), (name, attribute)
        assert method.layers(12) == matcher.layers(12)
        assert method.capacity(20, 3) == matcher.capacity(20, 3)
        assert method.flops(20, 8) == matcher.flops(20, 8)
        assert method.twin is None
    assert Prune(Grid()).feasible(6, 16, 0, (1, 4, 4)) == 4
    assert Prune(Threshold()).static is False
    assert Prune(Threshold()).amount(context_of(CASES["plain"]), 2).shape == (3,)  # type: ignore[union-attr]


def test_parameters_and_loss_of_a_matcher() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config)
    matcher = Learned()
    with vitrail.merge(model, r=3, method=Prune(matcher)) as merging:
        assert "vitrail_method.matcher.scores.0.weight" in model.state_dict()
        model(x)
        assert merging.loss() is matcher.penalty


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, "prune"),
        ({"matcher": "tome"}, "prune"),
        ({"matcher": ToMe("values")}, {"name": "prune", "matcher": {"name": "tome", "features": "values"}}),
        ({"features": "values"}, {"name": "prune", "matcher": {"name": "tome", "features": "values"}}),
        ({"features": "keys"}, "prune"),
        ({"matcher": "energy"}, {"name": "prune", "matcher": "energy"}),
        ({"matcher": Energy(margin=0)}, {"name": "prune", "matcher": {"name": "energy", "margin": 0.0}}),
    ],
    ids=str,
)
def test_config(options: dict[str, Any], config: Any) -> None:
    method = Prune(**options)
    assert method.config == config
    assert as_method(config).config == config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"matcher": "magic"}, "method"),
        ({"matcher": "prune"}, "prune"),
        ({"matcher": Prune()}, "prune"),
        ({"matcher": "energy", "features": "values"}, "features"),
        ({"features": "colors"}, "features"),
        ({"matcher": ToMe}, "instance"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        Prune(**options)


def test_a_pruned_model_keeps_tokens_as_they_are() -> None:
    """With prune, all sizes stay 1, and removing the merging restores the model."""
    config = ViTConfig(**{**SMALL, "depth": 3})
    model, x = built(config), random_images(config)
    with torch.no_grad():
        before = model(x)
        for matcher in ("tome", "energy", "mctf", "mlerp"):
            with vitrail.merge(model, r=4, method={"name": "prune", "matcher": matcher}) as merging:
                with merging.track() as trace:
                    model(x)
                assert trace.sizes.unique().tolist() == [1]
                assert trace.sizes.shape == (2, 17 - 12)
            assert torch.equal(model(x), before)


def test_protected_patches_keep_their_places_in_the_original_order() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config)
    protect = torch.zeros(16, dtype=torch.bool)
    protect[5:9] = True
    with (
        torch.no_grad(),
        vitrail.merge(model, r=3, method=Prune("energy"), protect=protect, order="original") as merging,
    ):
        with merging.track() as trace:
            model(x)
        groups, sizes = trace.groups, trace.sizes
    alone = [(groups[0] == groups[0, i]).sum().item() for i in range(5, 9)]
    assert alone == [1] * 4
    assert sizes.shape[1] == 17 - 6
