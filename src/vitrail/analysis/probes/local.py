"""Position and pixel probes: does a patch token still hold its position, and the pixels of its patch?

Darcet et al. (2024) read artifact tokens by linear probes. Their outliers have lost local information: position is
found less often (22.8 % against 41.7 % in DINOv2 ViT-g) and pixels are reconstructed worse. The class probe measures
whether they hold global information instead.

All tokens of one image are in the training part or all in the test part of a split. A score needs enough tokens of a
kind in each test part; otherwise it has a note with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from vitrail.analysis._inputs import as_features, as_mask, as_patches, check_count, check_share
from vitrail.analysis.probes.linear import fit_classifier, fit_regressor
from vitrail.analysis.result import Result
from vitrail.analysis.statistics import Estimate, Split, Statistic, bootstrap, ratio, split_images, subsample
from vitrail.errors import InvalidOption, UnsupportedInput

LEAST_TOKENS = 30
"""Tokens of a kind that each test part (and the training part) needs."""

LEAST_IMAGES = 5
"""Images that these tokens must come from."""

MAX_TOKENS = 20_000
"""Default for the most tokens that train a probe, and for the most of each kind that test it."""

TrainOn = Literal["all", "normal", "own"]


@dataclass(frozen=True)
class PositionScore(Result):
    """Score of the position probe for one kind of token.

    Attributes:
        tokens: tokens in the smallest test part.
        pictures: images that these come from.
        accuracy: share of tokens whose position among all patches is found.
        distance: mean distance between predicted and true position, in patches.
        note: why there is no score.
    """

    tokens: int
    pictures: int
    accuracy: Estimate | None = None
    distance: Estimate | None = None
    note: str | None = None


@dataclass(frozen=True)
class PositionProbe(Result):
    """Position from a single token, for ``"normal"`` and ``"outlier"`` tokens.

    Attributes:
        kinds: the score of each kind.
        grid: (t, h, w) of the patches.
        chance_accuracy: accuracy of a random guess.
        chance_distance: mean distance of a random guess.
        trained_on: tokens that trained the probe: ``"all"``, ``"normal"``, or each kind's ``"own"``.
        train_tokens: tokens that trained it, in the smallest training part.
        seeds: number of splits.
    """

    kinds: dict[str, PositionScore]
    grid: tuple[int, int, int]
    chance_accuracy: float
    chance_distance: float
    trained_on: str
    train_tokens: int
    seeds: int


@dataclass(frozen=True)
class PixelScore(Result):
    """Score of the pixel probe for one kind of token.

    Attributes:
        tokens: tokens in the smallest test part.
        pictures: images that these come from.
        l2: mean over patches of ‖pixels − reconstruction‖, in the unit of the pixels.
        r2: explained share of the variance: 1 − squared errors / squared distances from the mean patch of the same
            kind. Outliers often are on uniform ground, whose pixels are easy; this score allows for that. None if all
            patches of the kind are equal.
        note: why there is no score.
    """

    tokens: int
    pictures: int
    l2: Estimate | None = None
    r2: Estimate | None = None
    note: str | None = None


@dataclass(frozen=True)
class PixelProbe(Result):
    """Pixels from a single token; fields as in :class:`PositionProbe`."""

    kinds: dict[str, PixelScore]
    trained_on: str
    train_tokens: int
    seeds: int


def cut_patches(images: Tensor, patch: int | tuple[int, int]) -> Tensor:
    """Cut images (B, C, H, W) into patches (B, P, C·p·p), row by row as a ViT does.

    >>> cut_patches(torch.zeros(2, 3, 28, 42), 14).shape
    torch.Size([2, 6, 588])
    """
    height, width = (patch, patch) if isinstance(patch, int) else patch
    if images.ndim != 4 or min(height, width) < 1 or images.shape[2] % height or images.shape[3] % width:
        raise UnsupportedInput(
            f"images of shape {tuple(images.shape)} do not divide into patches of {height}×{width} pixels; "
            "expected (B, C, H, W) as the model sees them, padded or resized to whole patches"
        )
    rows = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, h, p, w, p)
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


@torch.no_grad()
def probe_positions(
    tokens: Tensor,
    outliers: Tensor,
    grid: tuple[int, ...],
    *,
    train_on: TrainOn = "all",
    seed: int = 0,
    seeds: int = 3,
    test_share: float = 0.3,
    max_tokens: int = MAX_TOKENS,
) -> PositionProbe:
    """Predict the position of single patch tokens by logistic regression.

    ``train_on="all"`` is the paper's probe: trained on all patch tokens, scored for normal and outlier tokens
    separately. It may fail on rare outliers because they look different, not because they hold no position;
    ``"own"`` trains a probe for each kind to rule that out. ``"normal"`` trains on normal tokens only, and shows how
    far outliers follow the code of the others.

    Args:
        tokens: (B, P, D) patch tokens, without class and register tokens.
        outliers: (B, P) bool mask of the outliers.
        grid: (h, w) or (t, h, w).
        train_on: tokens of the training images that train the probe.
        seed: seed of the first split; each further split takes the next one.
        seeds: number of splits.
        test_share: share of the test images.
        max_tokens: most tokens that train (a random sample of all kinds), and most of each kind that test.
    """
    tokens, shape = as_patches(tokens, grid, "tokens")
    if tokens.shape[1] < 2:
        raise UnsupportedInput("a grid of one patch has only one position; there is nothing to probe")
    places = torch.cartesian_prod(*(torch.arange(n, device=tokens.device) for n in shape)).double()

    def fit(rows: Tensor, image: Tensor, place: Tensor, seed: int) -> _Score:
        only = place.unique()  # outliers that are all in one place need no classifier
        model = fit_classifier(rows, place, groups=image, seed=seed) if len(only) > 1 else None

        def score(rows: Tensor, _: Tensor, true: Tensor) -> Tensor:
            """Return (hit, distance, 1) for each token."""
            found = only.expand(len(rows)) if model is None else model.predict(rows)
            distance = (places[found] - places[true]).norm(dim=1)
            return torch.stack([(found == true).double(), distance, torch.ones_like(distance)], 1)

        return score

    mask = as_mask(outliers, tokens)
    numbers = range(seed, seed + check_count(seeds, "seeds"))
    tallies, trained = _run(tokens, mask, fit, train_on, numbers, test_share, max_tokens)
    kinds = {
        kind: PositionScore(tally.tokens, tally.images, tally.mean(0), tally.mean(1), tally.note)
        for kind, tally in tallies.items()
    }
    return PositionProbe(kinds, shape, 1 / len(places), _chance_distance(shape), train_on, trained, seeds)


@torch.no_grad()
def probe_pixels(
    tokens: Tensor,
    outliers: Tensor,
    patches: Tensor,
    *,
    train_on: TrainOn = "all",
    seed: int = 0,
    seeds: int = 3,
    test_share: float = 0.3,
    max_tokens: int = MAX_TOKENS,
) -> PixelProbe:
    """Reconstruct the pixels of single patches from their tokens by ridge regression.

    Args:
        tokens: (B, P, D) patch tokens, without class and register tokens.
        outliers: (B, P) bool mask of the outliers.
        patches: (B, P, K) pixels of each patch (:func:`cut_patches`), in the unit that the error should have.

    The other arguments are those of :func:`probe_positions`.
    """
    tokens = as_features(tokens, "tokens", "B P D")
    pixels = as_features(patches, "patches", "B P K").to(tokens.device)
    if pixels.shape[:2] != tokens.shape[:2]:
        raise UnsupportedInput(
            f"got patches {tuple(pixels.shape[:2])} and tokens {tuple(tokens.shape[:2])}; expected one patch per token"
        )

    def fit(rows: Tensor, image: Tensor, place: Tensor, seed: int) -> _Score:
        model = fit_regressor(rows, pixels[image, place], groups=image, seed=seed)

        def score(rows: Tensor, image: Tensor, place: Tensor) -> Tensor:
            """Return (squared error, squared distance from the mean patch, error, 1) for each token."""
            true = pixels[image, place].to(model.bias)
            error = (model.scores(rows) - true).double().square().sum(1)
            spread = (true - true.mean(0)).double().square().sum(1)
            return torch.stack([error, spread, error.sqrt(), torch.ones_like(error)], 1)

        return score

    mask = as_mask(outliers, tokens)
    numbers = range(seed, seed + check_count(seeds, "seeds"))
    tallies, trained = _run(tokens, mask, fit, train_on, numbers, test_share, max_tokens)
    kinds = {}
    for kind, tally in tallies.items():
        r2 = tally.estimate(lambda sums: 1 - sums[:, 0] / sums[:, 1])
        kinds[kind] = PixelScore(tally.tokens, tally.images, tally.mean(2), r2, tally.note)
    return PixelProbe(kinds, train_on, trained, seeds)


def _chance_distance(grid: tuple[int, int, int]) -> float:
    """Return the mean distance between two random positions, from how often each offset occurs along each axis."""
    weights = torch.ones(1, 1, 1, dtype=torch.float64)
    square = torch.zeros(1, 1, 1, dtype=torch.float64)
    for axis, length in enumerate(grid):
        offsets = torch.arange(length, dtype=torch.float64)
        share = torch.where(offsets > 0, 2.0, 1.0) * (length - offsets) / length**2
        shape = [-1 if other == axis else 1 for other in range(3)]
        weights = weights * share.reshape(shape)
        square = square + offsets.square().reshape(shape)
    return float((weights * square.sqrt()).sum())


_Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From tokens (n, D), their images (n,) and their places (n,) to values (n, K); the last column is 1."""

