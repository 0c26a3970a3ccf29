"""A fingerprint of training data, by which a run that goes on knows that it is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.data.dataset import Examples

SAMPLED = 8
"""Arrays whose values are looked at."""


def fingerprint(examples: Examples) -> dict[str, Any]:
    """Count the classes, and sum up all labels in their order; of arrays, the values of a few as well.

    Names and paths have no part in it: data may move. Pictures are not looked at: far into some files that takes long,
    and what is decoded differs in single bits from machine to machine.
    """
    columns = zip(examples.classes.items(), examples.labels.T, strict=True)
    found: dict[str, Any] = {
        "counts": {name: labels.bincount(minlength=len(names)).tolist() for (name, names), labels in columns},
        "labels": _digest([examples.labels]),
    }
    if examples.own is not None:
        rows = torch.linspace(0, len(examples) - 1, SAMPLED).long().unique()
        found["values"] = _digest(examples.read(row, 1) for row in rows.tolist())
    return found


def difference(before: Mapping[str, Any], now: Mapping[str, Any], classes: Mapping[str, Sequence[str]]) -> str | None:
    """Say in what two fingerprints differ, of data with as many samples of the same classes; None where they do not."""
    for column, names in classes.items():
        counts = (one["counts"][column] for one in (before, now))
        for name, was, is_now in zip(names, *counts, strict=True):
            if was != is_now:
                return f"{column} had {was} samples of {name!r}, and now has {is_now}"
    if before["labels"] != now["labels"]:
        return "the samples have other classes than before, or another order"
    if before.get("values") != now.get("values"):
        return "the samples have other values than before"
    return None


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]
