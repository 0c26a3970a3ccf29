"""Linear evaluation: planted answers, and loops over every pixel."""

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

from vitrail.analysis._inputs import patch_labels, patch_means
from vitrail.analysis.downstream import evaluate_classification, evaluate_depth, evaluate_segmentation
from vitrail.analysis.probes.linear import fit_classifier, fit_regressor
from vitrail.analysis.statistics import Split, split_images
from vitrail.errors import InvalidOption, UnsupportedInput

HALVES = Split(range(20), range(20, 40))


def pixels_of(values: Tensor, valid: Tensor, patch: int) -> list[float]:
    """The valid pixels of one of 5 × 3 patches, whose sides do not divide 17 × 11."""
    places = [(y, x) for y in range(17) for x in range(11) if (y * 5 // 17) * 3 + x * 3 // 11 == patch]
    return [values[place].item() for place in places if valid[place]]


class TestClassification:
    def test_planted_label(self) -> None:
        labels = torch.arange(5).repeat(20)
        features = one_hot(labels, 8).float() * 3 + 0.1 * torch.randn(100, 8)
        result = evaluate_classification(features.half(), labels, split_images(100, labels=labels))
        assert result.accuracy == result.balanced_accuracy == 1.0
        assert result.interval == pytest.approx((0.8865, 1.0), abs=1e-4)
        assert result.majority == pytest.approx(0.2)
        assert (result.classes, result.untested, result.unknown) == (5, [], 0)
        assert (result.train_images, result.test_images) == (70, 30)
        assert json.loads(json.dumps(result.to_dict()))["accuracy"] == 1.0

    def test_noise_is_chance(self) -> None:
        labels = torch.arange(4).repeat(100)
        result = evaluate_classification(torch.randn(400, 16), labels, split_images(400, labels=labels))
        assert result.interval is not None
        assert result.interval[0] < 0.25 < result.interval[1]

    def test_imbalance_is_seen(self) -> None:
        """Noise has the accuracy of the most common class; balanced accuracy shows it."""
        labels = (torch.arange(400) % 10 == 0).long()
        result = evaluate_classification(torch.randn(400, 4), labels, split_images(400, labels=labels))
        assert result.accuracy == pytest.approx(0.9, abs=0.03)
        assert result.majority == pytest.approx(0.9)
        assert result.balanced_accuracy == pytest.approx(0.5, abs=0.06)

    def test_classes_missing_on_one_side(self) -> None:
        labels = torch.tensor([0, 1, 2] * 10 + [0, 1, 7] * 5)
        features = one_hot(labels, 8).float()
        result = evaluate_classification(features, labels, Split(range(30), range(30, 45)))
        assert (result.untested, result.unknown) == ([2], 5)
        assert result.accuracy == pytest.approx(2 / 3)
        assert result.balanced_accuracy == pytest.approx(2 / 3)

    def test_errors(self) -> None:
        features, labels = torch.randn(40, 3), torch.arange(40) % 2
        with pytest.raises(UnsupportedInput, match="all 40 labels are 1"):
            evaluate_classification(features, torch.ones(40).long(), HALVES)
        with pytest.raises(UnsupportedInput, match="all 20 labels are 0"):
            evaluate_classification(features, (torch.arange(40) > 19).long(), HALVES)
        with pytest.raises(UnsupportedInput, match="3 of 40 vectors in features"):
            evaluate_classification(features.index_fill(0, torch.arange(3), math.nan), labels, HALVES)
        with pytest.raises(UnsupportedInput, match="40 of 40 labels are negative"):
            evaluate_classification(features, labels - 2, HALVES)
        with pytest.raises(UnsupportedInput, match=r"labels: shape .39,. given; expected .40."):
            evaluate_classification(features, labels[:-1], HALVES)
        with pytest.raises(InvalidOption, match="index 99"):
            evaluate_classification(features, labels, Split([0, 1], [99]))


def scene(
    images: int = 40, grid: tuple[int, int] = (4, 6), size: tuple[int, int] = (16, 24), classes: int = 3
) -> tuple[Tensor, Tensor]:
    """Noisy features of random blocks of classes, and masks of them with some pixels to ignore."""
    labels = torch.randint(classes, (images, grid[0] * grid[1]))
    features = one_hot(labels, classes).float() + 0.3 * torch.randn(*labels.shape, classes)
    masks = interpolate(labels.reshape(images, 1, *grid).float(), size=size, mode="nearest")[:, 0].long()
    masks[torch.rand(masks.shape) < 0.1] = 255
    return features, masks


class TestSegmentation:
    def test_equals_a_loop_over_pixels(self) -> None:
        features, masks = scene()
        masks[3] = 255
        masks[25] = 255
        result = evaluate_segmentation(features, masks, (4, 6), HALVES, penalties=[1e-2])

        rows, labels, groups = [], [], []
        for b in range(20):
            for p in range(24):
                y, x = p // 6 * 4, p % 6 * 4
                pixels = masks[b, y : y + 4, x : x + 4]
                pixels = pixels[pixels != 255]
                if len(pixels):
                    rows.append(features[b, p])
                    labels.append(int(pixels.bincount().argmax()))
                    groups.append(b)
        model = fit_classifier(torch.stack(rows), torch.tensor(labels), groups=torch.tensor(groups), penalties=[1e-2])
        inter, union = [0, 0, 0], [0, 0, 0]
        confusion = torch.zeros(3, 3, dtype=torch.long)
        for b in range(20, 40):
            scores = model.scores(features[b]).T.reshape(1, 3, 4, 6)
            found = interpolate(scores, size=(16, 24), mode="bilinear", align_corners=False)[0].argmax(0)
            for y in range(16):
                for x in range(24):
                    true, guess = int(masks[b, y, x]), int(found[y, x])
                    if true == 255:
                        continue
                    confusion[true, guess] += 1
                    for c in range(3):
                        inter[c] += true == c and guess == c
                        union[c] += true == c or guess == c
        assert result.train_patches == len(rows)
        assert result.test_images == 19
        assert torch.equal(result.confusion, confusion)
        assert result.iou == pytest.approx([i / u for i, u in zip(inter, union, strict=True)])
        assert result.miou == pytest.approx(sum(i / u for i, u in zip(inter, union, strict=True)) / 3)
        assert result.pixel_accuracy == pytest.approx(float(confusion.trace() / confusion.sum()))
        assert result.interval is not None
        assert result.interval[0] < result.miou < result.interval[1]
        assert "confusion" not in result.to_dict()

    def test_patch_masks_are_scored_by_patch(self) -> None:
        labels = torch.randint(3, (40, 24))
        result = evaluate_segmentation(one_hot(labels, 3).float().half(), labels, (1, 4, 6), HALVES)
        assert result.miou == 1.0
        assert int(result.confusion.sum()) == 20 * 24

    def test_one_large_region_is_perfect_up_to_its_edges(self) -> None:
        left = (torch.arange(24) % 6 < 3).long().expand(40, 24)
        masks = (torch.arange(24) < 12).long().expand(40, 16, 24)
        assert evaluate_segmentation(one_hot(left, 2).float(), masks, (4, 6), HALVES).miou == 1.0

    def test_an_absent_class_does_not_count(self) -> None:
        features, masks = scene()
        masks[20:][masks[20:] == 2] = 255
        features[20:, :, 2] = -5
        result = evaluate_segmentation(features, masks, (4, 6), HALVES, classes=5)
        values = result.iou
        assert [math.isnan(value) for value in values] == [False, False, True, True, True]
        assert result.miou == pytest.approx(sum(values[:2]) / 2)
        assert result.to_dict()["iou"][2:] == [None, None, None]

    def test_a_class_that_only_tests_counts_as_missed(self) -> None:
        features, masks = scene(classes=4)
        masks[:20][masks[:20] == 3] = 255
        assert evaluate_segmentation(features, masks, (4, 6), HALVES).iou[3] == 0

    def test_sizes_that_do_not_divide(self) -> None:
        masks, valid = torch.randint(4, (3, 17, 11)), torch.rand(3, 17, 11) > 0.3
        valid[1] = False
        found = patch_labels(masks, (5, 3), 4, valid)
        for b in range(3):
            for p in range(15):
                pixels = pixels_of(masks[b], valid[b], p)
                want = min((-pixels.count(c), c) for c in pixels)[1] if pixels else -1
                assert found[b, p] == want

    def test_chunks_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        features, masks = scene()
        whole = evaluate_segmentation(features, masks, (4, 6), HALVES)
        monkeypatch.setattr("vitrail.analysis._inputs.CHUNK", 3000)
        assert torch.equal(whole.confusion, evaluate_segmentation(features, masks, (4, 6), HALVES).confusion)

    def test_max_patches(self) -> None:
        features, masks = scene()
        assert evaluate_segmentation(features, masks, (4, 6), HALVES, max_patches=100).train_patches == 100

    def test_numpy(self) -> None:
        features, masks = scene()
        result = evaluate_segmentation(features.numpy(), masks.numpy().astype(np.uint8), (4, 6), HALVES)
        assert result == evaluate_segmentation(features, masks, (4, 6), HALVES)

    def test_errors(self) -> None:
        features, masks = scene()
        with pytest.raises(UnsupportedInput, match="hold values from 0 to 255"):
            evaluate_segmentation(features, masks, (4, 6), HALVES, ignore=None, classes=3)
        with pytest.raises(UnsupportedInput, match="values from -1 to 2"):
            evaluate_segmentation(features, masks.where(masks != 255, -1), (4, 6), HALVES)
        with pytest.raises(UnsupportedInput, match="all pixels of the masks are 255"):
            evaluate_segmentation(features, torch.full_like(masks, 255), (4, 6), HALVES)
        with pytest.raises(UnsupportedInput, match="labels are 0; a classifier needs two"):
            evaluate_segmentation(features, masks.clamp_max(0), (4, 6), HALVES)
        with pytest.raises(UnsupportedInput, match="test images have no pixel"):
            evaluate_segmentation(features, masks.index_fill(0, torch.arange(20, 40), 255), (4, 6), HALVES)
        with pytest.raises(UnsupportedInput, match="got 24 tokens"):
            evaluate_segmentation(features, masks, (5, 6), HALVES)
        with pytest.raises(UnsupportedInput, match="2 frames"):
            evaluate_segmentation(features, masks, (2, 4, 3), HALVES)
        with pytest.raises(UnsupportedInput, match="do not match"):
            evaluate_segmentation(features, masks[:, :3], (4, 6), HALVES)
        with pytest.raises(UnsupportedInput, match="do not match"):
            evaluate_segmentation(features, masks[1:], (4, 6), HALVES)
        with pytest.raises(UnsupportedInput, match="24 of 960 vectors"):
            evaluate_segmentation(features.index_fill(0, torch.tensor([1]), math.inf), masks, (4, 6), HALVES)


class TestDepth:
    def planted(self) -> tuple[Tensor, Tensor]:
        """A ramp of depth that the features hold linearly, with noise and invalid values of each sort."""
        features = torch.randn(40, 24, 5)
        coarse = 3 + 0.4 * features[..., 0].reshape(40, 1, 4, 6)
        depth = interpolate(coarse, size=(16, 24), mode="bilinear")[:, 0] + 0.05 * torch.randn(40, 16, 24)
        depth[torch.rand(depth.shape) < 0.05] = math.nan
        depth[torch.rand(depth.shape) < 0.05] = 0
        depth[torch.rand(depth.shape) < 0.05] = -1
        depth[30] = 0
        return features, depth

    def test_equals_a_loop_over_pixels(self) -> None:
        features, depth = self.planted()
        result = evaluate_depth(features, depth, (4, 6), HALVES, penalties=[1e-3])
        rows, goals = [], []
        for b in range(20):
            for p in range(24):
                y, x = p // 6 * 4, p % 6 * 4
                pixels = [float(v) for v in depth[b, y : y + 4, x : x + 4].flatten() if v > 0]
                if pixels:
                    rows.append(features[b, p])
                    goals.append(sum(pixels) / len(pixels))
        model = fit_regressor(torch.stack(rows), torch.tensor(goals)[:, None], penalties=[1e-3])
        total, count, roots, constant = 0.0, 0, [], 0.0
        for b in range(20, 40):
            scores = model.scores(features[b]).T.reshape(1, 1, 4, 6)
            found = interpolate(scores, size=(16, 24), mode="bilinear", align_corners=False)[0, 0]
            squares = []
            for y in range(16):
                for x in range(24):
                    if depth[b, y, x] > 0:
                        squares.append(float(found[y, x] - depth[b, y, x]) ** 2)
                        constant += (sum(goals) / len(goals) - float(depth[b, y, x])) ** 2
            total, count = total + sum(squares), count + len(squares)
            if squares:
                roots.append(math.sqrt(sum(squares) / len(squares)))
        assert result.rmse == pytest.approx(math.sqrt(total / count), rel=1e-5)
        assert result.rmse_by_image == pytest.approx(sum(roots) / len(roots), rel=1e-5)
        assert result.constant_rmse == pytest.approx(math.sqrt(constant / count), rel=1e-5)
        assert result.test_images == len(roots) == 19
        assert result.train_patches == len(rows)
        assert result.interval is not None
        assert result.interval[0] < result.rmse < result.interval[1]
        assert result.rmse < 0.12 < result.constant_rmse

    @pytest.mark.parametrize("penalties", [[0.0], [1e-4, 1.0]])
    def test_depth_by_patch(self, penalties: list[float]) -> None:
        features = torch.randn(40, 24, 5)
        depth = features[..., 0] + 10
        result = evaluate_depth(features.half(), depth, (4, 6), HALVES, penalties=penalties)
        assert result.rmse == pytest.approx(0, abs=2e-3)
        assert json.loads(json.dumps(result.to_dict()))["train_patches"] == 480

    def test_noise_is_no_better_than_a_constant(self) -> None:
        result = evaluate_depth(torch.randn(40, 24, 5), torch.rand(40, 24) + 1, (4, 6), HALVES)
        assert result.rmse == pytest.approx(result.constant_rmse, rel=0.02)

    def test_means_of_patches_that_do_not_divide(self) -> None:
        maps, valid = torch.rand(2, 17, 11), torch.rand(2, 17, 11) > 0.3
        maps[~valid] = math.nan
        valid[0, :6] = False
        found = patch_means(maps, (5, 3), valid)
        for b in range(2):
            for p in range(15):
                pixels = pixels_of(maps[b], valid[b], p)
                want = sum(pixels) / len(pixels) if pixels else math.nan
                assert float(found[b, p]) == pytest.approx(want, nan_ok=True)

    def test_integer_millimeters(self) -> None:
        features, depth = self.planted()
        millimeters = (depth.nan_to_num(0).clamp_min(0) * 1000).short()
        result = evaluate_depth(features.numpy(), millimeters.numpy().astype(np.uint16), (4, 6), HALVES)
        assert result.rmse == pytest.approx(1000 * evaluate_depth(features, depth, (4, 6), HALVES).rmse, rel=0.01)

    def test_errors(self) -> None:
        features, depth = self.planted()
        with pytest.raises(UnsupportedInput, match="no patch of the training images"):
            evaluate_depth(features, torch.zeros_like(depth), (4, 6), HALVES)
        with pytest.raises(UnsupportedInput, match="no valid depth"):
            evaluate_depth(features, depth.index_fill(0, torch.arange(20, 40), math.nan), (4, 6), HALVES)
