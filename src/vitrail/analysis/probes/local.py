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
from typing import Generic, Literal, TypedDict, TypeVar, Unpack, get_args

import torch
from torch import Tensor

from vitrail._arguments import fitting
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
S = TypeVar("S", bound="Score")


class Options(TypedDict, total=False):
    """Options that both probes have; see :func:`probe_positions`."""

    train_on: TrainOn
    seed: int
    seeds: int
    test_share: float
    max_tokens: int


class Score(Result):
    """Tokens of one kind in the smallest test part, the images that they come from, and why there is no score."""

    tokens: int
    images: int
    note: str | None


class PositionScore(Score):
    """Share of tokens whose position is found, and mean distance between predicted and true position in patches."""

    accuracy: Estimate | None
    distance: Estimate | None


class PixelScore(Score):
    """Reconstruction of pixels.

    Attributes:
        r2: explained share of the variance: 1 − squared errors / squared distances from the mean patch of the same
            kind. Outliers often are on uniform ground, whose pixels are easy; this score allows for that. None if all
            patches of the kind are equal.
    """

    l2: Estimate | None  # mean over patches of ‖pixels − reconstruction‖, in the unit of the pixels
    r2: Estimate | None


class LocalProbe(Result, Generic[S]):
    """Scores of ``"normal"`` and ``"outlier"`` tokens over ``seeds`` splits, and what trained the probe.

    ``train_tokens`` is the number of tokens in the smallest training part.
    """

    kinds: dict[str, S]
    trained_on: str
    train_tokens: int
    seeds: int


class PixelProbe(LocalProbe[PixelScore]):
    """Pixels from a single token."""


class PositionProbe(LocalProbe[PositionScore]):
    """Position from a single token, and what a random guess scores."""

    grid: tuple[int, int, int]
    chance_accuracy: float
    chance_distance: float


@fitting
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


