"""Linear evaluation of frozen features: classification, semantic segmentation, depth.

One linear map is fitted to the training images and scored on the test images. Dense maps are scored patch by patch
and upsampled bilinearly to pixels. Patches learn the most common class (the mean depth) of their pixels, so the
numbers compare models under the same split; they are not those of benchmarks that train through the upsampling, with
augmentation and many epochs.

All intervals are at 95 % and over images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from vitrail._arguments import checked
from vitrail.analysis._inputs import (
    Array,
    as_features,
    as_frame,
    as_integers,
    as_labels,
    as_tensor,
    at_least_float32,
    check_count,
    chunks,
    patch_labels,
    patch_means,
)
from vitrail.analysis.probes.classes import classification_scores
from vitrail.analysis.probes.linear import PENALTIES, RIDGE_PENALTIES, LinearMap, fit_classifier, fit_regressor
from vitrail.analysis.result import Result
from vitrail.analysis.statistics import Interval, Split, bootstrap, ratio, subsample, wilson
from vitrail.errors import UnsupportedInput

MAX_PATCHES = 50_000
"""Default for the most patches that train a dense evaluation."""


class Classification(Result):
    """Linear classification of images, with Wilson's interval of the accuracy."""

    accuracy: float
    interval: Interval | None
    balanced_accuracy: float  # mean over the classes of the test part of the accuracy within each class
    majority: float  # accuracy of always predicting the most common class of the training part
    classes: int  # number of classes in the training part
    untested: list[int]  # classes of the training part that are not in the test part
    unknown: int  # test images of a class that is not in the training part; they count as wrong
    train_images: int
    test_images: int
    penalty: float


class Dense(Result, kw_only=True):
    """What segmentation and depth have in common; ``test_images`` are the test images with valid pixels."""

    interval: Interval | None
    train_patches: int
    test_images: int
    penalty: float


class Segmentation(Dense, kw_only=True):
    """Linear segmentation, with a bootstrap interval of the mIoU.

    Attributes:
        miou: mean over classes of intersection over union, from one confusion matrix of all test pixels. Classes that
            are neither in the test masks nor predicted are left out.
        confusion: (C, C) pixels by true class (rows) and predicted class (columns).
    """

    miou: float
    iou: list[float]  # by class; NaN for a class that is left out
    pixel_accuracy: float  # share of the test pixels that are right
    confusion: Tensor = field(compare=False, metadata={"json": False})


class Depth(Dense, kw_only=True):
    """Linear depth estimation, with a bootstrap interval of the RMSE."""

    rmse: float  # root mean squared error over all valid test pixels, in the unit of the depth
    rmse_by_image: float  # mean over images of each image's own RMSE, as many depth benchmarks report it
    constant_rmse: float  # RMSE of always predicting the mean depth of the training patches


@checked
@torch.no_grad()
def evaluate_classification(
    features: Array, labels: Array, split: Split, *, penalties: Sequence[float] = PENALTIES, seed: int = 0
) -> Classification:
    """Classify images by features (B, D) and labels (B,), integers from 0."""
    rows = as_features(features, "features", "B D")
    truth = as_labels(labels, len(rows)).cpu()
    split.check(len(rows))
    known, true = truth[split.train], truth[split.test]
    model = fit_classifier(rows[split.train.to(rows.device)], known, penalties=penalties, seed=seed)
    found = model.predict(rows[split.test.to(rows.device)]).cpu()
    accuracy, balanced, majority = classification_scores(found, true, known)
    return Classification(
        accuracy=accuracy,
        interval=wilson(float((found == true).sum()), len(true)),
        balanced_accuracy=balanced,
        majority=majority,
        classes=len(model.classes),
        untested=sorted(set(known.tolist()) - set(true.tolist())),
        unknown=int((~torch.isin(true, known)).sum()),
        train_images=len(known),
        test_images=len(true),
        penalty=model.penalty,
    )


@checked
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
    """Segment images from their patch tokens.

    Args:
        features: (B, P, D) patch tokens.
        masks: (B, H, W) class of each pixel, integers from 0; or (B, P) of each patch, then scored by patch.
        grid: (h, w), or (1, h, w).
        split: training and test images.
        ignore: pixels of this value neither train nor count.
        classes: number of classes; by default one more than the highest class in the masks.
        penalties: penalties that the classifier chooses from.
        max_patches: most training patches, drawn at random.
        seed: seed of that draw, of the held-out part for the penalty, and of the bootstrap.
    """
    truth = as_integers(masks, "masks", "B H W" if masks.ndim == 3 else "B P")
    rows, truth, shape, size = _match(features, truth, grid, split, "masks")
    valid = torch.ones_like(truth, dtype=torch.bool) if ignore is None else truth != ignore
    if not bool(valid.any()):
        raise UnsupportedInput(f"all pixels of the masks are {ignore}, the value to ignore")
    count = _count_classes(truth[valid], classes, ignore)
    labels = patch_labels(truth, shape, count, valid) if size else truth.masked_fill(~valid, -1)
    image, place = _training_patches(labels >= 0, split, max_patches, seed)
    model = fit_classifier(rows[image, place], labels[image, place], groups=image, penalties=penalties, seed=seed)
    confusion = torch.zeros(count, count, dtype=torch.long)
    sums = []
    for chosen, scores in _score_maps(model, rows, split.test, shape, size):
        found = model.classes[scores.argmax(1)]
        for index, guess in zip(chosen, found, strict=True):
            cells = (truth[index] * count + guess)[valid[index]]
            matrix = cells.bincount(minlength=count * count).reshape(count, count).cpu()
            confusion += matrix
            if len(cells):
                sums.append(_marginals(matrix))
    if not sums:
        raise UnsupportedInput("the test images have no pixel to score: all are to be ignored")
    total = _marginals(confusion)[None]
    return Segmentation(
        miou=float(_iou(total).nanmean(1)[0]),
        interval=bootstrap(torch.stack(sums), lambda drawn: _iou(drawn).nanmean(1), seed=seed),
        iou=_iou(total)[0].tolist(),
        pixel_accuracy=float(confusion.diagonal().sum() / confusion.sum()),
        confusion=confusion,
        train_patches=len(image),
        test_images=len(sums),
        penalty=model.penalty,
    )


