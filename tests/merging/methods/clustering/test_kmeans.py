"""k-means against a loop over tokens and centers."""

from __future__ import annotations

import pytest
import torch

from tests.merging.methods.blocks import BLOCKS, alone, block, check_means, free_places, mask, members, size_of
from vitrail.errors import InvalidOption
from vitrail.merging import Context, as_method
from vitrail.merging.methods.clustering import KMeans


def clusters(context: Context, image: int, r: int, iterations: int, points: torch.Tensor) -> set[tuple[int, ...]]:
    """Return the clusters of the free tokens of an image, by loops."""
    free = free_places(context, image)
    points = points / points.norm(dim=1, keepdim=True)
    repeated = {i: max((float(points[i] @ points[j]) for j in free if j < i), default=-2.0) for i in free}
    centers = sorted(sorted(free, key=lambda i: (repeated[i], i))[: len(free) - r])
    places, anchors = [points[i] for i in centers], list(centers)
    groups: list[list[int]] = []
    for _ in range(iterations):
        if groups:
            total = [sum(size_of(context, image, i) for i in group) for group in groups]
            places = [
                sum(points[i] * size_of(context, image, i) for i in group) / total[c] for c, group in enumerate(groups)
            ]
            anchors = [
                min(group, key=lambda i, at=places[c]: (float((points[i] - at).square().sum()), i))
                for c, group in enumerate(groups)
            ]
        groups = [[anchor] for anchor in anchors]
        for i in free:
            if i not in anchors:
                nearest = min(range(len(places)), key=lambda c: (float((points[i] - places[c]).square().sum()), c))
                groups[nearest].append(i)
    return {tuple(sorted(group)) for group in groups}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("r", [1, 4, 7])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_clusters_are_those_of_a_loop(name: str, r: int, iterations: int) -> None:
    context = BLOCKS[name]
    reduction = KMeans(iterations=iterations).reduce(context, r)
    assert reduction.assignment.length == context.x.shape[1] - r
    wanted = [
        clusters(context, image, r, iterations, context.k[image].mean(0)) | alone(context, image) for image in range(3)
    ]
    check_means(context, reduction, wanted)


def test_other_features() -> None:
    context = block()
    wanted = [clusters(context, image, 5, 5, context.x[image]) | alone(context, image) for image in range(3)]
    check_means(context, KMeans("tokens").reduce(context, 5), wanted)


def test_clear_clusters_are_found() -> None:
    generator = torch.Generator().manual_seed(1)
    centers = torch.eye(8, dtype=torch.float64)[:4]
    label = torch.randint(4, (3, 24), generator=generator)
    label[:, :4] = torch.arange(4)
    context = block(24, protected=0)
    context.x = centers[label] + 0.05 * torch.randn(3, 24, 8, generator=generator, dtype=torch.float64)
    reduction = KMeans("tokens").reduce(context, 20)
    assert torch.equal(reduction.assignment.by_first_member().target, label)


def test_more_iterations_fit_better() -> None:
    context = block(60, protected=0)
    unit = context.x / context.x.norm(dim=2, keepdim=True)

    def spread(iterations: int) -> float:
        step = KMeans("tokens", iterations).reduce(context, 50).assignment
        return float((unit - step.unmerge(step.merge(unit))).square().sum())

    assert spread(10) < 0.95 * spread(1)


def test_equal_tokens_leave_no_cluster_empty() -> None:
    context = block()
    context.x = torch.eye(8, dtype=torch.float64)[0].expand(3, 13, 8)
    groups = members(KMeans("tokens").reduce(context, 6), 0)
    assert groups == [[0], [1, 7, 8, 9, 10, 11, 12], [2], [3], [4], [5], [6]]


def test_a_broken_image_changes_no_other() -> None:
    whole, broken = block(), block()
    broken.x[1] = torch.nan
    wanted, found = (KMeans("tokens").reduce(one, 5).assignment.target for one in (whole, broken))
    assert torch.equal(wanted[[0, 2]], found[[0, 2]])
    assert found[1].unique().numel() == 8


def test_protected_tokens_attract_no_others() -> None:
    context = block(protected=mask([0, 5]))
    context.x[:, 6:] = context.x[:, 5:6]
    assert {(0,), (5,)} <= {tuple(group) for group in members(KMeans("tokens").reduce(context, 7), 0)}


def test_options() -> None:
    assert KMeans().config == "kmeans"
    assert as_method(KMeans("tokens", 3).config).options == {"features": "tokens", "iterations": 3}
    with pytest.raises(InvalidOption, match="features"):
        KMeans("colors")
    for iterations in (0, True, 2.5):
        with pytest.raises(InvalidOption, match="iterations"):
            KMeans(iterations=iterations)  # type: ignore[arg-type]
