"""Seeds and the order of examples: everything drawn in a step is a function of the seed and the step's number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vitrail.errors import InvalidOption

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Make one seed of 63 bits from several whole numbers; their order matters, and neighbours differ widely.

    The state takes in one number after the other, each followed by the last stage of splitmix64.

    Example:
        >>> mix(1, 2) != mix(2, 1) != mix(1, 3)
        True
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (int(number) & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def generator(device: torch.device | str, *numbers: int) -> torch.Generator:
    """Make a generator that is seeded by several numbers and nothing else."""
    return torch.Generator(device=device).manual_seed(mix(*numbers))


@dataclass(frozen=True)
class Order:
    """Which examples each step sees. Nothing lives between steps, so that a run may go on from any of them.

    All examples are gone through in an order drawn anew for each pass; what is left over at its end and does not fill
    a batch is dropped. With repeats, a batch holds each of its examples several times (repeated augmentation), never
    twice in one pair of neighbours, and a pass takes so many epochs more: an epoch is always as many steps as it is
    without them.

    Attributes:
        count: how many examples there are.
        batch: how many a step sees, over all processes.
        seed: decides the order, with the number of the pass.
        repeats: how often a batch holds each of its examples.

    Example:
        >>> Order(10, 4, seed=0).steps_per_epoch
        2
    """

    count: int
    batch: int
    seed: int
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InvalidOption(f"batch={self.batch}: expected 1 or more examples in a batch.")
        if self.repeats < 1 or self.batch % self.repeats:
            raise InvalidOption(
                f"repeats={self.repeats}: a batch of {self.batch} cannot hold each of its examples so often. "
                "Expected a divisor of the batch."
            )
        if self.count < self.batch:
            raise InvalidOption(
                f"There are {self.count} examples, fewer than one batch of {self.batch} (over all processes). Choose a "
                "smaller batch, or train on more examples."
            )

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has; the last incomplete batch is dropped."""
        return self.count // self.batch

    def indices(self, step: int) -> Tensor:
        """Give the examples of a step's batch, over all processes: (batch,) in int64, on the CPU."""
        if step < 0:
            raise InvalidOption(f"step={step}: expected 0 or more.")
        distinct = self.batch // self.repeats
        number, place = divmod(step, self.count // distinct)
        chosen = _permutation(self.count, self.seed, number)[place * distinct : (place + 1) * distinct]
        # Each copy is turned by one place, so that pairs of neighbours are others in each of them.
        return torch.cat([chosen.roll(-copy) for copy in range(self.repeats)])


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, number: int) -> Tensor:
    return torch.randperm(count, generator=generator("cpu", seed, number))
