"""Agglomerative clustering against SciPy, and against a loop where tokens are protected, weighted or equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.merging.methods.blocks import BLOCKS, alone, block, check_means, free_places, members, size_of
from vitrail.errors import InvalidOption
from vitrail.merging import Context, as_method
from vitrail.merging.methods.clustering import Agglomerative

LINKAGES = ("complete", "average", "single")


def cosine_distance(points: Tensor) -> Tensor:
    points = points / points.norm(dim=1, keepdim=True)
    return 1 - points @ points.T


def clusters(context: Context, image: int, r: int, linkage: str, by_size: bool = False) -> set[tuple[int, ...]]:
    """Return the clusters of an image, comparing all pairs of members of all pairs of clusters before each merge."""
    distance = cosine_distance(context.k[image].mean(0))
    groups = [[i] for i in free_places(context, image)]
    for _ in range(r):
        best: Any = None
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                pairs = [(float(distance[i, j]), i, j) for i in groups[a] for j in groups[b]]
                values = [value for value, _, _ in pairs]
                weights = [size_of(context, image, i) * size_of(context, image, j) for _, i, j in pairs]
                mean = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
                average = mean if by_size else sum(values) / len(values)
                value = {"complete": max(values), "single": min(values), "average": average}[linkage]
                if best is None or value < best[0]:
                    best = (value, a, b)
        _, a, b = best
        groups[a] += groups.pop(b)
    return {tuple(sorted(group)) for group in groups}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("r", [1, 5, 7])
def test_clusters_are_those_of_a_loop(name: str, linkage: str, r: int) -> None:
    context = BLOCKS[name]
    reduction = Agglomerative(linkage).reduce(context, r)
    assert reduction.assignment.length == context.x.shape[1] - r
    check_means(context, reduction, [clusters(context, i, r, linkage) | alone(context, i) for i in range(3)])


@pytest.mark.parametrize("name", ["sizes", "padding and masks"])
def test_average_linkage_by_size(name: str) -> None:
    context = BLOCKS[name]
    reduction = Agglomerative("average", by_size=True).reduce(context, 7)
    wanted = [clusters(context, image, 7, "average", by_size=True) | alone(context, image) for image in range(3)]
    check_means(context, reduction, wanted)
    assert wanted != [clusters(context, image, 7, "average") | alone(context, image) for image in range(3)]


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("r", [3, 20, 36])
def test_clusters_are_those_of_scipy(linkage: str, r: int) -> None:
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    squareform = pytest.importorskip("scipy.spatial.distance").squareform
    context = block(40, protected=1)
    found = Agglomerative(linkage, "tokens").reduce(context, r).assignment
    for image in range(3):
        distance = cosine_distance(context.x[image, 1:])
        condensed = squareform(distance.fill_diagonal_(0).numpy(), checks=False)
        tree = hierarchy.linkage(condensed, linkage)
        labels = torch.from_numpy(hierarchy.fcluster(tree, 39 - r, "maxclust"))
        assert len(labels.unique()) == 39 - r
        same = found.target[image, 1:].unsqueeze(0) == found.target[image, 1:].unsqueeze(1)
        assert torch.equal(same, labels.unsqueeze(0) == labels.unsqueeze(1))


@pytest.mark.parametrize("linkage", LINKAGES)
def test_ties_go_to_the_lower_index(linkage: str) -> None:
    context = block(7)
    context.x = torch.eye(8, dtype=torch.float64)[[0, 1, 2, 1, 2, 1, 3]].expand(3, -1, -1)
    wanted = {1: [[1, 3]], 2: [[1, 3, 5]], 3: [[1, 3, 5], [2, 4]]}
    for r, groups in wanted.items():
        found = members(Agglomerative(linkage, "tokens").reduce(context, r), 0)
        assert [group for group in found if len(group) > 1] == groups


def test_a_broken_image_changes_no_other() -> None:
    whole, broken = block(), block()
    broken.x[1] = torch.nan
    wanted, found = (Agglomerative(features="tokens").reduce(one, 5).assignment.target for one in (whole, broken))
    assert torch.equal(wanted[[0, 2]], found[[0, 2]])
    assert found[1].unique().numel() == 8


def test_options() -> None:
    assert Agglomerative().config == "agglomerative"
    options = {"linkage": "average", "features": "tokens", "by_size": True}
    assert as_method(Agglomerative(**options).config).options == options  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="complete, average, single"):
        Agglomerative("ward")
    with pytest.raises(InvalidOption, match="by_size"):
        Agglomerative(by_size=1)  # type: ignore[arg-type]
