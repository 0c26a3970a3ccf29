"""LOST and TokenCut: against loops, scipy and planted objects."""

import itertools
import json

import numpy as np
import pytest
import torch
from scipy import linalg, ndimage, stats

from vitrail import Role, TokenLayout
from vitrail.analysis import discovery
from vitrail.analysis.discovery import _component, corloc, iou, lost, lost_batch, sweep_lost, tokencut, tokencut_batch
from vitrail.analysis.features import patch_features
from vitrail.errors import InvalidOption, UnsupportedInput


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flood(inside, start, grid):
    """Flood fill from a patch; return the component and its box."""
    height, width = grid
    seen, todo = {start}, [start]
    while todo:
        row, column = divmod(todo.pop(), width)
        for y, x in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if 0 <= y < height and 0 <= x < width and inside[y * width + x] and y * width + x not in seen:
                seen.add(y * width + x)
                todo.append(y * width + x)
    rows, columns = [p // width for p in seen], [p % width for p in seen]
    return seen, (min(columns), min(rows), max(columns) + 1, max(rows) + 1)


def lost_by_loops(x, grid, k, bias):
    """LOST as its paper describes it."""
    count = len(x)
    gram = [[float(x[i] @ x[j]) + bias for j in range(count)] for i in range(count)]
    degree = [sum(gram[i][j] > 0 for j in range(count) if j != i) for i in range(count)]
    order = sorted(range(count), key=lambda p: (degree[p], p))
    seed = order[0]
    similar = [p for p in order[:k] if gram[seed][p] > 0]
    total = [sum(gram[p][j] for p in similar) for j in range(count)]
    return (seed, degree, *flood([value > 0 for value in total], seed, grid))


def tokencut_by_loops(x, grid, tau, eps):
    """TokenCut as its paper describes it, with scipy's generalized eigenvectors."""
    count = len(x)
    x = [row / row.norm() for row in x]
    graph = np.array([[1.0 if float(x[i] @ x[j]) > tau else eps for j in range(count)] for i in range(count)])
    degree = np.diag(graph.sum(1))
    values, vectors = linalg.eigh(degree - graph, degree)
    vector = vectors[:, 1]
    inside = vector > vector.sum() / count
    seed = next(p for p in range(count) if abs(vector[p]) >= np.abs(vector).max() * (1 - 1e-8))
    if not inside[seed]:
        inside = ~inside
    return (values[2] - values[1], seed, *flood(inside, seed, grid))


def marked(found):
    return set(found.mask.flatten().nonzero().flatten().tolist())


def planted(box, grid, *, noise=0.3, seed=0, channels=16):
    """One direction inside of a box, another outside, and noise."""
    x0, y0, x1, y1 = box
    height, width = grid
    inside = torch.zeros(height, width, dtype=torch.bool)
    inside[y0:y1, x0:x1] = True
    thing, ground = torch.eye(channels, dtype=torch.float64)[:2]
    x = torch.where(inside.flatten()[:, None], thing - 0.3 * ground, ground - 0.3 * thing)
    return 3 * x + noise * seeded(height * width, channels, seed=seed)


GRIDS = [(5, 7), (8, 4), (1, 12), (6, 6)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("k", [1, 6, 100])
@pytest.mark.parametrize("bias", [0.0, -1.5, 2.0])
def test_lost_by_loops(grid, k, bias):
    for seed in range(6):
        x = seeded(grid[0] * grid[1], 5, seed=seed) + 0.3
        found = lost(x, grid, k=k, bias=bias)
        first, degree, inside, box = lost_by_loops(x, grid, k, bias)
        assert (found.seed, found.scores.tolist(), found.box) == (first, degree, box)
        assert marked(found) == inside


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("tau", [0.0, 0.2, 0.5])
def test_tokencut_by_loops(grid, tau):
    clear = 0
    for seed in range(8):
        x = seeded(grid[0] * grid[1], 6, seed=seed) + 0.4
        gap, first, inside, box = tokencut_by_loops(x, grid, tau, 1e-5)
        if gap < 1e-6:  # Two vectors would do, and any mixture of them.
            continue
        found = tokencut(x, grid, tau=tau)
        assert (found.seed, marked(found), found.box) == (first, inside, box)
        clear += 1
    assert clear >= 4


@pytest.mark.parametrize("grid", [(9, 12), (14, 10)])
def test_planted_objects_are_found(grid):
    boxes = [(2, 3, 5, 7), (0, 0, 3, 4), (grid[1] - 4, grid[0] - 3, grid[1], grid[0])]
    for seed, box in enumerate(boxes):
        x = planted(box, grid, seed=seed)
        assert lost(x, grid).box == box
        assert tokencut(x, grid).box == box
        assert lost(x, grid).mask.sum() == (box[2] - box[0]) * (box[3] - box[1])


def test_only_the_part_around_the_seed_is_the_object():
    x = planted((1, 1, 4, 4), (8, 12), noise=0)
    far = planted((8, 5, 10, 7), (8, 12), noise=0)
    both = torch.where((x[:, :1] > 0) | (far[:, :1] > 0), x.max(0).values, x.min(0).values)
    both[:, 1] = torch.where(both[:, 0] > 0, x[:, 1].min(), x[:, 1].max())
    found = lost(both, (8, 12))
    assert (found.seed, found.box) == (13, (1, 1, 4, 4))
    assert tokencut(both, (8, 12)).box == (1, 1, 4, 4)


def test_a_bias_is_needed_if_all_features_agree():
    box, grid = (3, 2, 7, 5), (8, 10)
    x = planted(box, grid, noise=0.1)
    x[:, 2] += 4  # Now every pair of patches is positive.
    assert lost(x, grid).box == (0, 0, 10, 8)
    assert lost(x, grid, bias=-16.0).box == box


def test_ties_go_to_the_lower_index():
    same = torch.ones(6, 3)
    assert (lost(same, (2, 3)).seed, lost(same, (2, 3)).box) == (0, (0, 0, 3, 2))
    assert tokencut(planted((1, 0, 2, 1), (2, 3), noise=0), (2, 3)).seed == 1


def test_single_patches_and_seeds_alone():
    for method in (lost, tokencut):
        found = method(torch.ones(1, 4), (1, 1))
        assert (found.box, found.seed, found.grid) == ((0, 0, 1, 1), 0, (1, 1))
    alone = lost(torch.ones(6, 3), (2, 3), bias=-100.0)
    assert (alone.box, alone.mask.sum()) == ((0, 0, 1, 1), 1)
    assert lost(torch.zeros(6, 3), (2, 3)).box == (0, 0, 1, 1)
    tokencut(torch.zeros(6, 3), (2, 3))


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_and_devices_find_the_same(dtype, device):
    x = planted((2, 3, 5, 7), (9, 12)).to(device)
    assert lost((300 * x).to(dtype), (9, 12)).box == (2, 3, 5, 7)
    assert tokencut((300 * x).to(dtype), (1, 9, 12)).box == (2, 3, 5, 7)


def test_batches_are_images_one_by_one(monkeypatch):
    x = torch.stack([seeded(30, 5, seed=seed) + 0.3 for seed in range(7)])
    monkeypatch.setattr("vitrail.analysis._inputs.CHUNK", 9000)
    for whole, single in ((lost_batch, lost), (tokencut_batch, tokencut)):
        for found, image in zip(whole(x, (5, 6)), x, strict=True):
            alone = single(image, (5, 6))
            assert (found.box, found.seed) == (alone.box, alone.seed)
            assert torch.equal(found.mask, alone.mask)


def test_registers_are_ignored():
    layout = TokenLayout.of(Role.CLASS, (Role.REGISTER, 4), grid=(1, 9, 12))
    x = planted((2, 3, 5, 7), (9, 12))
    keys = torch.full((1, 2, layout.num_tokens, 8), 1e6, dtype=torch.float64)
    keys[0, :, layout.patches] = x.reshape(-1, 2, 8).transpose(0, 1)
    found = lost_batch(patch_features(keys, layout), layout.grid)[0]
    assert found.box == (2, 3, 5, 7)
    assert torch.equal(found.scores, lost(x, (9, 12)).scores)


def test_components_equal_scipy():
    random = np.random.default_rng(0)
    masks = random.random((60, 9, 11)) < 0.6
    seeds = random.integers(0, 99, 60)
    found = _component(torch.from_numpy(masks), torch.from_numpy(seeds)).numpy()
    for part, mask, seed in zip(found, masks, seeds, strict=True):
        mask.flat[seed] = True
        labels = ndimage.label(mask)[0]
        assert np.array_equal(part, labels == labels.flat[seed])
    snake = torch.ones(1, 9, 9, dtype=torch.bool)
    snake[0, 1::4, :-1] = snake[0, 3::4, 1:] = False
    assert torch.equal(_component(snake, torch.tensor([0])), snake)


def test_boxes_in_pixels_are_clipped_to_the_image():
    found = lost(planted((6, 5, 12, 9), (9, 12)), (9, 12))
    assert found.pixels(16) == (96, 80, 192, 144)
    assert found.pixels(16, (140, 185)) == (96, 80, 185, 140)
    assert found.pixels((14, 8)) == (48, 70, 96, 126)
    assert json.loads(json.dumps(found.to_dict())) == {
        "method": "lost",
        "grid": [9, 12],
        "box": [6, 5, 12, 9],
        "seed": found.seed,
    }


def test_iou():
    boxes = torch.tensor([[0, 0, 2, 2], [1, 1, 3, 3], [5, 5, 6, 6], [0, 0, 0, 0], [0, 0, 1, 2]])
    assert iou((0, 0, 2, 2), boxes).tolist() == pytest.approx([1, 1 / 7, 0, 0, 0.5])
    assert iou((1, 1, 1, 1), torch.zeros(1, 4)).tolist() == [0]
    with pytest.raises(UnsupportedInput, match=r"\(n, 4\)"):
        iou((0, 0, 2, 2), torch.zeros(4))


def test_corloc_counts_images_with_truth():
    near, far = torch.tensor([[9, 9, 10, 10], [0, 0, 2, 4]]), torch.tensor([[0, 0, 1, 1]])
    box = (0.0, 0.0, 2.0, 2.0)
    found = corloc([box, box, box, None, box], [near, far, None, near, torch.zeros(0, 4)])
    assert (found.hits, found.images, found.without_truth, found.share) == (1, 3, 2, 1 / 3)
    low, high = stats.binomtest(1, 3).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((low, high))
    assert corloc([box], [near], threshold=0.6).hits == 0
    assert corloc([box], [[(0, 0, 2, 2), (0, 0, 9, 9)]]).share == 1
    assert corloc([box], [None]) == discovery.CorLoc(None, None, None, 0, 0, 1)
    with pytest.raises(UnsupportedInput, match="1 found, 2 true"):
        corloc([box], [near, near])


def test_an_iou_of_exactly_one_half_counts():
    """LOST adds 1e-7 to heights and unions of integer boxes, in float32, where it vanishes: one half is a hit there."""
    assert all(np.float32(side) + np.float32(1e-7) == np.float32(side) for side in range(2, 2000))
    draw, halves = np.random.default_rng(0), 0
    for _ in range(2000):
        x, y, width, height, left, top = draw.integers(0, 6, 6) * 8
        box = (x, y, x + width + 8, y + height + 8)
        true = (left, top, left + int(draw.integers(1, 12)) * 8, top + int(draw.integers(1, 12)) * 8)
        sides = [min(box[i + 2], true[i + 2]) - max(box[i], true[i]) for i in (0, 1)]
        common = max(sides[0], 0) * max(sides[1], 0)
        areas = [(one[2] - one[0]) * (one[3] - one[1]) for one in (box, true)]
        assert corloc([box], [[true]]).hits == int(2 * common >= sum(areas) - common), (box, true)
        halves += 2 * common == sum(areas) - common
    assert halves > 0
    assert corloc([(0, 0, 16, 16)], [[(0, 0, 16, 32)]]).hits == 1
    assert corloc([(0, 0, 16, 16)], [[(0, 0, 16, 33)]]).hits == 0


def test_a_sweep_shows_fixed_and_best_side_by_side():
    grid = (8, 10)
    boxes = [(x, y, x + 4, y + 3) for x, y in itertools.product((1, 3, 5), (1, 3))]
    images = [planted(box, grid, noise=0.1, seed=seed) for seed, box in enumerate(boxes)]
    for x in images:
        x[:, 2] += 4
    images, truth = [*images, images[0]], [*[torch.tensor([box]) * 16 for box in boxes], None]
    biases = (-16.0, -30.0, 5.0)
    found = sweep_lost(iter(images), [grid] * 7, truth, biases=biases, patch=16)
    assert found.biases == (-30, -16, 0, 5)
    assert (found.fixed_setting.share, found.fixed_bias) == (0, 0)
    assert (found.best_of_sweep.share, found.best_bias, found.held_out.share) == (1, -16, 1)
    assert found.best_of_sweep.without_truth == 1
    for bias, result in zip(found.biases, found.by_bias, strict=True):
        alone = [lost(x, grid, bias=bias).pixels(16) for x in images]
        assert result == corloc(alone, truth)
    assert json.loads(json.dumps(found.to_dict()))["best_of_sweep"]["hits"] == 6


def test_a_useless_sweep_keeps_the_fixed_bias_and_needs_ground_truth():
    x = planted((2, 2, 6, 5), (8, 10))
    found = sweep_lost([x, x], [(8, 10)] * 2, [torch.tensor([[2, 2, 6, 5]])] * 2, biases=[-0.01, 0.01])
    assert (found.best_bias, found.best_of_sweep) == (0, found.fixed_setting)
    none = sweep_lost([x], [(8, 10)], [None], biases=[])
    assert (none.fixed_setting.share, none.held_out.share, none.fixed_setting.without_truth) == (None, None, 1)
    with pytest.raises(UnsupportedInput, match="a grid"):
        sweep_lost([x], [(8, 10)], [None, None], biases=[])


def test_held_out_is_measured_with_the_bias_of_the_other_half():
    grid = (8, 10)
    small = planted((2, 2, 6, 5), grid, noise=0.1)
    agreeing = small.clone()
    agreeing[:, 2] += 4
    truth = [torch.tensor([[2, 2, 6, 5]])] * 4
    found = sweep_lost([small, agreeing] * 2, [grid] * 4, truth, biases=[-16.0])
    assert [result.share for result in found.by_bias] == [0.5, 0.5]
    assert found.held_out.share == 0


def test_suggested_biases_are_quantiles_of_the_gram_matrix():
    x = torch.stack([seeded(30, 5, seed=seed) + 2 for seed in range(3)])
    found = discovery.suggest_biases(x, 5)
    assert (len(found), max(found)) == (5, 0)
    above = torch.triu(torch.ones(30, 30), 1).bool()
    for share, bias in zip((0.8, 0.6, 0.4, 0.2), found, strict=False):
        assert float(((x @ x.mT)[:, above] + bias < 0).double().mean()) == pytest.approx(share, abs=0.08)


@pytest.mark.parametrize("method", [lost, tokencut])
def test_errors(method):
    x = seeded(30, 5)
    with pytest.raises(UnsupportedInput, match="special tokens"):
        method(seeded(31, 5), (5, 6))
    with pytest.raises(UnsupportedInput, match="single frame"):
        method(x, (2, 3, 5))
    for bad in (torch.nan, torch.inf):
        broken = x.clone()
        broken[3, 2] = bad
        with pytest.raises(UnsupportedInput, match="not finite"):
            method(broken, (5, 6))
    assert not method(x.requires_grad_(), (5, 6)).scores.requires_grad


def test_options_out_of_range():
    with pytest.raises(InvalidOption, match="k must be"):
        lost(seeded(6, 2), (2, 3), k=0)
    with pytest.raises(InvalidOption, match="eps"):
        tokencut(seeded(6, 2), (2, 3), eps=0)
    with pytest.raises(InvalidOption, match="2 patches"):
        discovery.suggest_biases(seeded(2, 1, 3))
    with pytest.raises(InvalidOption, match="IoU threshold"):
        discovery.corloc([(0, 0, 1, 1)], [torch.ones(1, 4)], threshold=5)
