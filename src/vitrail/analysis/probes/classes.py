"""Global probe: what does one token know about the whole picture?

Darcet et al. (2024) classify pictures from a single token. Outliers do nearly as well as the class token (79.1 % and
87.3 % on Aircraft), normal patches far worse (17.1 %); where the model has registers, these take the role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.analysis.probes.inputs import Array, as_features, as_labels, as_outliers, check_count, check_share
from vitrail.analysis.probes.linear import fit_classifier
from vitrail.analysis.result import Result
from vitrail.analysis.statistics import Estimate, Split, split_pictures, wilson
from vitrail.errors import UnsupportedInput
from vitrail.tokens import TokenLayout, token_names

LEAST_LABELLED = 50
"""Pictures with a token of a kind that a number for that kind needs."""


@dataclass(frozen=True)
class OneEach:
    """One token (M, D) from each picture that has one of a kind, and the indices (M,) of these pictures."""

    tokens: Tensor
    pictures: Tensor


ByKind = Mapping[str, Tensor | OneEach]


@dataclass(frozen=True)
class ClassScore(Result):
    """How well one token of a kind tells the picture's label.

    Attributes:
        pictures: pictures that have a token of this kind.
        left_out: pictures that have none.
        test_pictures: pictures in the smallest test part.
        accuracy: share of test pictures that are classified rightly; Wilson's interval for one test part.
        balanced_accuracy: the same for each class by itself, then averaged over classes; has no interval.
        majority: accuracy of always naming the commonest class of the training part.
        note: why there is no number, where there is none.
    """

    pictures: int
    left_out: int
    test_pictures: int = 0
    accuracy: Estimate | None = None
    balanced_accuracy: Estimate | None = None
    majority: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class ClassProbe(Result):
    """Classification from one token, by kind of token.

    Attributes:
        kinds: the scores, in the order that the kinds were given in.
        classes: number of classes.
        seeds: number of splits.
    """

    kinds: dict[str, ClassScore]
    classes: int
    seeds: int


def one_token_each(tokens: Tensor, layout: TokenLayout, outliers: Tensor, *, seed: int = 0) -> dict[str, OneEach]:
    """Take one token of each kind from each picture.

    Args:
        tokens: (B, N, D) special tokens in front, then patches.
        layout: says which is which.
        outliers: (B, P) bool: which patches are outliers.
        seed: of the patches drawn.

    Returns:
        ``"class"``, ``"register 1"``, ``"register 2"``, ... (whatever special tokens there are), then a random
        ``"normal"`` and a random ``"outlier"`` patch. Pictures that have no such patch are missing there.
    """
    if tokens.ndim != 3 or tokens.shape[1] != layout.num_tokens:
        raise UnsupportedInput(
            f"tokens have shape {tuple(tokens.shape)}; expected (B, {layout.num_tokens}, D), as the layout says"
        )
    patches = tokens[:, layout.patches]
    outliers = as_outliers(outliers, patches)
    everyone = torch.arange(len(tokens), device=tokens.device)
    found = {
        name: OneEach(tokens[:, index], everyone)
        for name, index in zip(token_names(layout.special), range(layout.num_special), strict=True)
    }
    draw = torch.rand(outliers.shape, generator=torch.Generator().manual_seed(seed)).to(tokens.device)
    for name, mask in (("normal", ~outliers), ("outlier", outliers)):
        place = draw.masked_fill(~mask, -1.0).argmax(1)
        there = mask.any(1).nonzero()[:, 0]
        found[name] = OneEach(patches[there, place[there]], there)
    return found


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
    """Classify pictures from one token of a kind, for each kind, by logistic regression.

    The splits are the same for all kinds, and keep the shares of the classes.

    Args:
        by_kind: one token from each picture for each kind: a tensor (B, D), or :class:`OneEach` for kinds that some
            pictures lack. A function of a seed is called for each split, so that the patches drawn differ, too::

                probe_classes(lambda seed: one_token_each(tokens, layout, outliers, seed=seed), labels)

        labels: (B,) whole numbers from 0, of two classes or more.
        common: use only pictures that have all kinds, so that kinds are compared on the same pictures.
        seed: of the first split; each further split takes the next number.
        seeds: number of splits.
        test_share: share of the pictures that test.
    """
    check_count(seeds, "seeds")
    check_share(test_share, "test_share")
    truth = as_labels(labels, len(labels)).cpu()
    hits: dict[str, list[_Outcome]] = {}
    for index in range(seeds):
        split = split_pictures(len(truth), test_share=test_share, seed=seed + index, labels=truth)
        given = by_kind(seed + index) if callable(by_kind) else by_kind
        kinds = {name: _checked(name, value, len(truth)) for name, value in given.items()}
        if not kinds:
            raise UnsupportedInput("there are no kinds of tokens to probe; give at least one")
        shared = _shared(kinds, len(truth)) if common else torch.ones(len(truth), dtype=torch.bool)
        for name, one in kinds.items():
            hits.setdefault(name, []).append(_classify(one, truth, split, shared, seed + index))
    scores = {name: _summed_up(name, outcomes, len(truth)) for name, outcomes in hits.items()}
    return ClassProbe(scores, len(truth.unique()), seeds)


@dataclass(frozen=True)
class _Outcome:
    """One kind in one split."""

    pictures: int
    tested: int
    accuracy: float = 0.0
    balanced: float = 0.0
    majority: float = 0.0
    note: str | None = None


def _classify(one: OneEach, truth: Tensor, split: Split, shared: Tensor, seed: int) -> _Outcome:
    """Fit on the training pictures that have a token, and test on the others that have one."""
    pictures = one.pictures.cpu()
    testing = torch.zeros(len(truth), dtype=torch.bool)
    testing[split.test] = True
    used = shared[pictures]
    train = (used & ~testing[pictures]).nonzero()[:, 0]
    test = (used & testing[pictures]).nonzero()[:, 0]
    count, known = int(used.sum()), truth[pictures[train]]
    if count < LEAST_LABELLED or not len(test):
        note = f"only {count} pictures have one; at least {LEAST_LABELLED} are needed for a number"
        return _Outcome(count, len(test), note=note)
    if len(known.unique()) < 2:
        note = f"the {len(known)} training pictures that have one are all of one class; two or more are needed"
        return _Outcome(count, len(test), note=note)
    device = one.tokens.device
    model = fit_classifier(one.tokens[train.to(device)], known, seed=seed)
    found, true = model.predict(one.tokens[test.to(device)]).cpu(), truth[pictures[test]]
    right = (found == true).double()
    recalls = [float(right[true == label].mean()) for label in true.unique()]
    majority = float((true == known.bincount().argmax()).double().mean())
    return _Outcome(count, len(test), float(right.mean()), sum(recalls) / len(recalls), majority)


def _summed_up(name: str, outcomes: list[_Outcome], total: int) -> ClassScore:
    """Average over splits. The interval is that of one test part: the splits share their pictures."""
    pictures, tested = outcomes[0].pictures, min(outcome.tested for outcome in outcomes)
    note = next((outcome.note for outcome in outcomes if outcome.note), None)
    if note is not None:
        return ClassScore(pictures, total - pictures, tested, note=f"{name}: {note}")
    accuracy = [outcome.accuracy for outcome in outcomes]
    mean = sum(accuracy) / len(accuracy)
    return ClassScore(
        pictures,
        total - pictures,
        tested,
        Estimate.of(accuracy, wilson(mean * tested, tested)),
        Estimate.of([outcome.balanced for outcome in outcomes], None),
        sum(outcome.majority for outcome in outcomes) / len(outcomes),
    )


def _checked(name: str, value: Tensor | OneEach, count: int) -> OneEach:
    """Take what was given for a kind, one finite token for each of its pictures."""
    if isinstance(value, OneEach):
        if not len(value.pictures):
            return value
        one = OneEach(as_features(value.tokens, f"the tokens of kind {name!r}", "M D"), value.pictures)
        fits = len(one.tokens) == len(one.pictures) == len(one.pictures.unique()) and int(one.pictures.max()) < count
    else:
        one = OneEach(as_features(value, f"the tokens of kind {name!r}", "B D"), torch.arange(len(value)))
        fits = len(one.tokens) == count
    if not fits:
        raise UnsupportedInput(
            f"the {len(one.tokens)} tokens of kind {name!r} do not belong to the {count} pictures that have labels; "
            "expected one for each picture, or OneEach(tokens, pictures) with each picture named once"
        )
    return one


def _shared(kinds: Mapping[str, OneEach], count: int) -> Tensor:
    """Mark the pictures (B,) that have all kinds."""
    times = torch.zeros(count, dtype=torch.long)
    for one in kinds.values():
        times[one.pictures.cpu()] += 1
    return times == len(kinds)
