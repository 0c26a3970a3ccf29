"""DPC-KNN against a loop: densities, distances to denser tokens, centers, and who joins them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.merging.methods.blocks import BLOCKS, alone, block, check_means, free_places, members
from vitrail.errors import InvalidOption
from vitrail.merging import Context, as_method
from vitrail.merging.methods.clustering import DPCKNN


def clusters(context: Context, image: int, r: int, neighbors: int, points: torch.Tensor) -> set[tuple[int, ...]]:
    """Return the clusters of the free tokens of an image, by loops."""
    free = free_places(context, image)
    squared = {(i, j): float((points[i] - points[j]).square().mean()) for i in free for j in free}
    density, delta = {}, {}
    for i in free:
        nearest = sorted(squared[i, j] for j in free if j != i)[:neighbors]
        density[i] = math.exp(-sum(nearest) / len(nearest))
    for i in free:
        denser = [j for j in free if (density[j], -j) > (density[i], -i)]
        delta[i] = math.sqrt(min(squared[i, j] for j in denser) if denser else max(squared[i, j] for j in free))
    centers = sorted(free, key=lambda i: -delta[i] * density[i])[: len(free) - r]
    groups = {center: [center] for center in centers}
    for i in free:
        if i not in centers:
            groups[min(centers, key=lambda c: squared[i, c])].append(i)
    return {tuple(sorted(group)) for group in groups.values()}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("r", [1, 4, 7])
@pytest.mark.parametrize("neighbors", [1, 5, 20])
def test_clusters_are_those_of_a_loop(name: str, r: int, neighbors: int) -> None:
    context = BLOCKS[name]
    reduction = DPCKNN(neighbors=neighbors).reduce(context, r)
    assert reduction.assignment.length == context.x.shape[1] - r
    wanted = [clusters(context, image, r, neighbors, context.x[image]) | alone(context, image) for image in range(3)]
    check_means(context, reduction, wanted)


def test_other_features() -> None:
    context = block()
    wanted = [clusters(context, i, 5, 5, context.k[i].mean(0)) | alone(context, i) for i in range(3)]
    check_means(context, DPCKNN("keys").reduce(context, 5), wanted)


def test_tokens_far_apart_have_no_underflow() -> None:
    """Densities of exp(−10⁴) are 0 in every dtype; their logarithms are still compared."""
    context = block(protected=0)
    context.x = context.x * 100
    found = members(DPCKNN().reduce(context, 5), 0)
    points = context.x[0]
    squared = [[float((a - b).square().mean()) for b in points] for a in points]
    log_density = [-sum(sorted(row)[1:6]) / 5 for row in squared]
    scores = []
    for i, row in enumerate(squared):
        denser = [row[j] for j in range(13) if log_density[j] > log_density[i]]
        scores.append(math.log(min(denser) if denser else max(row)) / 2 + log_density[i])
    centers = sorted(sorted(range(13), key=lambda i: -scores[i])[:8])
    assert sorted(next(i for i in group if i in centers) for group in found) == centers


def test_equal_tokens_are_ordered_by_index() -> None:
    context = block()
    context.x = torch.eye(8, dtype=torch.float64)[0].expand(3, 13, 8)
    assert members(DPCKNN().reduce(context, 6), 0) == [[0], [1, 7, 8, 9, 10, 11, 12], [2], [3], [4], [5], [6]]


def test_a_broken_image_changes_no_other() -> None:
    whole, broken = block(), block()
    broken.x[1] = torch.nan
    wanted, found = (DPCKNN().reduce(one, 5).assignment.target for one in (whole, broken))
    assert torch.equal(wanted[[0, 2]], found[[0, 2]])
    assert found[1].unique().numel() == 8


def test_options() -> None:
    assert DPCKNN().config == "dpc_knn"
    assert as_method(DPCKNN("keys", 3).config).options == {"features": "keys", "neighbors": 3}
    with pytest.raises(InvalidOption, match="features"):
        DPCKNN("colors")
    for neighbors in (0, True, 2.5):
        with pytest.raises(InvalidOption, match="neighbors"):
            DPCKNN(neighbors=neighbors)  # type: ignore[arg-type]
