"""Targets: columns of classes, of values (regression), of several classes (multi-label), masks (dense), and depth maps.

The labels of a dataset are one table (N, W). A column of classes has one number in it, a column of values one, a
multi-label column 0 or 1 for each class, and masks and depth maps, which come with the images, none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from vitrail._checks import check_choice

Kind = Literal["classification", "regression", "multilabel", "dense", "depth"]
KINDS: tuple[Kind, ...] = get_args(Kind)

PIXEL_BYTES: dict[str, int] = {"dense": 1, "depth": 4}
"""Kinds that say something of each pixel, with the bytes that it takes: a class, or a number in float32."""

PIXEL_COLUMNS: dict[str, str] = {"dense": "mask", "depth": "depth"}
"""Names of the columns that stand for the masks, or the depth maps, of a source."""

MASK_CLASSES = ("background", "foreground")
"""Classes of masks that have none of their own."""


@dataclass(frozen=True)
class TargetSpec:
    """What a column of labels holds.

    Attributes:
        kind: ``classification``, ``regression``, ``multilabel``, ``dense`` or ``depth``.
        mean, std: of the values of a regression, or of depths, by which a model's outputs are scaled: value = mean +
            std · output.
    """

    kind: Kind = "classification"
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)

    @property
    def pixel_bytes(self) -> int:
        """Number of bytes with what is true of each pixel; 0 for labels of whole samples."""
        return PIXEL_BYTES.get(self.kind, 0)

    def width(self, names: Sequence[str]) -> int:
        """Return how many numbers a sample has in the table of labels."""
        return 0 if self.pixel_bytes else len(names) if self.kind == "multilabel" else 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


CLASSES = TargetSpec()
Targets = Mapping[str, TargetSpec]
"""Targets by column; columns that are not in it hold classes."""


def spans(classes: Mapping[str, Sequence[str]], targets: Targets) -> dict[str, slice]:
    """Return where each column is in the table of labels."""
    found, start = {}, 0
    for column, names in classes.items():
        stop = start + targets.get(column, CLASSES).width(names)
        found[column] = slice(start, stop)
        start = stop
    return found


def is_known(values: Tensor, kind: Kind) -> Tensor:
    """Return which rows of a column's part (N, w) of the table have a label."""
    return (values >= 0).all(1) if kind == "classification" else ~values.isnan().any(1)