_Fit = Callable[[Tensor, Tensor, Tensor, int], _Score]
"""From such rows and a seed to the score of a fitted probe."""


@dataclass
class _Tally:
    """Values of one kind of token, summed by image over all splits, and by split.

    Attributes:
        tokens: tokens in the smallest test part, before subsampling.
        images: images in the smallest test part that have such tokens.
        note: why nothing is measured.
    """

    tokens: int
    images: int
    note: str | None = None
    by_image: Tensor | None = None
    by_split: list[Tensor] = field(default_factory=list)

    def add(self, values: Tensor, images: Tensor, count: int) -> None:
        """Add the values (n, K) of one split; on the CPU, where the order of the sum is always the same."""
        values = values.double().cpu()
        if self.by_image is None:
            self.by_image = torch.zeros(count, values.shape[1], dtype=torch.float64)
        self.by_image.index_add_(0, images.cpu(), values)
        self.by_split.append(values.sum(0))

    def estimate(self, statistic: Statistic) -> Estimate | None:
        """Return a statistic of the sums, with its deviation over splits and its interval over images."""
        if self.by_image is None:
            return None
        values = statistic(torch.stack(self.by_split))
        if not bool(values.isfinite().all()):
            return None
        seen = self.by_image[:, -1] > 0
        return Estimate.of(values.tolist(), bootstrap(self.by_image[seen], statistic))

    def mean(self, column: int) -> Estimate | None:
        """Return the mean of one value over tokens."""
        return self.estimate(ratio(column, -1))


