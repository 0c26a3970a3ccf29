"""Definition of a study: a question, arms that differ in some training options, seeds, and a search.

A study is plain data. `experiments.common.runner` trains it; `experiments.common.tables` and the study's own ``plot``
present the results.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from experiments.common.datasets import Data, reduced_images
from vitrail.errors import InvalidOption
from vitrail.tokens import TokenSpec
from vitrail.training import Labels, Run

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunOf:
    """The model trained by another arm, used as the value of an option such as ``teacher``.

    It is the model of the same seed, or that of ``seed`` for all runs.
    """

    arm: str
    seed: int | None = None

    def seed_for(self, seed: int) -> int:
        """Return the seed of the model that a run with this seed uses."""
        return seed if self.seed is None else self.seed


class Arm:
    """One variant of a comparison: a name and the options of `vitrail.training.Config` that differ from the base.

    Args:
        name: unique within the study; part of the run key.
        tuned_as: use the search result of this arm instead of a search of its own.
        against: compare with this arm instead of the study's reference.
        size: evaluate at this image size instead of the training size.
        reduced: options that replace the arm's own at the reduced size.
        **fields: options of `vitrail.training.Config`.
    """

    def __init__(
        self,
        name: str,
        /,
        *,
        tuned_as: str | None = None,
        against: str | None = None,
        size: int | None = None,
        reduced: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.name, self.tuned_as, self.against, self.size = name, tuned_as, against, size
        self.fields, self._reduced = fields, reduced or {}

    def at_reduced_size(self) -> Arm:
        """Return the arm at the reduced size, evaluated at its training size."""
        return Arm(self.name, tuned_as=self.tuned_as, against=self.against, **{**self.fields, **self._reduced})

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the arms whose models this arm uses."""
        return tuple(value.arm for value in self.fields.values() if isinstance(value, RunOf))


@dataclass(frozen=True)
class TrainedModel:
    """A model that has just been trained and evaluated, passed to ``Study.measure``.

    Attributes:
        model: in evaluation mode, on the device of the evaluation.
        labels: class names and input specification.
        data: the training and validation data.
    """

    model: nn.Module
    labels: Labels
    data: Data


@dataclass(frozen=True)
class Column:
    """A column of a study's table: its heading, how to read the value from a row, and its format.

    A column for which no row has a value is left out.
    """

    heading: str
    value: Callable[[Mapping[str, Any]], float | None]
    form: str = "{:.3g}"


@dataclass(frozen=True)
class Study:
    """A question and everything needed to answer it.

    Attributes:
        name: path of its folder under ``experiments``.
        question: in one sentence.
        data: opens the training and the validation set.
        base: options of `vitrail.training.Config` that all arms share.
        arms: the variants. Differences are taken to the arm named ``reference``.
        output: the model output that is compared: ``fused``, a head, or ``task.NAME``.
        other_outputs: further outputs that are compared in the same way.
        seeds: of the reported runs.
        search: values to try for some options, the same for all arms: a grid, of which ``draws`` points are sampled
            (all if None), or a list of points.
        search_seeds: of the runs of the search.
        monitor: number of training images to evaluate during a run, every ``monitor_every`` epochs.
        save_every: epochs between checkpoints, so that a long run can be resumed by the next command; 0 for none.
        timed: True if runs are timed, so that nothing else may run at the same time.
        measure: further measurements on a trained model; the result is added to the row.
        columns: of the table, after accuracy and difference.
        table: writes the tables, if the results need more than one line for each arm.
        plot: draws the plots from the rows into a folder.
        reduced: options of a setting that takes seconds, with ``reduced_data``.
    """

    name: str
    question: str
    data: Callable[[], Data]
    base: Mapping[str, Any]
    arms: tuple[Arm, ...]
    reference: str
    output: str = "fused"
    other_outputs: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    search: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]] | None = None
    draws: int | None = None
    search_seeds: tuple[int, ...] = (0,)
    monitor: int = 0
    monitor_every: int = 1
    save_every: int = 0
    timed: bool = False
    measure: Callable[[Run, TrainedModel], Mapping[str, Any]] | None = None
    columns: tuple[Column, ...] = ()
    table: Callable[[Study, Rows], str] | None = None
    plot: Callable[[Study, Rows, Path], None] | None = None
    reduced: Mapping[str, Any] = field(default_factory=dict)
    reduced_data: Callable[[], Data] = reduced_images

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        used = [self.reference, *(need for arm in self.arms for need in arm.needs)]
        used += [name for arm in self.arms for name in (arm.tuned_as, arm.against) if name]
        unknown = [name for name in used if name not in names]
        if unknown or len(set(names)) < len(names):
            raise InvalidOption(
                f"study {self.name!r} has the arms {', '.join(names)}; expected unique names"
                + (f", and {', '.join(unknown)} among them" if unknown else "")
            )
        for arm in self.arms:
            if "epochs" not in self.fields(arm, self.points()[0] if self.search else None):
                raise InvalidOption(f"arm {arm.name!r} of study {self.name!r} has no epochs; set them in it or in base")

    def arm(self, name: str) -> Arm:
        """Return an arm by its name."""
        return next(arm for arm in self.arms if arm.name == name)

    def at_reduced_size(self) -> Study:
        """Return the study at a size that takes seconds, on synthetic data; it only checks that everything runs."""
        return replace(
            self, base={**self.base, **self.reduced}, arms=tuple(arm.at_reduced_size() for arm in self.arms),
            data=self.reduced_data, seeds=self.seeds[:2], monitor=min(self.monitor, 16), monitor_every=1, timed=False,
            draws=2 if self.search else None,
        )  # fmt: skip

    def points(self) -> list[dict[str, Any]]:
        """Return the points of the search, the same for every arm and on every call."""
        if self.search is None:
            return []
        if isinstance(self.search, Mapping):
            grid = [dict(zip(self.search, values, strict=True)) for values in itertools.product(*self.search.values())]
        else:
            grid = [dict(point) for point in self.search]
        return grid if self.draws is None else random.Random(0).sample(grid, min(self.draws, len(grid)))

    def fields(self, arm: Arm, point: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the training options of an arm at a point of the search, without data, seed and device.

        Options that are mappings (``options``) are merged with those of the base.
        """
        own = {
            name: {**self.base[name], **value}
            if isinstance(value, Mapping) and isinstance(self.base.get(name), Mapping)
            else value
            for name, value in arm.fields.items()
        }
        return {**self.base, **own, **(point or {})}


def to_json(value: Any) -> Any:
    """Convert the value of an option to one that JSON can hold."""
    if isinstance(value, RunOf):
        return {"run_of": value.arm} | ({} if value.seed is None else {"seed": value.seed})
    if isinstance(value, TokenSpec):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): to_json(one) for name, one in value.items()}
    return [to_json(one) for one in value] if isinstance(value, tuple | list) else value
