"""Class probe: how well does a single token classify the whole image?

In Darcet et al. (2024), outliers do nearly as well as the class token (79.1 % and 87.3 % on Aircraft), normal patches
far worse (17.1 %); in models with registers, these take the role of the outliers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail._arguments import fitting
from vitrail.analysis._inputs import Array, as_features, as_labels, as_mask, check_count, check_shape
from vitrail.analysis.probes.linear import fit_classifier
from vitrail.analysis.result import Result
from vitrail.analysis.statistics import Estimate, Split, split_images, wilson
from vitrail.errors import UnsupportedInput
from vitrail.tokens import TokenLayout, token_names

LEAST_IMAGES = 50
"""Images with a token of a kind that a score for that kind needs."""


@dataclass(frozen=True)
class TokenPerImage:
    """One token (M, D) from each image that has one of a kind, and the indices (M,) of these images."""

    tokens: Tensor
    images: Tensor


ByKind = Mapping[str, Tensor | TokenPerImage]


class ClassScore(Result):
    """Score of the class probe for one kind of token.

    Attributes:
        images, left_out: images that have a token of this kind, and images that have none.
    """

    images: int
    left_out: int
    test_images: int = 0  # images in the smallest test part
    accuracy: Estimate | None = None  # share of test images classified correctly; Wilson's interval for one test part
    balanced_accuracy: Estimate | None = None  # mean over classes of the accuracy within each class; has no interval
    majority: float | None = None  # accuracy of always predicting the most common class of the training part
    note: str | None = None  # why there is no score


class ClassProbe(Result):
    """Classification from a single token, by kind of token; ``seeds`` is the number of splits."""

    kinds: dict[str, ClassScore]
    classes: int
    seeds: int


@fitting
def one_token_each(tokens: Tensor, layout: TokenLayout, outliers: Tensor, *, seed: int = 0) -> dict[str, TokenPerImage]:
    """Take one token of each kind from each image.

    Args:
        tokens: (B, N, D) special tokens, then patches.
        layout: layout of the tokens.
        outliers: (B, P) bool mask of the outlier patches.
        seed: seed of the random patches.

    Returns:
        ``"class"``, ``"register 1"``, ``"register 2"``, ... (all special tokens), then a random ``"normal"`` and a
        random ``"outlier"`` patch, which some images may not have.
    """
    check_shape(tokens, "tokens", f"B {layout.num_tokens} D", f", for {layout}")
    patches = tokens[:, layout.patches]
    outliers = as_mask(outliers, patches)
    every = torch.arange(len(tokens), device=tokens.device)
    found = {name: TokenPerImage(tokens[:, index], every) for index, name in enumerate(token_names(layout.special))}
    draw = torch.rand(outliers.shape, generator=torch.Generator().manual_seed(seed)).to(tokens.device)
    for name, mask in (("normal", ~outliers), ("outlier", outliers)):
        place = draw.masked_fill(~mask, -1.0).argmax(1)
        images = mask.any(1).nonzero()[:, 0]
        found[name] = TokenPerImage(patches[images, place[images]], images)
    return found


@fitting
@torch.no_grad()
def probe_classes(
    by_kind: ByKind | Callable[[int], ByKind],
    labels: Array,
    *,
    common: bool = False,
    seed: int = 0,
    seeds: int = 3,
    test_share: float = 0.3,
) -> ClassProbe:
    """Classify images from one token of a kind, for each kind, by logistic regression.

    Splits are stratified by class, and the same for all kinds.

    Args:
        by_kind: one token per image for each kind: a tensor (B, D), or :class:`TokenPerImage` for kinds that some
            images lack. A function is called with the seed of each split, to draw other patches::

                probe_classes(lambda seed: one_token_each(tokens, layout, outliers, seed=seed), labels)

        labels: (B,) integers from 0, of two or more classes.
        common: use only images that have all kinds, so that kinds are compared on the same images.
        seed: seed of the first split; each further split takes the next one.
        seeds: number of splits.
        test_share: share of the test images.
    """
    check_count(seeds, "seeds")
    truth = as_labels(labels, len(labels)).cpu()
    outcomes: dict[str, list[_Outcome]] = {}
    for number in range(seed, seed + seeds):
        split = split_images(len(truth), test_share=test_share, seed=number, labels=truth)
        given = by_kind(number) if callable(by_kind) else by_kind
        kinds = {name: _as_token_per_image(name, value, len(truth)) for name, value in given.items()}
        if not kinds:
            raise UnsupportedInput("there are no kinds of tokens to probe; expected at least one")
        used = torch.ones(len(truth), dtype=torch.bool)
        for one in kinds.values() if common else ():
            used &= torch.isin(torch.arange(len(truth)), one.images.cpu())
        for name, one in kinds.items():
            outcomes.setdefault(name, []).append(_classify(one, truth, split, used, number))
    scores = {name: _score(name, found, len(truth)) for name, found in outcomes.items()}
    return ClassProbe(scores, len(truth.unique()), seeds)


def classification_scores(found: Tensor, true: Tensor, train: Tensor) -> tuple[float, float, float]:
    """Return accuracy, balanced accuracy, and the accuracy of always predicting the most common training label."""
    right = (found == true).double()
    recalls = [float(right[true == label].mean()) for label in true.unique()]
    majority = float((true == train.bincount().argmax()).double().mean())
    return float(right.mean()), sum(recalls) / len(recalls), majority


class _Outcome(NamedTuple):
    """One kind in one split; ``scores`` are those of :func:`classification_scores`."""

    images: int
    tested: int
    scores: tuple[float, float, float] = (0.0, 0.0, 0.0)
    note: str | None = None


def _classify(one: TokenPerImage, truth: Tensor, split: Split, used: Tensor, seed: int) -> _Outcome:
    """Fit on the training images that have a token, and test on the test images that have one."""
    images = one.images.cpu()
    testing = torch.isin(images, split.test)
    train, test = ((used[images] & part).nonzero()[:, 0] for part in (~testing, testing))
    count, known = len(train) + len(test), truth[images[train]]
    if count < LEAST_IMAGES or not len(test):
        return _Outcome(count, len(test), note=f"only {count} images have one; at least {LEAST_IMAGES} are needed")
    if len(known.unique()) < 2:
        note = f"the {len(known)} training images that have one are all of one class; two or more are needed"
        return _Outcome(count, len(test), note=note)
    device = one.tokens.device
    model = fit_classifier(one.tokens[train.to(device)], known, seed=seed)
    found = model.predict(one.tokens[test.to(device)]).cpu()
    return _Outcome(count, len(test), classification_scores(found, truth[images[test]], known))


def _score(name: str, outcomes: list[_Outcome], total: int) -> ClassScore:
    """Average over splits. The interval is that of one test part, since splits share their images."""
    images, tested = outcomes[0].images, min(outcome.tested for outcome in outcomes)
    note = next((outcome.note for outcome in outcomes if outcome.note), None)
    if note is not None:
        return ClassScore(images, total - images, tested, note=f"{name}: {note}")
    accuracy, balanced, majority = zip(*(outcome.scores for outcome in outcomes), strict=True)
    mean = sum(accuracy) / len(accuracy)
    return ClassScore(
        images,
        total - images,
        tested,
        Estimate.of(accuracy, wilson(mean * tested, tested)),
        Estimate.of(balanced, None),
        sum(majority) / len(majority),
    )


def _as_token_per_image(name: str, value: Tensor | TokenPerImage, count: int) -> TokenPerImage:
    """Check the tokens of one kind: finite, and one for each of its images."""
    if isinstance(value, TokenPerImage) and not len(value.images):
        return value
    one = value if isinstance(value, TokenPerImage) else TokenPerImage(value, torch.arange(count))
    tokens = as_features(one.tokens, f"the tokens of kind {name!r}", "B D")
    if len(tokens) != len(one.images) or len(one.images.unique()) != len(tokens) or int(one.images.max()) >= count:
        raise UnsupportedInput(
            f"got {len(tokens)} tokens of kind {name!r} for {count} labeled images; "
            "expected one per image, or TokenPerImage(tokens, images) with each image once"
        )
    return TokenPerImage(tokens, one.images)
