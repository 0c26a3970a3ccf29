"""Redundancy of outliers planted in known places."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from vitrail.analysis.redundancy import auc, border_distance, neighbor_similarity, pool_mask, redundancy
from vitrail.errors import InvalidOption, UnsupportedInput


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loops(x, grid):
    time, height, width = grid
    found = torch.zeros(x.shape[:2], dtype=torch.float64)
    for b in range(len(x)):
        for t in range(time):
            cells = x[b].reshape(time, height, width, -1)[t]
            for row in range(height):
                for column in range(width):
                    near = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
                    near = [cells[y, z] for y, z in near if 0 <= y < height and 0 <= z < width]
                    me = cells[row, column]
                    cosines = [float(me @ other / (me.norm() * other.norm())) for other in near]
                    found[b, (t * height + row) * width + column] = sum(cosines) / len(cosines)
    return found


@pytest.mark.parametrize("grid", [(1, 4, 5), (2, 3, 2), (1, 1, 4), (1, 5, 1)])
def test_similarity_is_the_mean_cosine_with_the_neighbors(grid, monkeypatch):
    x = seeded(3, int(np.prod(grid)), 6)
    expected = by_loops(x, grid)
    assert torch.allclose(neighbor_similarity(x, grid), expected, atol=1e-12)
    if grid[0] == 1:
        assert torch.equal(neighbor_similarity(x, grid[1:]), neighbor_similarity(x, grid))
    assert torch.allclose(neighbor_similarity(x.half(), grid), expected.float(), atol=5e-3)
    monkeypatch.setattr("vitrail.analysis._inputs.CHUNK", 1)
    assert torch.allclose(neighbor_similarity(x.requires_grad_(), grid), expected, atol=1e-12)


def test_patches_of_zeros():
    x = torch.zeros(1, 6, 4)
    assert torch.equal(neighbor_similarity(x, (2, 3)), torch.ones(1, 6))
    x[0, 0, 0] = 2.0
    assert neighbor_similarity(x, (2, 3)).tolist() == [[0, pytest.approx(2 / 3), 1, 0.5, 1, 1]]


def test_border_distance():
    assert border_distance((5, 4)).reshape(5, 4).tolist() == [
        [0, 0, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 0],
        [0, 0, 0, 0],
    ]
    assert border_distance((5, 5))[12] == 2
    assert torch.equal(border_distance((2, 3, 3)), border_distance((3, 3)).repeat(2))


def test_masks_are_pooled_to_patches():
    mask = torch.zeros(2, 6, 8, dtype=torch.bool)
    mask[0, :3, :4] = True
    mask[1, 2:4, 3:5] = True
    found = pool_mask(mask, (2, 2))
    assert found[0].tolist() == [1, 0, 0, 0]
    assert torch.allclose(found[1], torch.full((4,), 1 / 12))
    partly = mask.float()
    partly[0, :, :2] = torch.nan
    partly[0, 3:, :4] = torch.nan
    assert pool_mask(partly, (2, 2))[0, 0] == 1
    assert pool_mask(partly, (2, 2))[0, 2].isnan()
    with pytest.raises(UnsupportedInput, match="whole patches"):
        pool_mask(mask, (4, 4))
    with pytest.raises(UnsupportedInput, match="between 0 and 1"):
        pool_mask(mask * 255, (2, 2))


def test_auc_equals_scikit_learn():
    random = np.random.default_rng(0)
    for _ in range(5):
        values = random.integers(0, 9, 50).astype(float)
        kind = random.random(50) < 0.3
        found = auc(torch.from_numpy(values[kind]), torch.from_numpy(values[~kind]))
        assert found == pytest.approx(roc_auc_score(kind, values))


def scene(images=40, grid=(8, 10), seed=0):
    """Embeddings of a flat background with a busy object in the middle; outliers in the background, at its border."""
    random = np.random.default_rng(seed)
    height, width = grid
    ground = seeded(images, 1, 12, seed=seed)
    inside = torch.zeros(height, width, dtype=torch.bool)
    inside[2:6, 3:8] = True
    inside = inside.flatten()
    x = ground + 0.2 * seeded(images, height * width, 12, seed=seed + 1)
    x[:, inside] += 3 * seeded(images, int(inside.sum()), 12, seed=seed + 2)
    outliers = torch.zeros(images, height * width, dtype=torch.bool)
    for row in range(images - 2):
        outliers[row, random.integers(0, width, 2)] = True
    return x, outliers, inside.double().expand(images, -1), grid


def test_planted_outliers_are_redundant_near_the_border_and_in_the_background():
    x, outliers, masks, grid = scene()
    similarity = neighbor_similarity(x, grid)
    found = redundancy(similarity, outliers, grid, masks=masks)
    assert (found.images, found.patches, found.outliers) == (40, 3200, int(outliers.sum()))
    for contrast, values in (
        (found.similarity, similarity),
        (found.border_distance, border_distance(grid).expand(40, -1).double()),
        (found.foreground, masks),
    ):
        assert contrast.outlier.mean == pytest.approx(float(values[outliers].mean()))
        assert contrast.normal.mean == pytest.approx(float(values[~outliers].mean()))
        assert contrast.auc == pytest.approx(roc_auc_score(outliers.flatten(), values.flatten()))
        assert contrast.auc_low <= contrast.auc <= contrast.auc_high
        assert contrast.normal.low <= contrast.normal.mean <= contrast.normal.high
        assert (contrast.outlier.images, contrast.normal.images) == (38, 40)
    assert found.similarity.outlier.low > found.similarity.normal.high
    assert found.similarity.auc_low > 0.6
    assert found.border_distance.outlier.mean == 0
    assert found.border_distance.auc_high < 0.4
    assert found.foreground.outlier.mean == 0
    assert found.foreground.normal.mean == pytest.approx(20 * 40 / (3200 - found.outliers))
    assert json.loads(json.dumps(found.to_dict()))["similarity"]["outlier"]["images"] == 38


def test_coverage_of_the_intervals():
    held = [0, 0]
    grid = (2, 10)
    for seed in range(80):
        level = seeded(30, 1, seed=seed) * 0.5  # Patches of one image share a level.
        values = level + seeded(30, 20, seed=seed + 1000)
        outliers = torch.zeros(30, 20, dtype=torch.bool)
        outliers[:, :4] = True
        found = redundancy(values, outliers, grid, draws=200).similarity
        held[0] += found.outlier.low <= 0 <= found.outlier.high
        held[1] += found.auc_low <= 0.5 <= found.auc_high
    assert all(0.85 <= count / 80 <= 1 for count in held)


def test_without_outliers_the_result_is_none():
    x, outliers, _, grid = scene(images=4)
    similarity = neighbor_similarity(x, grid)
    found = redundancy(similarity, torch.zeros_like(outliers), grid)
    assert found.similarity.outlier is None
    assert found.similarity.auc is None
    assert found.similarity.normal.mean == pytest.approx(float(similarity.mean()))
    assert found.foreground is None
    full = redundancy(similarity, torch.ones_like(outliers), grid)
    assert (full.similarity.normal, full.similarity.auc) == (None, None)


def test_one_image_has_means_but_no_intervals():
    x, outliers, _, grid = scene(images=5)
    similarity = neighbor_similarity(x, grid)
    outliers[1:] = False
    found = redundancy(similarity, outliers, grid).similarity
    assert found.outlier.mean == pytest.approx(float(similarity[outliers].mean()))
    assert (found.outlier.low, found.auc_low) == (None, None)
    assert found.normal.low is not None
    assert found.auc is not None
    single = redundancy(similarity[:1], outliers[:1], grid).similarity
    assert (single.outlier.low, single.normal.low, single.auc_high) == (None, None, None)


def test_unknown_masks_are_left_out():
    x, outliers, masks, grid = scene()
    masks = masks.clone()
    masks[:10] = torch.nan
    found = redundancy(neighbor_similarity(x, grid), outliers, grid, masks=masks).foreground
    assert (found.normal.images, found.outlier.images) == (30, 28)
    nowhere = redundancy(neighbor_similarity(x, grid), outliers, grid, masks=torch.full_like(masks, torch.nan))
    assert nowhere.foreground.normal is None


def test_the_seed_decides_the_draws():
    x, outliers, _, grid = scene()
    similarity = neighbor_similarity(x, grid)
    assert redundancy(similarity, outliers, grid) == redundancy(similarity, outliers, grid)
    assert redundancy(similarity, outliers, grid) != redundancy(similarity, outliers, grid, seed=1)


def test_errors():
    x, outliers, masks, grid = scene(images=4)
    similarity = neighbor_similarity(x, grid)
    with pytest.raises(UnsupportedInput, match="no neighbors"):
        neighbor_similarity(x[:, :1], (1, 1))
    with pytest.raises(UnsupportedInput, match="expected bool"):
        redundancy(similarity, outliers.int(), grid)
    with pytest.raises(UnsupportedInput, match="80"):
        redundancy(similarity[:, 1:], outliers[:, 1:], grid)
    with pytest.raises(UnsupportedInput, match="pool_mask"):
        redundancy(similarity, outliers, grid, masks=masks[:, 1:])
    with pytest.raises(InvalidOption, match="draws"):
        redundancy(similarity, outliers, grid, draws=0)
    similarity[2, 3] = torch.nan
    with pytest.raises(UnsupportedInput, match="number 2"):
        redundancy(similarity, outliers, grid)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    x, outliers, masks, grid = scene(images=4)
    similarity = neighbor_similarity(x.cuda(), grid)
    assert torch.allclose(similarity.cpu(), neighbor_similarity(x, grid), atol=1e-12)
    found = redundancy(similarity, outliers.cuda(), grid, masks=masks.cuda())
    assert found.similarity.auc == pytest.approx(redundancy(similarity.cpu(), outliers, grid).similarity.auc)
    assert torch.equal(pool_mask(torch.ones(1, 4, 4).cuda(), (2, 2)).cpu(), torch.ones(1, 4))
