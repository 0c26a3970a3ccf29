"""Frozen features put to use: linear classification, semantic segmentation and depth.

The features stay as they are; one linear map is fitted to the training pictures, and its errors on the test pictures
are counted. Dense maps are scored patch by patch and upsampled bilinearly to pixels. Patches learn the commonest class
(the mean depth) of their pixels, so figures compare models with each other, under the same split; they are not those of
benchmarks that train through the upsampling, with augmentation and many passes.

All intervals are at 95 % and over pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrail.analysis.dense_maps import check_maps, flat_grid, patch_labels, patch_means, score_maps
from vitrail.analysis.probes.inputs import Array, as_features, as_labels, as_tensor, as_whole, check_count
from vitrail.analysis.probes.linear import PENALTIES, RIDGE_PENALTIES, fit_classifier, fit_regressor
from vitrail.analysis.result import Result
from vitrail.analysis.statistics import Interval, Split, bootstrap, pick, ratio, wilson
from vitrail.errors import UnsupportedInput

MAX_PATCHES = 50_000
"""Default for the most patches that train a dense evaluation."""


@dataclass(frozen=True)
class Classification(Result):
    """Linear classification of pictures.

    Attributes:
        accuracy: share of the test pictures that are classified rightly.
        interval: Wilson's interval of the accuracy.
        balanced_accuracy: the same for each class by itself, averaged over the classes of the test part.
        majority: accuracy of always naming the commonest class of the training part.
        classes: number of classes in the training part.
        untested: classes of the training part that the test part has no picture of.
        unknown: test pictures of a class that the training part has not; they count as wrong.
        train_pictures: pictures that trained.
        test_pictures: pictures that tested.
        penalty: the penalty that was chosen.
    """

    accuracy: float
    interval: Interval | None
    balanced_accuracy: float
    majority: float
    classes: int
    untested: list[int]
    unknown: int
    train_pictures: int
    test_pictures: int
    penalty: float


@dataclass(frozen=True)
class Segmentation(Result):
    """Linear segmentation.

    Attributes:
        miou: mean over classes of intersection over union, from one confusion matrix of all test pixels. Classes that
            are neither in the test masks nor predicted are left out.
        interval: of the mIoU, by bootstrap over pictures.
        iou: by class; NaN for a class that was left out.
        pixel_accuracy: share of the test pixels that are right.
        confusion: (C, C) pixels by true class (rows) and predicted class (columns).
        train_patches: patches that trained.
        test_pictures: pictures with a pixel to score that tested.
        penalty: the penalty that was chosen.
    """

    miou: float
    interval: Interval | None
    iou: list[float]
    pixel_accuracy: float
    confusion: Tensor = field(compare=False, metadata={"json": False})
    train_patches: int
    test_pictures: int
    penalty: float


@dataclass(frozen=True)
class Depth(Result):
    """Linear estimation of depth.

    Attributes:
        rmse: root of the mean squared error over all valid test pixels, in the unit of the depth given.
        interval: of the RMSE, by bootstrap over pictures.
        rmse_by_picture: mean over pictures of each picture's own RMSE, which depth benchmarks often print.
        constant_rmse: RMSE of naming the mean depth of the training patches everywhere.
        train_patches: patches that trained.
        test_pictures: pictures with valid pixels that tested.
        penalty: the penalty that was chosen.
    """

    rmse: float
    interval: Interval | None
    rmse_by_picture: float
    constant_rmse: float
    train_patches: int
    test_pictures: int
    penalty: float


@torch.no_grad()
def evaluate_classification(
    features: Array, labels: Array, split: Split, *, penalties: Sequence[float] = PENALTIES, seed: int = 0
) -> Classification:
    """Classify pictures by features (B, D) and labels (B,), whole numbers from 0."""
    rows = as_features(features, "features", "B D")
    truth = as_labels(labels, len(rows)).cpu()
    split.check(len(rows))
    train, test = split.train.to(rows.device), split.test.to(rows.device)
    known, true = truth[split.train], truth[split.test]
    model = fit_classifier(rows[train], known, penalties=penalties, seed=seed)
    right = (model.predict(rows[test]).cpu() == true).double()
    recalls = torch.stack([right[true == label].mean() for label in true.unique()])
    return Classification(
        accuracy=float(right.mean()),
        interval=wilson(float(right.sum()), len(right)),
        balanced_accuracy=float(recalls.mean()),
        majority=float((true == known.bincount().argmax()).double().mean()),
        classes=len(model.classes),
        untested=sorted(set(known.tolist()) - set(true.tolist())),
        unknown=int((~torch.isin(true, known)).sum()),
        train_pictures=len(known),
        test_pictures=len(true),
        penalty=model.penalty,
    )


@torch.no_grad()
def evaluate_segmentation(
    features: Array,
    masks: Array,
    grid: tuple[int, ...],
    split: Split,
    *,
    ignore: int | None = 255,
    classes: int | None = None,
    penalties: Sequence[float] = PENALTIES,
    max_patches: int = MAX_PATCHES,
    seed: int = 0,
) -> Segmentation:
    """Label the pixels of pictures from their patch tokens.

    Args:
        features: (B, P, D) patch tokens.
        masks: (B, H, W) class of each pixel, whole numbers from 0; or (B, P) of each patch, then scored by patch.
        grid: (h, w), or (1, h, w).
        split: which pictures train and which test.
        ignore: pixels of this value neither train nor count.
        classes: number of classes; by default one more than the highest class in the masks.
        penalties: what the classifier chooses from.
        max_patches: most patches that train, drawn at random.
        seed: of that draw, of the slice held out for the penalty, and of the bootstrap.
    """
    rows = as_features(features, "features", "B P D")
    shape = flat_grid(grid, rows.shape[1])
    truth = as_whole(masks, "masks", "B H W" if masks.ndim == 3 else "B P").to(rows.device)
    size = check_maps(truth, rows, shape, "masks")
    split.check(len(rows))
    valid = torch.ones_like(truth, dtype=torch.bool) if ignore is None else truth != ignore
    if not bool(valid.any()):
        raise UnsupportedInput(f"all pixels of the masks are {ignore}, the value to ignore")
    count = _count_classes(truth[valid], classes, ignore)
    labels = patch_labels(truth, shape, count, valid) if size else truth.masked_fill(~valid, -1)
    picture, place = _training_patches(labels >= 0, split, max_patches, seed)
    model = fit_classifier(rows[picture, place], labels[picture, place], groups=picture, penalties=penalties, seed=seed)
    confusion = torch.zeros(count, count, dtype=torch.long)
    sums = []
    for chosen, scores in score_maps(model, rows, split.test, shape, size):
        found = model.classes[scores.argmax(1)]
        for index, guess in zip(chosen, found, strict=True):
            cells = (truth[index] * count + guess)[valid[index]]
            matrix = cells.bincount(minlength=count * count).reshape(count, count).cpu()
            confusion += matrix
            if len(cells):
                sums.append(_marginals(matrix))
    if not sums:
        raise UnsupportedInput("the test pictures have no pixel to score: the masks say to ignore all of them")
    total = _marginals(confusion)
    return Segmentation(
        miou=float(_mean_iou(total[None])[0]),
        interval=bootstrap(torch.stack(sums), _mean_iou, seed=seed),
        iou=_iou(total[None])[0].tolist(),
        pixel_accuracy=float(confusion.diagonal().sum() / confusion.sum()),
        confusion=confusion,
        train_patches=len(picture),
        test_pictures=len(sums),
        penalty=model.penalty,
    )


@torch.no_grad()
def evaluate_depth(
    features: Array,
    depth: Array,
    grid: tuple[int, ...],
    split: Split,
    *,
    penalties: Sequence[float] = RIDGE_PENALTIES,
    max_patches: int = MAX_PATCHES,
    seed: int = 0,
) -> Depth:
    """Estimate the depth of pixels from patch tokens.

    Args:
        features: (B, P, D) patch tokens.
        depth: (B, H, W) depth of each pixel, or (B, P) of each patch; values that are not above 0 (or NaN, or infinite)
            are not valid, and neither train nor count.
        grid: (h, w), or (1, h, w).
        split: which pictures train and which test.
        penalties: what ridge regression chooses from; ``[0.0]`` is plain linear regression.
        max_patches: most patches that train, drawn at random.
        seed: of that draw, of the slice held out for the penalty, and of the bootstrap.
    """
    rows = as_features(features, "features", "B P D")
    shape = flat_grid(grid, rows.shape[1])
    truth = as_tensor(depth, "depth", "B H W" if depth.ndim == 3 else "B P").to(rows.device)
    truth = truth if truth.dtype == torch.float64 else truth.float()
    size = check_maps(truth, rows, shape, "depth maps")
    split.check(len(rows))
    valid = truth.isfinite() & (truth > 0)
    goals = patch_means(truth, shape, valid) if size else truth.double().masked_fill(~valid, torch.nan)
    picture, place = _training_patches(~goals.isnan(), split, max_patches, seed)
    goal = goals[picture, place]
    model = fit_regressor(rows[picture, place], goal[:, None], groups=picture, penalties=penalties, seed=seed)
    sums = []
    for chosen, scores in score_maps(model, rows, split.test, shape, size):
        for index, guess in zip(chosen, scores[:, 0], strict=True):
            true = truth[index][valid[index]].double()
            error = (guess[valid[index]].double() - true).square().sum()
            constant = (goal.mean() - true).square().sum()
            sums.append(torch.stack([error, constant, true.new_tensor(len(true))]).cpu())
    by_picture = torch.stack(sums)
    by_picture = by_picture[by_picture[:, 2] > 0]
    if not len(by_picture):
        raise UnsupportedInput("the test pictures have no valid depth: every value is NaN, infinite, or not above 0")
    total = by_picture.sum(0)
    return Depth(
        rmse=float((total[0] / total[2]).sqrt()),
        interval=bootstrap(by_picture, lambda drawn: ratio(0, 2)(drawn).sqrt(), seed=seed),
        rmse_by_picture=float((by_picture[:, 0] / by_picture[:, 2]).sqrt().mean()),
        constant_rmse=float((total[1] / total[2]).sqrt()),
        train_patches=len(picture),
        test_pictures=len(by_picture),
        penalty=model.penalty,
    )


def _training_patches(usable: Tensor, split: Split, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw patches of the training pictures under a mask (B, P): their pictures and places."""
    check_count(most, "max_patches")
    pictures = split.train.to(usable.device)
    found = pick(usable[pictures].nonzero(), most, seed)
    if not len(found):
        raise UnsupportedInput("no patch of the training pictures has a value to learn from; check masks and split")
    return pictures[found[:, 0]], found[:, 1]


def _count_classes(values: Tensor, classes: int | None, ignore: int | None) -> int:
    """Give the number of classes; refuse masks with values that are no class."""
    low, high = int(values.min()), int(values.max())
    count = high + 1 if classes is None else check_count(classes, "classes", least=2)
    if low < 0 or high >= count:
        raise UnsupportedInput(
            f"the masks hold values from {low} to {high}; expected classes from 0 to {count - 1}, "
            f"or {ignore} for pixels to ignore"
        )
    return count


def _marginals(confusion: Tensor) -> Tensor:
    """Give what mIoU needs of a confusion matrix (C, C): pixels (3C,) rightly named, predicted, and true, by class."""
    return torch.cat([confusion.diagonal(), confusion.sum(0), confusion.sum(1)]).double()


def _iou(sums: Tensor) -> Tensor:
    """Intersection over union (R, C) from such sums (R, 3C); NaN for a class that is nowhere."""
    right, predicted, true = sums.chunk(3, dim=1)
    return right / (predicted + true - right)


def _mean_iou(sums: Tensor) -> Tensor:
    """Give the mean (R,) over the classes that are somewhere."""
    return _iou(sums).nanmean(1)
