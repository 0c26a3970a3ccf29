"""How probes of single patch tokens are run: splits of pictures, tokens drawn from them, results by kind of token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from vitrail.analysis.probes.inputs import check_count, check_share
from vitrail.analysis.statistics import Estimate, Split, Statistic, bootstrap, pick, ratio, split_pictures
from vitrail.errors import InvalidOption

LEAST_TOKENS = 30
"""Tokens of a kind that each test part (and the training part of a probe) must hold for a number."""

LEAST_PICTURES = 5
"""Pictures that these tokens must come from."""

MAX_TOKENS = 20_000
"""Default for the most tokens that train a probe, and for the most of each kind that test it."""

TrainOn = Literal["all", "normal", "own"]

Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From tokens (n, D), their pictures (n,) and their places (n,) to values (n, K) that are summed up."""

Fit = Callable[[Tensor, Tensor, Tensor, int], Score]
"""From such rows and a seed to the score of the probe that was fitted to them."""


@dataclass
class Tally:
    """What the tokens of one kind scored, added up for each picture over all splits, and for each split.

    Attributes:
        kind: ``"normal"`` or ``"outlier"``.
        tokens: tokens in the smallest test part, before any were left out for their number.
        pictures: pictures in the smallest test part that have such tokens.
        note: why there is nothing to add up, where that is so.
    """

    kind: str
    tokens: int = 0
    pictures: int = 0
    note: str | None = None
    by_picture: Tensor | None = None
    by_split: list[Tensor] = field(default_factory=list)

    def add(self, values: Tensor, pictures: Tensor, count: int) -> None:
        """Add the values (n, K) of one split; on the CPU, where the order of the sum is always the same."""
        values = values.double().cpu()
        if self.by_picture is None:
            self.by_picture = torch.zeros(count, values.shape[1], dtype=torch.float64)
        self.by_picture.index_add_(0, pictures.cpu(), values)
        self.by_split.append(values.sum(0))

    def estimate(self, statistic: Statistic) -> Estimate | None:
        """Give a statistic of the sums, with its deviation over splits and its interval over pictures."""
        if self.by_picture is None:
            return None
        seen = self.by_picture[:, -1] > 0
        values = statistic(torch.stack(self.by_split))
        if not bool(values.isfinite().all()):
            return None
        return Estimate.of(values.tolist(), bootstrap(self.by_picture[seen], statistic))

    def mean(self, column: int) -> Estimate | None:
        """Give the mean over tokens of one value; the last one counts them."""
        return self.estimate(ratio(column, -1))


@dataclass(frozen=True)
class Runs:
    """The splits of one probe.

    Attributes:
        train_on: what trains it: tokens of ``"all"`` kinds, ``"normal"`` ones, or each kind's ``"own"``.
        seed: of the first split; each further one takes the next number.
        seeds: number of splits.
        test_share: share of the pictures that test.
        max_tokens: most tokens that train, and most of each kind that test.
    """

    train_on: TrainOn
    seed: int
    seeds: int
    test_share: float
    max_tokens: int

    def __post_init__(self) -> None:
        if self.train_on not in get_args(TrainOn):
            raise InvalidOption(f"train_on is one of {', '.join(get_args(TrainOn))}; got {self.train_on!r}")
        check_count(self.seeds, "seeds")
        check_count(self.max_tokens, "max_tokens", least=LEAST_TOKENS)
        check_share(self.test_share, "test_share")

    def run(self, tokens: Tensor, outliers: Tensor, fit: Fit) -> tuple[dict[str, Tally], int]:
        """Fit and score probes on tokens (B, P, D); give the tallies by kind, and how many tokens trained at least."""
        count = len(tokens)
        masks = {"normal": ~outliers, "outlier": outliers}
        tallies = {kind: Tally(kind) for kind in masks}
        splits = self._splits(count)
        if not splits:
            for kind, mask in masks.items():
                tallies[kind].note = (
                    f"{count} pictures leave fewer than {LEAST_PICTURES} for testing; "
                    f"at least {_least(self.test_share)} pictures are needed"
                )
                tallies[kind].tokens = int(mask.sum())
                tallies[kind].pictures = int(mask.any(1).sum())
            return tallies, 0
        for kind, mask in masks.items():
            self._count(tallies[kind], mask, splits)
        trained = []
        for train_mask, kinds in self._plans(masks):
            wanted = [kind for kind in kinds if tallies[kind].note is None]
            least = min(int(train_mask[split.train.to(train_mask.device)].sum()) for split in splits)
            if wanted and least < LEAST_TOKENS:
                for kind in wanted:
                    tallies[
                        kind
                    ].note = (
                        f"only {least} tokens to train the probe on; at least {LEAST_TOKENS} are needed for a number"
                    )
            elif wanted:
                trained.append(min(least, self.max_tokens))
                for index, split in enumerate(splits):
                    seed = self.seed + index
                    score = fit(*self._rows(tokens, train_mask, split.train, seed), seed)
                    for kind in wanted:
                        rows = self._rows(tokens, masks[kind], split.test, seed)
                        tallies[kind].add(score(*rows), rows[1], count)
        return tallies, min(trained, default=0)

    def _splits(self, count: int) -> list[Split]:
        """Split the pictures once per seed; not at all where too few would test."""
        if count < _least(self.test_share):
            return []
        seeds = range(self.seed, self.seed + self.seeds)
        return [split_pictures(count, test_share=self.test_share, seed=seed) for seed in seeds]

    def _plans(self, masks: dict[str, Tensor]) -> list[tuple[Tensor, list[str]]]:
        """List which tokens train a probe, and which kinds it is tested on."""
        if self.train_on == "own":
            return [(mask, [kind]) for kind, mask in masks.items()]
        normal = masks["normal"]
        return [(normal if self.train_on == "normal" else torch.ones_like(normal), list(masks))]

    def _rows(self, tokens: Tensor, mask: Tensor, pictures: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw tokens under a mask from some pictures: tokens (n, D), their pictures and their places."""
        pictures = pictures.to(tokens.device)
        found = pick(mask[pictures].nonzero(), self.max_tokens, seed)
        picture, place = pictures[found[:, 0]], found[:, 1]
        return tokens[picture, place], picture, place

    def _count(self, tally: Tally, mask: Tensor, splits: list[Split]) -> None:
        """Count a kind's tokens in the test parts, and say so where they are too few."""
        parts = [mask[split.test.to(mask.device)] for split in splits]
        tally.tokens = min(int(part.sum()) for part in parts)
        tally.pictures = min(int(part.any(1).sum()) for part in parts)
        if not bool(mask.any()):
            tally.note = f"there are no {tally.kind} tokens"
        elif tally.tokens < LEAST_TOKENS or tally.pictures < LEAST_PICTURES:
            tally.note = (
                f"only {tally.tokens} {tally.kind} tokens from {tally.pictures} pictures to test on; "
                f"at least {LEAST_TOKENS} from {LEAST_PICTURES} are needed for a number"
            )


def _least(test_share: float) -> int:
    """Give the least number of pictures that leaves enough of them for testing, and two for training."""
    count = LEAST_PICTURES + 2
    while round(test_share * count) < LEAST_PICTURES:
        count += 1
    return count
