"""Local probes: does a patch token still know where it is, and what its patch looks like?

Darcet et al. (2024) read artifact tokens by linear probes. Their outliers have lost local information: position is
found less often (22.8 % against 41.7 % in DINOv2 ViT-g) and pixels are reconstructed worse. Whether they hold global
information instead is a question for :mod:`vitrail.analysis.probes.classes`.

Tokens of one picture are all in the training part or all in the test part of a split. A number is given only where
each test part holds enough tokens of a kind; otherwise a note says why there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vitrail.analysis.probes.inputs import as_features, as_grid, as_outliers
from vitrail.analysis.probes.linear import LinearRegressor, fit_classifier, fit_regressor
from vitrail.analysis.probes.runs import MAX_TOKENS, Runs, Score, TrainOn
from vitrail.analysis.result import Result
from vitrail.analysis.statistics import Estimate
from vitrail.errors import UnsupportedInput


@dataclass(frozen=True)
class PositionScore(Result):
    """How well the tokens of one kind know their position.

    Attributes:
        tokens: tokens in the smallest test part.
        pictures: pictures that these come from.
        accuracy: share of tokens whose position among all patches is found.
        distance: mean distance between the position found and the true one, in patches.
        note: why there is no number, where there is none.
    """

    tokens: int
    pictures: int
    accuracy: Estimate | None = None
    distance: Estimate | None = None
    note: str | None = None


@dataclass(frozen=True)
class PositionProbe(Result):
    """Position from one token, for ``"normal"`` and ``"outlier"`` tokens.

    Attributes:
        kinds: the scores of each kind.
        grid: patches in time, height and width.
        chance_accuracy: accuracy of guessing.
        chance_distance: mean distance of guessing.
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
    """How well the tokens of one kind give back the pixels of their patch.

    Attributes:
        tokens: tokens in the smallest test part.
        pictures: pictures that these come from.
        l2: mean over patches of the length ‖pixels − reconstruction‖, in the unit of the pixels given.
        r2: share of the variance that is explained: 1 − squared errors / squared distances from the mean patch of
            the same kind. Outliers often sit on even ground, whose pixels are easy; this number allows for that.
            None where all patches of the kind are alike.
        note: why there is no number, where there is none.
    """

    tokens: int
    pictures: int
    l2: Estimate | None = None
    r2: Estimate | None = None
    note: str | None = None


@dataclass(frozen=True)
class PixelProbe(Result):
    """Pixels from one token, for ``"normal"`` and ``"outlier"`` tokens; the fields are those of the position probe."""

    kinds: dict[str, PixelScore]
    trained_on: str
    train_tokens: int
    seeds: int