@fitting
@torch.no_grad()
def probe_positions(
    tokens: Tensor, outliers: Tensor, grid: tuple[int, ...], **options: Unpack[Options]
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
        seed: seed of the first split, 0 by default; each further split takes the next one.
        seeds: number of splits, 3 by default.
        test_share: share of the test images, 0.3 by default.
        max_tokens: most tokens that train (a random sample of all kinds), and most of each kind that test; by default
            20,000.
    """
    tokens, shape = as_patches(tokens, grid, "tokens")
    if tokens.shape[1] < 2:
        raise UnsupportedInput("a grid of one patch has only one position; there is nothing to probe")
    places = torch.cartesian_prod(*(torch.arange(n, device=tokens.device) for n in shape)).double()

    def fit(rows: Tensor, image: Tensor, place: Tensor, seed: int) -> _Scores:
        only = place.unique()  # outliers that are all in one place need no classifier
        model = fit_classifier(rows, place, groups=image, seed=seed) if len(only) > 1 else None

        def score(rows: Tensor, _: Tensor, true: Tensor) -> Tensor:
            """Return (hit, distance, 1) for each token."""
            found = only.expand(len(rows)) if model is None else model.predict(rows)
            distance = (places[found] - places[true]).norm(dim=1)
            return torch.stack([(found == true).double(), distance, torch.ones_like(distance)], 1)

        return score

    tallies, training = _run(tokens, outliers, fit, **options)
    kinds = {
        kind: PositionScore(one.tokens, one.images, one.note, one.mean(0), one.mean(1)) for kind, one in tallies.items()
    }
    return PositionProbe(kinds, *training, shape, 1 / len(places), _chance_distance(shape))


@fitting
@torch.no_grad()
def probe_pixels(tokens: Tensor, outliers: Tensor, patches: Tensor, **options: Unpack[Options]) -> PixelProbe:
    """Reconstruct the pixels of single patches from their tokens by ridge regression.

    Args:
        tokens: (B, P, D) patch tokens, without class and register tokens.
        outliers: (B, P) bool mask of the outliers.
        patches: (B, P, K) pixels of each patch (:func:`cut_patches`), in the unit that the error should have.

    The other arguments are those of :func:`probe_positions`.
    """
    tokens = as_features(tokens, "tokens", "B P D")
    pixels = as_features(patches, "patches", f"{tokens.shape[0]} {tokens.shape[1]} K").to(tokens.device)

    def fit(rows: Tensor, image: Tensor, place: Tensor, seed: int) -> _Scores:
        model = fit_regressor(rows, pixels[image, place], groups=image, seed=seed)

        def score(rows: Tensor, image: Tensor, place: Tensor) -> Tensor:
            """Return (squared error, squared distance from the mean patch, error, 1) for each token."""
            true = pixels[image, place].to(model.bias)
            error = (model.scores(rows) - true).double().square().sum(1)
            spread = (true - true.mean(0)).double().square().sum(1)
            return torch.stack([error, spread, error.sqrt(), torch.ones_like(error)], 1)

        return score

    tallies, training = _run(tokens, outliers, fit, **options)
    kinds = {}
    for kind, one in tallies.items():
        r2 = one.estimate(lambda sums: 1 - sums[:, 0] / sums[:, 1])
        kinds[kind] = PixelScore(one.tokens, one.images, one.note, one.mean(2), r2)
    return PixelProbe(kinds, *training)


def _chance_distance(grid: tuple[int, int, int]) -> float:
    """Return the mean distance between two random positions, from how often each offset occurs along each axis."""
    size = torch.tensor(grid, dtype=torch.float64)
    offset = torch.cartesian_prod(*map(torch.arange, grid)).double()
    share = (torch.where(offset > 0, 2.0, 1.0) * (size - offset) / size**2).prod(1)
    return float((share * offset.norm(dim=1)).sum())


# From tokens (n, D), their images (n,) and their places (n,) to values (n, K), the last of which is 1; and from such
# rows and a seed to the score of a fitted probe.
_Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
_Fit = Callable[[Tensor, Tensor, Tensor, int], _Scores]


@dataclass
class _Tally:
    """Values of one kind of token, summed by image over all splits, and by split.

    ``tokens`` and ``images`` are those of the smallest test part; ``note`` is why nothing is measured.
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
    tokens: Tensor,
    outliers: Tensor,
    fit: _Fit,
    *,
    train_on: TrainOn = "all",
    seed: int = 0,
    seeds: int = 3,
    test_share: float = 0.3,
    max_tokens: int = MAX_TOKENS,
) -> tuple[dict[str, _Tally], tuple[str, int, int]]:
    """Fit and score probes on tokens (B, P, D); return tallies by kind, and the fields of their training."""
    outliers = as_mask(outliers, tokens)
    check_count(seeds, "seeds")
    if train_on not in get_args(TrainOn):
        raise InvalidOption(f"train_on must be one of {', '.join(get_args(TrainOn))}; got {train_on!r}")
    check_count(max_tokens, "max_tokens", least=LEAST_TOKENS)
    check_share(test_share, "test_share")
    masks = {"normal": ~outliers, "outlier": outliers}
    train_masks = {"all": torch.ones_like(outliers), **masks}
    least = next(count for count in itertools.count(LEAST_IMAGES + 2) if round(test_share * count) >= LEAST_IMAGES)
    if len(tokens) < least:
        note = f"at least {least} images are needed, to leave {LEAST_IMAGES} for testing; got {len(tokens)}"
        tallies = {kind: _Tally(int(mask.sum()), int(mask.any(1).sum()), note) for kind, mask in masks.items()}
        return tallies, (train_on, 0, seeds)

    def sample(mask: Tensor, images: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sample tokens under a mask from some images: tokens (n, D), their images and their places."""
        images = images.to(tokens.device)
        found = subsample(mask[images].nonzero(), max_tokens, seed)
        image, place = images[found[:, 0]], found[:, 1]
        return tokens[image, place], image, place

    numbers = range(seed, seed + seeds)
    splits = {number: split_images(len(tokens), test_share=test_share, seed=number) for number in numbers}
    tallies = {kind: _count_tests(kind, mask, splits.values()) for kind, mask in masks.items()}
    fitted: dict[tuple[str, int], _Scores] = {}
    trained = []
    for kind, tally in tallies.items():
        source = kind if train_on == "own" else train_on
        train_mask = train_masks[source]
        count = min(int(train_mask[split.train.to(train_mask.device)].sum()) for split in splits.values())
        if tally.note is None and count < LEAST_TOKENS:
            tally.note = f"only {count} tokens to train the probe on; at least {LEAST_TOKENS} are needed"
        if tally.note is not None:
            continue
        trained.append(min(count, max_tokens))
        for number, split in splits.items():
            if (source, number) not in fitted:
                fitted[source, number] = fit(*sample(train_mask, split.train, number), number)
            rows = sample(masks[kind], split.test, number)
            tally.add(fitted[source, number](*rows), rows[1], len(tokens))
    return tallies, (train_on, min(trained, default=0), seeds)


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
