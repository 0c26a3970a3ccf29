"""Schedules: how many tokens merge in each layer.

A :class:`Schedule` says what the user asked for. :meth:`Schedule.solve` turns it into one number per layer for
a given number of tokens: never more merges than there are pairs, and reported where that cut something off.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeGuard

from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import front_edges

INFLECTIONS = {"constant": 0.0, "decreasing": -1.0, "increasing": 1.0}
"""Names of the shapes of a schedule, each with its inflection in Token Merging's sense."""

Cost = Callable[[Sequence[int]], float]
"""Cost of a model whose layers merge that many tokens each."""


@dataclass(frozen=True)
class Room:
    """How many tokens there are, and how many of them may merge.

    Attributes:
        tokens: length of the sequence, special tokens included.
        protected: tokens that never merge (the most in any picture of the batch).
        first: most merges in the first step that merges, where protected tokens stand among the others
            and not in front; None where they stand in front.
    """

    tokens: int
    protected: int
    first: int | None = None

    def cap(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Cut each layer's merges down to the pairs that are left in that layer."""
        length, first, result = self.tokens, self.first, []
        for r in wanted:
            most = front_edges(length, self.protected)
            if first is not None:
                most = min(most, first)
            r = min(r, most)
            if r:
                first = None
            length -= r
            result.append(r)
        return tuple(result)


@dataclass(frozen=True)
class Solution:
    """Merges per layer as asked and as possible, with the cost where a budget was asked for."""

    wanted: tuple[int, ...]
    per_layer: tuple[int, ...]
    cost: float | None = None

    @property
    def missing(self) -> int:
        """How many of the merges asked for are not possible."""
        return sum(self.wanted) - sum(self.per_layer)


@dataclass(frozen=True)
class Schedule:
    """What was asked for: ``r``, ``keep`` or ``gflops``, and the shape over depth.

    Attributes:
        r: tokens to merge per layer, one number or one per layer.
        keep: share of the patches that is left at the end.
        gflops: budget for one input in 10⁹ multiply-adds (the literature's FLOPs).
        inflection: −1 merges most in the first layers, 0 equally, 1 most in the last ones.
    """

    r: int | tuple[int, ...] | None = None
    keep: float | None = None
    gflops: float | None = None
    inflection: float = 0.0

    @property
    def shape(self) -> str | float:
        """The inflection by its name, where it has one."""
        return next((name for name, value in INFLECTIONS.items() if value == self.inflection), self.inflection)

    @classmethod
    def parse(
        cls,
        depth: int,
        r: int | Sequence[int] | None = None,
        keep: float | None = None,
        gflops: float | None = None,
        schedule: str | float = "constant",
    ) -> Schedule:
        """Check a user's options for a model of ``depth`` layers."""
        given = [name for name, value in (("r", r), ("keep", keep), ("gflops", gflops)) if value is not None]
        if len(given) != 1:
            raise InvalidOption(
                f"give exactly one of r=, keep= or gflops=; got {' and '.join(given) or 'none of them'}"
            )
        inflection = _inflection(schedule)
        if keep is not None:
            if not _is_real(keep) or not 0 < keep <= 1:
                raise InvalidOption(
                    f"keep is the share of patches left at the end, above 0 and at most 1; got {keep!r}"
                )
            return cls(keep=float(keep), inflection=inflection)
        if gflops is not None:
            if not _is_real(gflops) or not 0 < gflops < math.inf:
                raise InvalidOption(f"gflops is a budget above 0, in 10⁹ multiply-adds; got {gflops!r}")
            return cls(gflops=float(gflops), inflection=inflection)
        if hasattr(r, "__len__") and not isinstance(r, str) and getattr(r, "ndim", 1) == 1:
            counts = list(r)  # type: ignore[arg-type]
            if len(counts) != depth:
                raise InvalidOption(
                    f"a list for r needs one number per layer: the model has {depth} layers, the list {len(counts)}"
                )
            if inflection:
                raise InvalidOption(f"schedule={schedule!r} shapes a single r; a list for r is the schedule itself")
            return cls(r=tuple(map(_count, counts)))
        return cls(r=_count(r), inflection=inflection)

    def solve(self, depth: int, room: Room, cost: Cost | None = None) -> Solution:
        """Find the merges of each layer for this many tokens."""
        if self.keep is not None:
            return self._solve_keep(depth, room)
        if self.gflops is not None:
            if cost is None:
                raise ValueError("a budget needs a cost")
            return self._solve_budget(depth, room, cost)
        wanted = self.r if isinstance(self.r, tuple) else ramp(self.r or 0, self.inflection, depth)
        return Solution(wanted, room.cap(wanted))

    def _solve_keep(self, depth: int, room: Room) -> Solution:
        assert self.keep is not None
        patches = room.tokens - room.protected
        total = patches - max(1, round(self.keep * patches)) if patches else 0
        per_layer = self._scaled(depth, room, lambda merges: sum(merges) >= total)
        if per_layer is None:
            most = patches - sum(room.cap([room.tokens] * depth))
            raise InvalidOption(
                f"keep={self.keep} would leave {patches - total} of {patches} patches, but {depth} layers cannot "
                f"merge below {most}; ask for at least keep={math.ceil(1000 * most / patches) / 1000}"
            )
        excess = sum(per_layer) - total
        trimmed = list(per_layer)
        for layer in reversed(range(depth)):
            cut = min(excess, trimmed[layer])
            trimmed[layer] -= cut
            excess -= cut
        return Solution(tuple(trimmed), tuple(trimmed))

    def _solve_budget(self, depth: int, room: Room, cost: Cost) -> Solution:
        assert self.gflops is not None
        budget = self.gflops * 1e9
        per_layer = self._scaled(depth, room, lambda merges: cost(merges) <= budget)
        if per_layer is None:
            least = cost(room.cap([room.tokens] * depth))
            raise InvalidOption(
                f"gflops={self.gflops:g} cannot be reached: without merging this input costs "
                f"{cost([0] * depth) / 1e9:.3g} GFLOPs, with the most merging {least / 1e9:.3g}"
            )
        return Solution(per_layer, per_layer, cost(per_layer))

    def _scaled(self, depth: int, room: Room, enough: Callable[[Sequence[int]], bool]) -> tuple[int, ...] | None:
        """Find the gentlest multiple of the schedule's shape that is enough; None if even the cap is not."""
        shape = _shape(self.inflection, depth)

        def merges(total: float) -> tuple[int, ...]:
            wanted, done = [], 0
            for layer in range(depth):
                r = max(0, round(total * sum(shape[: layer + 1])) - done)
                done += r
                wanted.append(r)
            return room.cap(wanted)

        if enough(merges(0)):
            return merges(0)
        low, high = 0, 1
        ceiling = 2 * room.tokens * max(1, math.ceil(1 / min((s for s in shape if s > 0), default=1)))
        while not enough(merges(high)):
            if high > ceiling:
                most = room.cap([room.tokens] * depth)
                return most if enough(most) else None
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(merges(middle)) else (middle, high)
        return merges(high)


def ramp(r: int, inflection: float, depth: int) -> tuple[int, ...]:
    """Token Merging's schedule: a straight line over depth that keeps the mean at ``r``.

    >>> ramp(16, -1, 12)
    (32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0)
    """
    if depth == 1 or inflection == 0:
        return (r,) * depth
    start = int(r * (1.0 - inflection))
    step = (2 * r - 2 * start) / (depth - 1)
    return tuple(int(start + step * layer) for layer in range(depth))


def _shape(inflection: float, depth: int) -> list[float]:
    """Share of the merges that each layer gets."""
    if depth == 1:
        return [1.0]
    weights = [1 - inflection + 2 * inflection * layer / (depth - 1) for layer in range(depth)]
    return [weight / sum(weights) for weight in weights]


def _inflection(schedule: object) -> float:
    if isinstance(schedule, str) and schedule in INFLECTIONS:
        return INFLECTIONS[schedule]
    if _is_real(schedule) and -1 <= schedule <= 1:
        return schedule + 0.0
    raise InvalidOption(
        f"schedule is one of {', '.join(INFLECTIONS)} or a number from -1 (early) to 1 (late); got {schedule!r}"
    )


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _count(value: object) -> int:
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0:
        raise InvalidOption(
            "r counts tokens to merge per layer: a whole number of 0 or more, or a list with one for each layer; got "
            f"{value!r}"
        )
    return count
