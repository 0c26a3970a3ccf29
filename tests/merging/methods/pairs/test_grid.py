"""Grid (CubistMerge) against a loop over rows and columns in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.methods.pairs.cases import unit
from tests.models.mixes import SMALL, built, random_images
from tests.surgery.models import ALL, run
from vitrail.errors import InvalidOption, SaturatedWarning
from vitrail.merging import Context, MergeState
from vitrail.merging.methods.pairs import Grid
from vitrail.merging.methods.pairs.grid import choose_pairs
from vitrail.models import ViTConfig

Line = list[list[int]]
"""Groups of positions along one line."""


def next_size(height: int, width: int) -> tuple[int, int]:
    return (height - 1, width) if height >= width else (height, width - 1)


def mean(features: Tensor, size: Tensor, group: list[int]) -> Tensor:
    return sum((size[i] * features[i] for i in group), torch.zeros(())) / sum(size[i] for i in group)


def shorten(line: Line, features: Tensor, size: Tensor, count: int) -> Line:
    """Merge pairs of neighbors, the most similar first, where as many as needed still fit beside."""
    vectors = unit(torch.stack([mean(features, size, group) for group in line]))
    taken: set[int] = set()
    for left in range(count - 1, -1, -1):
        found = []
        for i in range(len(line) - 1):
            after = taken | {i, i + 1}
            if i in taken or i + 1 in taken or room_for(len(line), after) < left:
                continue
            found.append((-float(vectors[i] @ vectors[i + 1]), i))
        best = min(found)[1]
        line = [*line[:best], line[best] + line[best + 1], [], *line[best + 2 :]]
        taken |= {best, best + 1}
    return [group for group in line if group]


def room_for(length: int, taken: set[int]) -> int:
    """Return how many disjoint pairs of neighbors are left."""
    runs = itertools.groupby(range(length), key=lambda i: i in taken)
    return sum(len(list(run)) // 2 for used, run in runs if not used)


def by_loop(features: Tensor, size: Tensor, grid: tuple[int, int, int], after: tuple[int, int]) -> list[list[int]]:
    """Return the members of every patch of the new grid, in row-major order."""
    frames, height, width = grid
    result = []
    for frame in range(frames):
        start = frame * height * width
        columns = [[[start + y * width + x] for y in range(height)] for x in range(width)]
        columns = [shorten(column, features, size, height - after[0]) for column in columns]
        for y in range(after[0]):
            result += shorten([column[y] for column in columns], features, size, width - after[1])
    return result


def context_of(grid: tuple[int, int, int], size: tuple[int, int], special: int, sizes: bool, seed: int = 0) -> Context:
    make = torch.Generator().manual_seed(seed)
    n = special + grid[0] * size[0] * size[1]
    x = torch.randn(2, n, 6, generator=make, dtype=torch.float64)
    k = torch.randn(2, 2, n, 4, generator=make, dtype=torch.float64) + 0.5
    counts = torch.randint(1, 5, (2, n), generator=make).double() if sizes else None
    return Context(0, grid, x, counts, special, project=lambda: (k, k, k))


@pytest.mark.parametrize("grid", [(1, 6, 6), (1, 4, 7), (1, 7, 4), (1, 1, 9), (3, 4, 5), (1, 2, 2)])
@pytest.mark.parametrize("special", [0, 3])
@pytest.mark.parametrize("sizes", [False, True])
def test_groups_and_values_against_a_loop(grid: tuple[int, int, int], special: int, sizes: bool) -> None:
    before, steps = grid[1:], 0
    for start in range(6):  # every reachable step from the first sizes of the chain
        after = before
        while True:
            after = next_size(*after)
            if not min(after) or 2 * after[0] < before[0] or 2 * after[1] < before[1]:
                break
            steps += 1
            context = context_of(grid, before, special, sizes, start)
            r = grid[0] * (before[0] * before[1] - after[0] * after[1])
            assert Grid().feasible(r, context.x.shape[1], special, grid) == r
            assert Grid().feasible(r + 1, context.x.shape[1], special, grid) in (r, r + 1)
            reduction = Grid().reduce(context, r)
            tokens, state = MergeState((r,), size=context.size, protected=special).apply(context.x, reduction, Grid())
            assert tokens.shape[1] == special + grid[0] * after[0] * after[1]
            for image in range(2):
                size = torch.ones(context.x.shape[1]) if context.size is None else context.size[image]
                patches = context.k[image].mean(0)[special:], size[special:]
                wanted = [[i] for i in range(special)]
                wanted += [[special + i for i in group] for group in by_loop(*patches, (grid[0], *before), after)]
                target = reduction.assignment.target[image].tolist()
                assert [[i for i, t in enumerate(target) if t == place] for place in range(len(wanted))] == [
                    sorted(group) for group in wanted
                ]
                for place, group in enumerate(wanted):
                    members = context.x[image, group]
                    largest = [max(column, key=abs) for column in members.T.tolist()]
                    assert tokens[image, place].tolist() == largest
                    assert state.size is not None
                    assert state.size[image, place] == sum(size[group])
        before = next_size(*before)
        if not min(before):
            break
    assert steps


def test_pairs_are_the_best_first() -> None:
    found = choose_pairs(torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.3]]), 2)
    assert found.tolist() == [[False, True, False, True, False]]
    # three pairs of six tokens fit in one way only
    assert choose_pairs(torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.3]]), 3).tolist() == [[True, False, True, False, True]]
    assert choose_pairs(torch.zeros(1, 5), 2).tolist() == [[True, False, True, False, False]], "ties: lower index"


@pytest.mark.parametrize("length", range(2, 10))
def test_as_many_pairs_as_fit_are_found(length: int) -> None:
    make = torch.Generator().manual_seed(length)
    similarity = torch.rand(200, length - 1, generator=make)
    for count in range(length // 2 + 1):
        chosen = choose_pairs(similarity, count)
        assert (chosen.sum(1) == count).all()
        assert not (chosen[:, 1:] & chosen[:, :-1]).any(), "pairs are disjoint"


def test_the_grid_follows_from_the_number_of_patches() -> None:
    assert [Grid.grid_of(n, (1, 3, 5)) for n in (15, 12, 9, 6, 4, 2, 1)] == [
        (1, 3, 5), (1, 3, 4), (1, 3, 3), (1, 2, 3), (1, 2, 2), (1, 1, 2), (1, 1, 1),
    ]  # fmt: skip
    assert Grid.grid_of(2 * 12, (2, 3, 5)) == (2, 3, 4)
    with pytest.raises(InvalidOption, match="no whole grid"):
        Grid.grid_of(13, (1, 3, 5))


def test_a_step_leaves_half_of_the_rows_and_columns() -> None:
    assert Grid().feasible(99, 36 + 2, 2, (1, 6, 6)) == 36 - 9
    assert Grid().feasible(5, 36 + 2, 2, (1, 6, 6)) == 0
    context = context_of((1, 6, 6), (6, 6), 2, False)
    with pytest.raises(InvalidOption, match="half"):
        Grid().reduce(context, 36 - 6)
    with pytest.raises(InvalidOption, match="no whole grid"):
        Grid().reduce(context, 5)


def test_masks_and_other_counts_are_refused() -> None:
    model = built(ViTConfig(**SMALL))
    protect = torch.zeros(16, dtype=torch.bool)
    with pytest.raises(InvalidOption, match="protect="):
        vitrail.merge(model, r=4, method="grid", protect=protect)
    assert not vitrail.runtime.checks.merged_trunk(model)
    context = context_of((1, 4, 4), (4, 4), 1, True)
    with pytest.raises(InvalidOption, match="same rows"):
        Grid().reduce(context, torch.tensor([4, 0]))
    context.protected = torch.zeros(1, 17, dtype=torch.bool)
    with pytest.raises(InvalidOption, match="protect="):
        Grid().reduce(context, 4)


def test_rows_are_removed_when_enough_is_requested() -> None:
    """Six rows of six: a layer that merges 4 cannot remove a row, two of them can."""
    config = ViTConfig(**{**SMALL, "image_size": 24, "depth": 6})
    model, x = built(config), random_images(config)
    with torch.no_grad(), vitrail.merge(model, r=4, method="grid") as merging:
        model(x)
        assert merging.r == [0, 6, 5, 5, 4, 4]
        assert merging.tokens_per_layer() == [37, 31, 26, 21, 17, 13]
        merging.keep = 0.5
        patches = [n - 1 for n in merging.tokens_per_layer()]
        assert patches[-1] <= 18
        assert all(Grid.grid_of(n, (1, 6, 6)) for n in patches)
        merging.r = [0, 13, 0, 0, 0, 0]
        assert merging.r == [0, 11, 0, 0, 0, 0]
    with torch.no_grad(), vitrail.merge(model, r=100, method="grid") as merging:
        with pytest.warns(SaturatedWarning, match="600 merges were requested and 35"):
            model(x)
        assert merging.tokens_per_layer()[-1] == 2


@pytest.mark.parametrize("order", ["paper", "original"])
@pytest.mark.parametrize("size", [(24, 24), (16, 36), (36, 16)])
def test_other_input_sizes_have_grids_of_their_own(order: str, size: tuple[int, int]) -> None:
    """Sizes of 36 patches each, one after the other in one model: the tokens that come out are in row-major order."""
    config = ViTConfig(**{**SMALL, "image_size": 24, "depth": 3})
    model = built(config)
    grid = (1, size[0] // 4, size[1] // 4)
    with torch.no_grad(), vitrail.merge(model, r=[10, 0, 9], method="grid", order=order) as merging:
        model(random_images(config))
        with merging.track() as trace:
            model(random_images(config, size=size))
        _, h, w = Grid.grid_of(trace.sizes.shape[1] - 1, grid)
        assert trace.sizes.shape[1] - 1 < 36
        groups = (trace.groups[0] - 1).reshape(grid[1:])
        for column in range(grid[2]):
            assert (groups[:, column] // w).diff().ge(0).all(), "rows of the result keep the order of rows"
        for row in range(grid[1]):
            assert (groups[row] % w).diff().ge(0).all(), "columns keep the order of columns"
        assert set((groups // w).flatten().tolist()) == set(range(h))
        assert merging.tokens_per_layer(size)[-1] == trace.sizes.shape[1]


def test_pooling_of_a_model() -> None:
    case = ALL["eva-dinov3"]
    model, images = case.model(), case.images()
    outputs = []
    with torch.no_grad():
        for options in ({}, {"pool": "mean"}, {"features": "rotated_keys"}):
            with vitrail.merge(model, r=[4, 0, 4], method={"name": "grid", **options}) as merging:
                outputs.append(run(model, images, case))
                assert merging.config["method"] == ({"name": "grid", **options} if options else "grid")
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4
    assert (outputs[0] - outputs[2]).abs().max() > 1e-6


def test_gradients_go_to_the_largest() -> None:
    x = torch.tensor([[[1.0, -5], [-3, 2]]], requires_grad=True)
    y = Grid().pool(x, vitrail.Assignment(torch.tensor([[0, 0]]), 1), None)
    assert y.tolist() == [[[-3, -5]]]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[[0, 1], [1, 0]]]


def test_a_broken_image_changes_nothing_for_others() -> None:
    context = context_of((1, 4, 4), (4, 4), 1, False)
    wanted = Grid().reduce(context, 7).assignment.target[1]
    context.k[0] = torch.nan
    step = Grid().reduce(context, 7).assignment
    assert torch.equal(step.target[1], wanted)
    assert step.target[0].unique().tolist() == list(range(10))


@pytest.mark.parametrize("options", [{"pool": "median"}, {"features": "colors"}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        Grid(**options)
