"""What an experiment is: a question, arms that differ in some fields of a training run, seeds, and a search.

A study is plain data. `experiments.common.running` trains it, `experiments.common.tables` and the study's own ``draw``
show what came out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from experiments.common.data import Data, few
from vitrail.errors import InvalidOption
from vitrail.tokens import TokenSpec
from vitrail.training import Labels, Run

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunOf:
    """The model that another arm has trained: a field's value, a teacher say.

    It is the one of the same seed, or with ``seed`` the same one for all.
    """

    arm: str
    seed: int | None = None

    def seed_for(self, seed: int) -> int:
        """Give the seed of the model that a run with this seed uses."""
        return seed if self.seed is None else self.seed


class Arm:
    """One side of a comparison: a name, and the fields of `vitrail.training.Config` that it has of its own.

    It is tuned by a search of its own, or has the result of another arm's (``tuned_as``). It is compared with the
    study's reference, or with another arm (``against``). At the reduced size ``reduced`` stands over its own fields.
    With ``size`` it is evaluated on pictures of so many pixels, instead of those that it was trained on.
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

    def small(self) -> Arm:
        """Give the arm at the reduced size, where it is evaluated as it was trained."""
        return Arm(self.name, tuned_as=self.tuned_as, against=self.against, **{**self.fields, **self._reduced})

    @property
    def needs(self) -> tuple[str, ...]:
        """Arms whose models this one uses."""
        return tuple(value.arm for value in self.fields.values() if isinstance(value, RunOf))


@dataclass(frozen=True)
class Trained:
    """A model that was just trained and evaluated, for whoever wants to look at it.

    Attributes:
        model: in evaluation mode, where it was evaluated.
        labels: the names of its classes and what it expects of a picture.
        data: what it was trained and evaluated on.
    """

    model: nn.Module
    labels: Labels
    data: Data


@dataclass(frozen=True)
class Column:
    """A column of a study's table: its heading, where a row has the value, and how it is written.

    A detail is on the study's own page alone. A column of which no row has a value is left out.
    """

    heading: str
    value: Callable[[Mapping[str, Any]], float | None]
    form: str = "{:.3g}"
    detail: bool = False


@dataclass(frozen=True)
class Study:
    """A question with everything that is needed to answer it.

    Attributes:
        name: of its folder.
        question: in one sentence.
        data: opens what is trained on, and the validation set.
        base: fields of `vitrail.training.Config` that all arms share.
        arms: what is compared; differences are to the one called ``reference``.
        answer: which answer of a model is compared: ``fused``, a head, ``task.NAME``.
        also: further answers that are compared in the same way.
        seeds: of the runs that are reported.
        search: values to try for some fields, the same for all arms; ``draws`` points of the grid, or all. Or the
            points themselves.
        search_seeds: of the runs of the search.
        watch: so many training pictures are evaluated while a run goes on, every ``watch_every`` epochs.
        save_every: epochs between checkpoints, for runs that one command may not have the time for: such a run goes on
            from the last one. 0 for none.
        timed: whether its runs are measured by the clock, so that nothing else may run beside them.
        look: what else to note about a run; it goes into the row.
        columns: of the table, beside accuracy and difference.
        table: writes the results, where they are more than a line for each arm.
        draw: makes plots from the rows, in a folder.
        reduced: what a setting that takes seconds has instead, with ``few`` pictures.
    """

    name: str
    question: str
    data: Callable[[], Data]
    base: Mapping[str, Any]
    arms: tuple[Arm, ...]
    reference: str
    answer: str = "fused"
    also: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    search: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]] | None = None
    draws: int | None = None
    search_seeds: tuple[int, ...] = (0,)
    watch: int = 0
    watch_every: int = 1
    save_every: int = 0
    timed: bool = False
    look: Callable[[Run, Trained], Mapping[str, Any]] | None = None
    columns: tuple[Column, ...] = ()
    table: Callable[[Study, Rows], str] | None = None
    draw: Callable[[Study, Rows, Path], None] | None = None
    reduced: Mapping[str, Any] = field(default_factory=dict)
    few: Callable[[], Data] = few

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        meant = [self.reference, *(need for arm in self.arms for need in arm.needs)]
        meant += [name for arm in self.arms for name in (arm.tuned_as, arm.against) if name]
        lost = [name for name in meant if name not in names]
        if lost or len(set(names)) < len(names):
            raise InvalidOption(
                f"the study {self.name!r} has the arms {', '.join(names)}; expected each once"
                + (f", and {', '.join(lost)} among them" if lost else "")
            )
        for arm in self.arms:
            if "epochs" not in self.fields(arm, self.points()[0] if self.search else None):
                raise InvalidOption(
                    f"the arm {arm.name!r} of the study {self.name!r} has no epochs; give them, or a base"
                )

    def arm(self, name: str) -> Arm:
        """Find an arm by its name."""
        return next(arm for arm in self.arms if arm.name == name)

    def small(self) -> Study:
        """Give the same study at a size that takes seconds, on other data: it shows that all works, and no more."""
        return replace(
            self, base={**self.base, **self.reduced}, arms=tuple(arm.small() for arm in self.arms), data=self.few,
            seeds=self.seeds[:2], watch=min(self.watch, 16), watch_every=1, timed=False,
            draws=2 if self.search else None,
        )  # fmt: skip

    def points(self) -> list[dict[str, Any]]:
        """Give the points of the search, the same for every arm and each time."""
        if self.search is None:
            return []
        if isinstance(self.search, Mapping):
            grid = [dict(zip(self.search, values, strict=True)) for values in itertools.product(*self.search.values())]
        else:
            grid = [dict(point) for point in self.search]
        return grid if self.draws is None else random.Random(0).sample(grid, min(self.draws, len(grid)))

    def fields(self, arm: Arm, point: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Give what a run of an arm is asked for, at a point of the search; data, seed and machine excepted.

        Of fields that are mappings (``options``), an arm names those entries that are its own.
        """
        own = {
            name: {**self.base[name], **value}
            if isinstance(value, Mapping) and isinstance(self.base.get(name), Mapping)
            else value
            for name, value in arm.fields.items()
        }
        return {**self.base, **own, **(point or {})}


def plain(value: Any) -> Any:
    """Make the value of a field one that JSON can hold."""
    if isinstance(value, RunOf):
        return {"run_of": value.arm} | ({} if value.seed is None else {"seed": value.seed})
    if isinstance(value, TokenSpec):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value
