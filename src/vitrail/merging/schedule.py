"""Schedules: how many tokens merge in each layer.

A :class:`Schedule` holds the user's request. :meth:`Schedule.solve` turns it into one number per layer for a given
number of tokens: never more than the method can merge, and with the shortfall reported.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TypeGuard

from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import front_edges

Capacity = Callable[[int, int], int]
"""Most tokens that one reduction can remove, of this many tokens and protected ones."""

INFLECTIONS = {"constant": 0.0, "decreasing": -1.0, "increasing": 1.0}
"""Inflections (as ToMe defines them) of the named schedules."""

LEAST = 0.1
"""Patches that a share must ask for at least; one is left for a share of less than one, down to this."""

Cost = Callable[[Sequence[int]], float]
"""Cost of a model as a function of the tokens that each layer merges."""


@dataclass(frozen=True)
class Room:
    """How many tokens there are, and how many of them can merge.

    Attributes:
        tokens: length of the sequence, special tokens included.
        protected: tokens that never merge (the most in any image of the batch).
        first: most merges in the first step that merges, where protected tokens are among the others; None where they
            are in front.
        capacity: the method's capacity.
        restored: tokens are restored after each layer, so that every layer starts with all of them.
        feasible: largest number of tokens, at most a wanted one, that one step can remove from this many.
        special: number of special tokens, which are among the protected ones; None where no patch is protected.
    """

    tokens: int
    protected: int
    first: int | None = None
    capacity: Capacity = front_edges
    restored: bool = False
    feasible: Capacity | None = None
    special: int | None = None

    def runs(self, depth: int) -> Sequence[tuple[int, Room | None]]:
        """Return the number of layers, and the room, of each run of layers that begins with all of its tokens.

        The room is None where nothing can merge.
        """
        return ((depth, self),)

    @property
    def patches(self) -> int:
        """Number of patches, protected ones included."""
        return self.tokens - (self.protected if self.special is None else self.special)

    def cap(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Limit each layer's merges to what is possible in that layer.

        Where only some numbers are feasible, what one layer could not remove is left to the next ones that merge.
        """
        length, first, result, owed = self.tokens, self.first, [], 0
        for r in wanted:
            if r and self.feasible is not None and not self.restored:
                r = owed = r + owed
            most = self.capacity(length, self.protected)
            if first is not None:
                most = min(most, first)
            r = min(r, most)
            if self.feasible is not None:
                r = self.feasible(r, length)
                owed -= r
            if r and not self.restored:
                first = None
                length -= r
            result.append(r)
        return tuple(result)


@dataclass(frozen=True)
class RunsRoom(Room):
    """Room in a model whose layers do not all continue what the ones before left.

    Attributes:
        pieces: number of layers and room of each run of layers; None where nothing can merge.
    """

    pieces: tuple[tuple[int, Room | None], ...] = ()

    def runs(self, depth: int) -> Sequence[tuple[int, Room | None]]:
        return self.pieces

    def cap(self, wanted: Sequence[int]) -> tuple[int, ...]:
        result: list[int] = []
        for depth, room in self.pieces:
            own = wanted[len(result) : len(result) + depth]
            result += [0] * depth if room is None else room.cap(own)
        return tuple(result)


@dataclass(frozen=True)
class Solution:
    """Merges per layer as requested and as possible, with the cost where a budget was requested."""

    wanted: tuple[int, ...]
    per_layer: tuple[int, ...]
    cost: float | None = None

    @property
    def missing(self) -> int:
        """Number of requested merges that are not possible."""
        return sum(self.wanted) - sum(self.per_layer)


