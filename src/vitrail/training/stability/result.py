"""The stability of a run, read from its log: spikes of the loss, norms by layer, and what LayerScale holds back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from statistics import median
from typing import Any

from vitrail._arguments import checked
from vitrail.analysis.result import Result
from vitrail.errors import TrainingError
from vitrail.training.log import read_log
from vitrail.training.run_directory import LOG
from vitrail.training.stability.monitor import KIND

WINDOW, LEAST = 100, 20
"""Steps before one that it is compared with, and how many there have to be."""

FACTOR = 8.0
"""A loss is a spike if it exceeds the median of the steps before by this many median deviations from it."""

HELD_BACK = 0.1
"""Largest scale of a branch that counts as held back."""

BRANCHES = ("attention", "mlp")


class Spike(Result):
    """A stretch of steps with an exceptional loss.

    Attributes:
        first, last: its steps, counted from 0.
        loss: the largest loss in it.
        usual: the median loss of the steps before.
        ended: whether the loss came back before the run ended.
    """

    first: int
    last: int
    loss: float
    usual: float
    ended: bool


class Interval(Result):
    """Norms by layer over an interval of steps: gradients as mean and largest of its steps, residuals at its end.

    Attributes:
        step: number of steps done at its end.
        gradient, largest_gradient: gradient norm of each layer.
        stream, attention, mlp, attention_scale, mlp_scale: as in `vitrail.analysis.residuals.Residuals`, of the blocks;
            empty where they could not be measured.
    """

    step: int
    gradient: tuple[float, ...]
    largest_gradient: tuple[float, ...]
    stream: tuple[float, ...] = ()
    attention: tuple[float, ...] = ()
    mlp: tuple[float, ...] = ()
    attention_scale: tuple[float, ...] = ()
    mlp_scale: tuple[float, ...] = ()

    def share(self, branch: str) -> tuple[float, ...]:
        """Return how much ``attention`` or ``mlp`` adds to the stream of each block, relative to it."""
        return tuple(added / max(norm, 1e-30) for added, norm in zip(getattr(self, branch), self.stream, strict=True))


class Stability(Result):
    """The stability of a run that was trained with ``diagnostics="stability"``.

    Attributes:
        first: the step of the first loss; 0, unless the diagnostics began in a resumed run.
        loss, gradient: loss and norm of all gradients (before clipping) of each step.
        intervals: norms by layer.
        spikes: exceptional losses, see `find_spikes`.
    """

    first: int
    loss: tuple[float, ...]
    gradient: tuple[float, ...]
    intervals: tuple[Interval, ...] = field(repr=False)
    spikes: tuple[Spike, ...]

    @property
    def measured(self) -> tuple[Interval, ...]:
        """The intervals with residual norms."""
        return tuple(one for one in self.intervals if one.stream)

    @property
    def held_back(self) -> dict[str, tuple[int, ...]]:
        """Layers, counted from 0, whose branch is scaled to less than a tenth at the end, by branch."""
        held = {}
        for branch in BRANCHES:
            scales = [one for last in self.measured[-1:] for one in getattr(last, f"{branch}_scale")]
            held[branch] = tuple(layer for layer, scale in enumerate(scales) if scale < HELD_BACK)
        return held

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of the table for each layer: its gradients, and shares and scales at the start and the end."""
        ends = self.measured[:1] + self.measured[-1:]
        for layer in range(len(self.intervals[0].gradient)):
            row: dict[str, Any] = {
                "layer": layer,
                "gradient": median(one.gradient[layer] for one in self.intervals),
                "largest_gradient": max(one.largest_gradient[layer] for one in self.intervals),
            }
            for branch in BRANCHES if ends and layer < len(ends[0].stream) else ():
                row[branch] = tuple(one.share(branch)[layer] for one in ends)
                row[f"{branch}_scale"] = tuple(getattr(one, f"{branch}_scale")[layer] for one in ends)
            yield row


@checked
def read_stability(run: str | Path) -> Stability:
    """Read the stability of a run from its directory, or from its ``log.jsonl``.

    Example:
        >>> train(data="photos", diagnostics="stability", out="runs/first")  # doctest: +SKIP
        >>> read_stability("runs/first").held_back  # doctest: +SKIP
        {'attention': (22, 23), 'mlp': ()}
    """
    path = Path(run)
    lines = read_log(path / LOG if path.is_dir() else path, KIND)
    if not lines:
        raise TrainingError(
            f"{run} has no measurements of stability; train with diagnostics='stability' (--diagnostics)"
        )
    try:
        losses, gradients = ([one for line in lines for one in line[name]] for name in ("loss", "gradient"))
        intervals = [
            Interval(line["step"], **{name: tuple(one) for name, one in line["layers"].items()}) for line in lines
        ]
        first = lines[0]["step"] - len(lines[0]["loss"])
    except (KeyError, TypeError) as error:
        raise TrainingError(f"{run}: the log's lines of stability are damaged ({error})") from error
    return Stability(first, tuple(losses), tuple(gradients), tuple(intervals), tuple(find_spikes(losses, first)))


def find_spikes(losses: Sequence[float], first: int = 0) -> list[Spike]:
    """Return stretches of exceptional losses; ``first`` is the step of the first loss.

    A loss is exceptional if it exceeds the median of up to 100 unexceptional ones before it by eight times their median
    absolute deviation, or is not a number. The median lags behind a falling loss, so that a loss that is merely noisy
    is none.

    >>> losses = [2 + 0.01 * (step % 3) + (step in (60, 61)) for step in range(90)]
    >>> [(one.first, one.last) for one in find_spikes(losses)]
    [(60, 61)]
    """
    usual: list[float] = []
    found: list[tuple[int, int, float, float]] = []
    for place, loss in enumerate(losses):
        if len(usual) >= LEAST:
            middle = median(usual)
            spread = max(median(abs(one - middle) for one in usual), 1e-3 * abs(middle))
            if not loss <= middle + FACTOR * spread:
                if found and found[-1][1] == place - 1:
                    begin, _, largest, before = found.pop()
                    found.append((begin, place, max(largest, loss), before))
                else:
                    found.append((place, place, loss, middle))
                continue
        usual = [*usual[1 - WINDOW :], loss]
    return [
        Spike(first + begin, first + last, largest, before, last + 1 < len(losses))
        for begin, last, largest, before in found
    ]