@checked
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
        depth: (B, H, W) depth of each pixel, or (B, P) of each patch; values that are not finite and above 0 are
            invalid, and neither train nor count.
        penalties: penalties that ridge regression chooses from; ``[0.0]`` is plain linear regression.

    The other arguments are those of :func:`evaluate_segmentation`.
    """
    truth = at_least_float32(as_tensor(depth, "depth", "B H W" if depth.ndim == 3 else "B P"))
    rows, truth, shape, size = _match(features, truth, grid, split, "depth maps")
    valid = truth.isfinite() & (truth > 0)
    goals = patch_means(truth, shape, valid) if size else truth.double().masked_fill(~valid, torch.nan)
    image, place = _training_patches(~goals.isnan(), split, max_patches, seed)
    goal = goals[image, place]
    model = fit_regressor(rows[image, place], goal[:, None], groups=image, penalties=penalties, seed=seed)
    sums = []
    for chosen, scores in _score_maps(model, rows, split.test, shape, size):
        for index, guess in zip(chosen, scores[:, 0], strict=True):
            true = truth[index][valid[index]].double()
            error = (guess[valid[index]].double() - true).square().sum()
            constant = (goal.mean() - true).square().sum()
            sums.append(torch.stack([error, constant, true.new_tensor(len(true))]).cpu())
    by_image = torch.stack(sums)
    by_image = by_image[by_image[:, 2] > 0]
    if not len(by_image):
        raise UnsupportedInput("the test images have no valid depth: no value is finite and above 0")
    total = by_image.sum(0)
    return Depth(
        rmse=float((total[0] / total[2]).sqrt()),
        interval=bootstrap(by_image, lambda drawn: ratio(0, 2)(drawn).sqrt(), seed=seed),
        rmse_by_image=float((by_image[:, 0] / by_image[:, 2]).sqrt().mean()),
        constant_rmse=float((total[1] / total[2]).sqrt()),
        train_patches=len(image),
        test_images=len(by_image),
        penalty=model.penalty,
    )


def _match(
    features: Array, maps: Tensor, grid: tuple[int, ...], split: Split, name: str
) -> tuple[Tensor, Tensor, tuple[int, int], tuple[int, int] | None]:
    """Check that features and maps belong together; return both, and (h, w) in patches and in pixels.

    Maps of patches (B, P) have no size in pixels.
    """
    rows = as_features(features, "features", "B P D")
    shape = as_frame(grid, rows.shape[1])
    split.check(len(rows))
    size = None if maps.ndim == 2 else (maps.shape[1], maps.shape[2])
    fits = maps.shape == rows.shape[:2] if size is None else size[0] >= shape[0] and size[1] >= shape[1]
    if not fits or len(maps) != len(rows):
        raise UnsupportedInput(
            f"{name} of shape {tuple(maps.shape)} do not match features {tuple(rows.shape)} on a grid {shape}; "
            "expected (B, H, W) in pixels, at least as fine as the grid, or (B, P) in patches"
        )
    return rows, maps.to(rows.device), shape, size


def _training_patches(usable: Tensor, split: Split, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sample patches of the training images under a mask (B, P): their images and places."""
    check_count(most, "max_patches")
    images = split.train.to(usable.device)
    found = subsample(usable[images].nonzero(), most, seed)
    if not len(found):
        raise UnsupportedInput("no patch of the training images has a value to learn from; check maps and split")
    return images[found[:, 0]], found[:, 1]


def _score_maps(
    model: LinearMap, features: Tensor, images: Tensor, grid: tuple[int, int], size: tuple[int, int] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices (b,) and score maps (b, K, H, W) of a few images at a time; (b, K, P) without a size."""
    height, width = grid if size is None else size
    for part in chunks(len(images), max(len(model.bias) * height * width, features[0].numel())):
        chosen = images[part].to(features.device)
        scores = model.scores(features[chosen]).transpose(1, 2)  # (b, K, P)
        if size is not None:
            scores = interpolate(scores.unflatten(2, grid), size=size, mode="bilinear", align_corners=False)
        yield chosen, scores


def _count_classes(values: Tensor, classes: int | None, ignore: int | None) -> int:
    """Return the number of classes; raise for values that are no class."""
    low, high = int(values.min()), int(values.max())
    count = high + 1 if classes is None else check_count(classes, "classes", least=2)
    if low < 0 or high >= count:
        raise UnsupportedInput(
            f"the masks hold values from {low} to {high}; expected classes from 0 to {count - 1}, "
            f"or {ignore} for pixels to ignore"
        )
    return count


def _marginals(confusion: Tensor) -> Tensor:
    """Return what IoU needs of a confusion matrix (C, C): pixels (3C,) correct, predicted, and true, by class."""
    return torch.cat([confusion.diagonal(), confusion.sum(0), confusion.sum(1)]).double()


def _iou(sums: Tensor) -> Tensor:
    """Return the intersection over union (R, C) from such sums (R, 3C); NaN for a class that is nowhere."""
    right, predicted, true = sums.chunk(3, dim=1)
    return right / (predicted + true - right)