@dataclass(frozen=True)
class Schedule:
    """The request: ``r``, ``keep`` or ``gflops`` (or none: as much as the method wants), and the shape over depth.

    Attributes:
        r: tokens to merge per layer, one number or one per layer.
        keep: share of the patches left after the last layer, protected ones included.
        gflops: budget for one input in 10⁹ multiply-adds (the literature's FLOPs).
        inflection: −1 merges most in the first layers, 0 equally, 1 most in the last ones.
        layers: share of the merges of each layer; None where the inflection decides.
    """

    r: int | tuple[int, ...] | None = None
    keep: float | None = None
    gflops: float | None = None
    inflection: float = 0.0
    layers: tuple[float, ...] | None = None

    @property
    def shape(self) -> str | float | None:
        """Name of the inflection, or its value where it has no name; None where the method decides."""
        if self.layers is not None:
            return None
        return next((name for name, value in INFLECTIONS.items() if value == self.inflection), self.inflection)

    @classmethod
    def parse(
        cls,
        depth: int,
        r: int | Sequence[int] | None = None,
        keep: float | None = None,
        gflops: float | None = None,
        schedule: str | float | None = None,
        required: bool = True,
        layers: Sequence[float] | None = None,
    ) -> Schedule:
        """Check a user's options for a model of ``depth`` layers.

        Methods that decide by themselves how much to merge need none of ``r``, ``keep`` and ``gflops``
        (``required=False``). Without a schedule, ``layers`` has the share of each layer (`Method.layers`).
        """
        if schedule is None and layers is not None and not hasattr(r, "__len__"):
            shares = tuple(share / sum(layers) for share in layers)
            return replace(cls.parse(depth, r, keep, gflops, "constant", required), layers=shares)
        schedule = "constant" if schedule is None else schedule
        given = [name for name, value in (("r", r), ("keep", keep), ("gflops", gflops)) if value is not None]
        if not given and not required:
            return cls(inflection=_inflection(schedule))
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
        """Compute the merges of each layer for this many tokens."""
        if self.keep is not None:
            runs = [
                Solution((0,) * layers, (0,) * layers) if one is None else self._solve_keep(layers, one)
                for layers, one in room.runs(depth)
            ]
            asked = [r for run in runs for r in run.wanted]
            return Solution(tuple(asked), tuple(r for run in runs for r in run.per_layer))
        if self.gflops is not None:
            if cost is None:
                raise ValueError("a budget needs a cost")
            return self._solve_budget(depth, room, cost)
        if self.r is None:  # layers with a share merge as much as the method wants
            limits = [room.tokens if share else 0 for share in self.layers or [1.0] * depth]
            most = tuple(room.cap(limits) if room.restored else limits)
            return Solution(most, most)
        if isinstance(self.r, tuple):
            wanted = self.r
        elif self.layers is not None:
            wanted = spread(self.r * depth, self.layers)
        else:
            wanted = ramp(self.r, self.inflection, depth)
        possible = room.cap(wanted)
        if isinstance(room, RunsRoom) and not isinstance(self.r, tuple) and any(map(operator.eq, wanted, possible)):
            return Solution(possible, possible)  # one number for windows of several sizes, and blocks without any
        if room.feasible is not None and sum(possible) < sum(room.cap([room.tokens] * depth)):
            return Solution(possible, possible)  # what is missing is less than one step can remove
        return Solution(wanted, possible)

    def _solve_keep(self, depth: int, room: Room) -> Solution:
        assert self.keep is not None
        patches, fixed = room.patches, room.patches - (room.tokens - room.protected)
        if patches and self.keep * patches < LEAST:
            raise InvalidOption(
                f"keep={self.keep:g} of {patches} patches is less than one; use at least "
                f"keep={math.ceil(1e4 / patches) / 1e4:g}, which leaves one"
            )
        total = patches - max(1, round(self.keep * patches)) if patches else 0
        if room.restored:
            return Solution((total,) * depth, room.cap([total] * depth))
        per_layer = self._scaled(depth, room, lambda merges: sum(merges) >= total)
        if per_layer is None:
            most = patches - sum(room.cap([room.tokens] * depth))
            protected = f", {fixed} of them protected" if fixed else ""
            raise InvalidOption(
                f"keep={self.keep} would leave {patches - total} of {patches} patches, but {depth} layers cannot "
                f"merge below {most}{protected}; use at least keep={math.ceil(1000 * most / patches) / 1000}"
            )
        if room.feasible is not None:  # trimmed numbers may not be feasible
            return Solution(per_layer, per_layer)
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
        """Return the smallest multiple of the schedule's shape that is enough; None if even the cap is not."""
        shape = _shape(self.inflection, depth) if self.layers is None else self.layers

        def merges(total: float) -> tuple[int, ...]:
            return room.cap(spread(total, shape))

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


def spread(total: float, shares: Sequence[float]) -> tuple[int, ...]:
    """Distribute a number of merges over the layers by their shares.

    >>> spread(100, (0.5, 0.0, 0.5))
    (50, 0, 50)
    """
    counts: list[int] = []
    for layer in range(len(shares)):
        counts.append(max(0, round(total * sum(shares[: layer + 1])) - sum(counts)))
    return tuple(counts)


def ramp(r: int, inflection: float, depth: int) -> tuple[int, ...]:
    """Return ToMe's schedule: a straight line over depth with mean ``r``.

    >>> ramp(16, -1, 12)
    (32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0)
    """
    if depth == 1 or inflection == 0:
        return (r,) * depth
    start = int(r * (1.0 - inflection))
    step = (2 * r - 2 * start) / (depth - 1)
    return tuple(int(start + step * layer) for layer in range(depth))


def _shape(inflection: float, depth: int) -> list[float]:
    """Return the share of the merges of each layer."""
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
