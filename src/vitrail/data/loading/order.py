"""Seeds, and the order of samples: everything random in a step is a function of the seed and the step's number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vitrail._checks import check, check_int, is_int
from vitrail.errors import InvalidOption

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Combine whole numbers into one seed of 63 bits; their order matters, and close numbers give distant seeds.

    The state absorbs one number after the other, each followed by the final stage of splitmix64.

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
    """Return a generator seeded by these numbers alone."""
    return torch.Generator(device=device).manual_seed(mix(*numbers))


@dataclass(frozen=True)
class Order:
    """The samples of each step. No state between steps, so that a run can resume at any of them.

    Each pass goes through all samples in a new random order; the last incomplete batch is dropped. With repeats, a
    batch holds each of its samples several times (repeated augmentation), never twice in one pair of neighbors, and a
    pass takes as many epochs: the number of steps in an epoch stays the same.

    Attributes:
        count: number of samples.
        batch: samples in a step, over all ranks.
        seed: seed of the order, together with the number of the pass.
        repeats: how often a batch holds each of its samples.

    Example:
        >>> Order(10, 4, seed=0).steps_per_epoch
        2
    """

    count: int
    batch: int
    seed: int
    repeats: int = 1

    def __post_init__(self) -> None:
        check_int("batch", self.batch)
        divides = is_int(self.repeats, 1) and self.batch % self.repeats == 0
        check("repeats", self.repeats, divides, f"a divisor of the batch, {self.batch}")
        if self.count < self.batch:
            raise InvalidOption(
                f"there are {self.count} samples, fewer than one batch of {self.batch} (over all ranks); choose a "
                "smaller batch, or train on more samples"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch; the last incomplete batch is dropped."""
        return self.count // self.batch

    def indices(self, step: int, rank: int = 0, world_size: int = 1) -> Tensor:
        """Return the samples of a step, or one rank's slice of them: (batch / world_size,) in int64, on the CPU."""
        check_int("step", step, 0)
        distinct = self.batch // self.repeats
        number, place = divmod(step, self.count // distinct)
        chosen = _permutation(self.count, self.seed, number)[place * distinct : (place + 1) * distinct]
        # Each copy is rolled by one place, so that its pairs of neighbors are different ones.
        every = torch.cat([chosen.roll(-copy) for copy in range(self.repeats)])
        return every.view(world_size, -1)[rank]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, number: int) -> Tensor:
    return torch.randperm(count, generator=generator("cpu", seed, number))
