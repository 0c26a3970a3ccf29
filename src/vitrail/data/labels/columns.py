"""Columns of labels as tensors: classes, values, and several classes at once."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.labels.targets import KINDS, Kind
from vitrail.data.sample import UNLABELED
from vitrail.data.sources.base import MAX_CLASSES, Labels, clean
from vitrail.errors import InvalidOption

SEPARATORS = re.compile(r"[;|,]")
"""What separates the classes of a multi-label text."""

Names = tuple[str, ...]


def read_kinds(given: Any, columns: Sequence[str]) -> dict[str, Kind]:
    """Return the kind of each column, given one kind for all or a mapping; columns without one are left out."""
    if given is None:
        return {}
    kinds: dict[str, Any] = dict.fromkeys(columns, given) if isinstance(given, str) else dict(given)
    for column, kind in kinds.items():
        if kind not in KINDS:
            raise InvalidOption(f"kind={kind!r} of {column}: expected one of {', '.join(KINDS)}")
        if column not in columns:
            raise InvalidOption(
                f"kind: {column!r} is not among the label columns {', '.join(columns) or '(none given)'}"
            )
    return kinds


def likely_kind(values: Sequence[Any]) -> Kind | None:
    """Return what the values of a column are if they are no classes: lists are multi-label, numbers a regression."""
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, list | tuple | np.ndarray) for value in known):
        return "multilabel"
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
    return "regression" if numbers and any(isinstance(value, float) for value in known) else None


def read_values(column: str, values: Sequence[Any], names: Sequence[str]) -> Tensor:
    """Return the values (N, 1) of a regression in float32, NaN for none; ``names`` of samples are for messages."""
    made = []
    for value, name in zip(values, names, strict=True):
        if isinstance(value, Tensor | np.generic) and value.ndim == 0:
            value = value.item()
        try:
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError):
            number = math.inf
        if isinstance(value, bool) or math.isinf(number):
            raise InvalidOption(f"{name}: {column} is {value!r:.80}; expected a finite number, or none for no label")
        made.append(number)
    return torch.tensor(made, dtype=torch.float32).unsqueeze(1)


def read_several(
    column: str, values: Sequence[Any], names: Sequence[str], known: Sequence[str] | None
) -> tuple[Names, Tensor]:
    """Return the classes of a multi-label column, and 0 or 1 for each (N, K), NaN where there is no label.

    Values are lists of names or numbers, or text such as ``"cat;small"``; an empty list or text is a sample of no
    class, None one without a label.
    """
    listed = [
        None if value is None else _listed(column, value, name) for value, name in zip(values, names, strict=True)
    ]
    found = sorted({one for each in listed if each for one in each}, key=_natural)
    if not found and known is None:
        raise InvalidOption(f"{column}: no sample has a class; expected lists of names, or text such as 'cat;small'")
    classes = tuple(found if known is None else known)
    unknown = sorted(set(found) - set(classes))
    if unknown:
        raise InvalidOption(f"{column}: {unknown[0]!r} is not among the {len(classes)} known classes")
    if len(classes) > MAX_CLASSES:
        raise InvalidOption(f"{column}: {len(classes)} classes; expected at most {MAX_CLASSES}")
    places = {name: place for place, name in enumerate(classes)}
    table = torch.zeros(len(listed), len(classes))
    for row, each in enumerate(listed):
        if each is None:
            table[row] = math.nan
        else:
            table[row, [places[one] for one in each]] = 1
    return classes, table


def _listed(column: str, value: Any, name: str) -> list[str]:
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        value = [part.strip() for part in SEPARATORS.split(value) if part.strip()]
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple) or any(
        isinstance(one, bool) or not isinstance(one, str | int) for one in value
    ):
        raise InvalidOption(
            f"{name}: {column} is {value!r:.80}; expected a list of classes, or text such as 'cat;small'"
        )
    return [clean(str(one)) for one in value]


def _natural(name: str) -> tuple[int, int, str]:
    """Return a key that sorts numbers by value, before other names."""
    return (0, int(name), name) if name.isascii() and name.isdigit() else (1, 0, name)


def _places(known: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Return the place of known classes, by their own names and by the given names that differ only in spelling."""
    places = {name: number for number, name in enumerate(known)}
    spelled: dict[str, list[int]] = {}
    for number, name in enumerate(known):
        spelled.setdefault(plain_name(name), []).append(number)
    for name in names:
        alike = spelled.get(plain_name(name), [])
        if name not in places and len(alike) == 1:
            places[name] = alike[0]
    return places


def plain_name(name: str) -> str:
    """Return the name of a class without case, and with single blanks for ``_`` and other blanks.

    >>> plain_name("English_springer ") == plain_name("english  springer")
    True
    """
    return " ".join(name.replace("_", " ").casefold().split())


def read_classes(column: str, given: Labels, known: Sequence[str] | None) -> tuple[Names, Tensor]:
    """Return names and numbers (N, 1) of a column's classes, -1 for none; numbered as known classes are."""
    numbers = torch.tensor([UNLABELED if value is None else value for value in given.numbers], dtype=torch.int64)
    top = int(numbers.max()) + 1 if len(numbers) else 0
    if top > MAX_CLASSES:
        raise InvalidOption(
            f"{column}: a class has the number {top - 1}; expected class numbers from 0. For values, use "
            "kind='regression'"
        )
    names = tuple(given.names or ())
    if names and top > len(names):
        raise InvalidOption(f"{column}: a class has the number {top - 1}, and only {len(names)} classes have names")
    if known is None:
        return names or tuple(str(number) for number in range(top)), numbers.unsqueeze(1)
    known = tuple(known)
    if not names and top and known != tuple(map(str, range(len(known)))):
        raise InvalidOption(
            f"{column}: the classes here are numbers without names, and the known classes have names "
            f"({_shortened(known)}); expected class folders, or a column of names"
        )
    if not names and top > len(known):
        raise InvalidOption(f"{column}: a class has the number {top - 1}, and {len(known)} classes are known")
    if not names or names == known:
        return known, numbers.unsqueeze(1)
    places = _places(known, names)
    unknown = [names[number] for number in numbers[numbers >= 0].unique().tolist() if names[number] not in places]
    if unknown or len(set(known)) < len(known):
        shown = f"{_shortened(unknown)} {'is' if len(unknown) == 1 else 'are'}" if unknown else "a repeated name is"
        raise InvalidOption(f"{column}: {shown} not among the {len(known)} known classes ({_shortened(known)})")
    table = torch.tensor([places.get(name, UNLABELED) for name in names] + [UNLABELED])
    return known, table[numbers].unsqueeze(1)  # the last entry is for -1


def _shortened(names: Sequence[str]) -> str:
    return ", ".join([repr(name) for name in names[:5]] + ["..."] * (len(names) > 5))