def _run(
    tokens: Tensor, outliers: Tensor, fit: _Fit, train_on: TrainOn, seeds: range, test_share: float, most: int
) -> tuple[dict[str, _Tally], int]:
    """Fit and score probes on tokens (B, P, D); return tallies by kind, and the least number of training tokens."""
    if train_on not in get_args(TrainOn):
        raise InvalidOption(f"train_on must be one of {', '.join(get_args(TrainOn))}; got {train_on!r}")
    check_count(most, "max_tokens", least=LEAST_TOKENS)
    check_share(test_share, "test_share")
    masks = {"normal": ~outliers, "outlier": outliers}
    train_masks = {"all": torch.ones_like(outliers), **masks}
    least = next(count for count in itertools.count(LEAST_IMAGES + 2) if round(test_share * count) >= LEAST_IMAGES)
    if len(tokens) < least:
        note = f"at least {least} images are needed, to leave {LEAST_IMAGES} for testing; got {len(tokens)}"
        return {kind: _Tally(int(mask.sum()), int(mask.any(1).sum()), note) for kind, mask in masks.items()}, 0

    def sample(mask: Tensor, images: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sample tokens under a mask from some images: tokens (n, D), their images and their places."""
        images = images.to(tokens.device)
        found = subsample(mask[images].nonzero(), most, seed)
        image, place = images[found[:, 0]], found[:, 1]
        return tokens[image, place], image, place

    splits = {seed: split_images(len(tokens), test_share=test_share, seed=seed) for seed in seeds}
    tallies = {kind: _count_tests(kind, mask, splits.values()) for kind, mask in masks.items()}
    fitted: dict[tuple[str, int], _Score] = {}
    trained = []
    for kind, tally in tallies.items():
        source = kind if train_on == "own" else train_on
        train_mask = train_masks[source]
        count = min(int(train_mask[split.train.to(train_mask.device)].sum()) for split in splits.values())
        if tally.note is None and count < LEAST_TOKENS:
            tally.note = f"only {count} tokens to train the probe on; at least {LEAST_TOKENS} are needed"
        if tally.note is not None:
            continue
        trained.append(min(count, most))
        for seed, split in splits.items():
            if (source, seed) not in fitted:
                fitted[source, seed] = fit(*sample(train_mask, split.train, seed), seed)
            rows = sample(masks[kind], split.test, seed)
            tally.add(fitted[source, seed](*rows), rows[1], len(tokens))
    return tallies, min(trained, default=0)


def _count_tests(kind: str, mask: Tensor, splits: Collection[Split]) -> _Tally:
    """Count a kind's tokens in the test parts, with a note if there are too few."""
    parts = [mask[split.test.to(mask.device)] for split in splits]
    tokens, images = min(int(part.sum()) for part in parts), min(int(part.any(1).sum()) for part in parts)
    note = None
    if not bool(mask.any()):
        note = f"there are no {kind} tokens"
    elif tokens < LEAST_TOKENS or images < LEAST_IMAGES:
        note = (
            f"only {tokens} {kind} tokens from {images} images to test on; "
            f"at least {LEAST_TOKENS} from {LEAST_IMAGES} are needed"
        )
    return _Tally(tokens, images, note)