def cut_patches(images: Tensor, patch: int | tuple[int, int]) -> Tensor:
    """Cut pictures (B, C, H, W) into patches (B, P, C·p·p), row by row as a ViT does.

    >>> cut_patches(torch.zeros(2, 3, 28, 42), 14).shape
    torch.Size([2, 6, 588])
    """
    height, width = (patch, patch) if isinstance(patch, int) else patch
    if images.ndim != 4 or min(height, width) < 1 or images.shape[2] % height or images.shape[3] % width:
        raise UnsupportedInput(
            f"pictures of shape {tuple(images.shape)} do not divide into patches of {height}×{width} pixels; "
            "expected (B, C, H, W) as the model saw them, padded or resized to whole patches"
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
    """Ask a linear classifier for the position of single patch tokens.

    The paper trains one probe on patch tokens and reads its accuracy for normal and outlier tokens apart, which is
    ``train_on="all"``. A probe that saw few outliers may fail on them because they look different, not because they
    know nothing: ``train_on="own"`` trains a probe for each kind and answers that. ``"normal"`` trains on normal tokens
    alone, and says how far outliers are from following the others' code.

    Args:
        tokens: (B, P, D) patch tokens, without class token and registers.
        outliers: (B, P) bool: which of them are outliers.
        grid: (h, w) or (t, h, w).
        train_on: tokens of the training pictures that train the probe.
        seed: of the first split; each further split takes the next number.
        seeds: number of splits.
        test_share: share of the pictures that test.
        max_tokens: most tokens that train (drawn at random, so that the kinds keep their shares), and most of each
            kind that test.
    """
    tokens = as_features(tokens, "tokens", "B P D")
    shape = as_grid(grid, tokens.shape[1])
    if tokens.shape[1] < 2:
        raise UnsupportedInput("a grid of one patch has only one position; there is nothing to probe")
    runs = Runs(train_on, seed, seeds, test_share, max_tokens)
    axes = [torch.arange(length, device=tokens.device) for length in shape]
    places = torch.cartesian_prod(*axes).double()  # (P, 3)

    def fit(rows: Tensor, picture: Tensor, place: Tensor, seed: int) -> Score:
        only = place.unique()
        if len(only) == 1:  # Outliers that sit in one place, and nowhere else, need no classifier.
            return lambda rows, _, true: _position_values(places, only.expand(len(rows)), true)
        model = fit_classifier(rows, place, groups=picture, seed=seed)
        return lambda rows, _, true: _position_values(places, model.predict(rows), true)

    tallies, trained = runs.run(tokens, as_outliers(outliers, tokens), fit)
    kinds = {
        kind: PositionScore(tally.tokens, tally.pictures, tally.mean(0), tally.mean(1), tally.note)
        for kind, tally in tallies.items()
    }
    return PositionProbe(kinds, shape, 1 / len(places), _guessing(shape), train_on, trained, seeds)


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
    """Reconstruct the pixels of single patches from their tokens, by ridge regression.

    Args:
        tokens: (B, P, D) patch tokens, without class token and registers.
        outliers: (B, P) bool: which of them are outliers.
        patches: (B, P, K) pixels of each patch (:func:`cut_patches`), in whatever unit the error is wanted.

    The other arguments are those of :func:`probe_positions`.
    """
    tokens = as_features(tokens, "tokens", "B P D")
    pixels = as_features(patches, "patches", "B P K").to(tokens.device)
    if pixels.shape[:2] != tokens.shape[:2]:
        raise UnsupportedInput(
            f"there are patches {tuple(pixels.shape[:2])} and tokens {tuple(tokens.shape[:2])}; expected one per token"
        )

    runs = Runs(train_on, seed, seeds, test_share, max_tokens)

    def fit(rows: Tensor, picture: Tensor, place: Tensor, seed: int) -> Score:
        model = fit_regressor(rows, pixels[picture, place], groups=picture, seed=seed)
        return partial(_pixel_values, model, pixels)

    tallies, trained = runs.run(tokens, as_outliers(outliers, tokens), fit)
    kinds = {
        kind: PixelScore(
            tally.tokens,
            tally.pictures,
            tally.mean(2),
            tally.estimate(lambda sums: 1 - sums[:, 0] / sums[:, 1]),
            tally.note,
        )
        for kind, tally in tallies.items()
    }
    return PixelProbe(kinds, train_on, trained, seeds)


def _position_values(places: Tensor, found: Tensor, true: Tensor) -> Tensor:
    """Give hit, distance and one for each token."""
    distance = (places[found] - places[true]).norm(dim=1)
    return torch.stack([(found == true).double(), distance, torch.ones_like(distance)], 1)


def _pixel_values(model: LinearRegressor, pixels: Tensor, rows: Tensor, picture: Tensor, place: Tensor) -> Tensor:
    """Give squared error, squared distance from the mean patch, length of the error, and one for each token."""
    true = pixels[picture, place].to(model.bias)
    error = (model.scores(rows) - true).double().square().sum(1)
    spread = (true - true.mean(0)).double().square().sum(1)
    return torch.stack([error, spread, error.sqrt(), torch.ones_like(error)], 1)


def _guessing(grid: tuple[int, int, int]) -> float:
    """Mean distance between two random positions of a grid, from how often each offset occurs along each axis."""
    weights = torch.ones(1, 1, 1, dtype=torch.float64)
    square = torch.zeros(1, 1, 1, dtype=torch.float64)
    for axis, length in enumerate(grid):
        offsets = torch.arange(length, dtype=torch.float64)
        share = torch.where(offsets > 0, 2.0, 1.0) * (length - offsets) / length**2
        shape = [-1 if other == axis else 1 for other in range(3)]
        weights = weights * share.reshape(shape)
        square = square + offsets.square().reshape(shape)
    return float((weights * square.sqrt()).sum())
