"""What an export gives back, and what a format of files has to offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

INPUT = "images"
"""What every exported model calls its input."""

LONGEST = 300
"""Most characters of a message of another library that are passed on."""

Batch = int | Literal["dynamic"]
Shape = tuple[int | str, ...]
"""A shape with numbers, and names for what is decided when the model runs."""


@dataclass(frozen=True)
class Comparison:
    """How far a file's outputs are from the model's on random pictures.

    Attributes:
        batch: how many pictures went in at once.
        max_abs: largest difference.
        max_rel: largest difference relative to the largest value of the same output for the same picture.
        draws: how many batches were drawn until all pictures of one agreed; more than one means that rounding
            decided a near-tie between two pairs of tokens.
    """

    batch: int
    max_abs: float
    max_rel: float
    draws: int = 1


@dataclass(frozen=True)
class ExportResult:
    """What was written, and how it was checked.

    Attributes:
        path: the file to load.
        files: every file that belongs to it; weights of 2 GB and more lie in one of their own.
        format: ``"onnx"`` or ``"pt2"``.
        opset: version of ONNX's operators; None for other formats.
        dtype: precision of weights and input.
        batch: ``"dynamic"``, or the only number of pictures that the file takes.
        input: shape of the input ``images``.
        outputs: shapes of the outputs by name.
        tokens: tokens that leave each block, read from the file; None for a model that is not merged.
        comparisons: how close the file's outputs are, for each batch size that was tried.
        tolerance: what ``max_rel`` had to stay below.
    """

    path: Path
    files: tuple[Path, ...]
    format: str
    opset: int | None
    dtype: torch.dtype
    batch: Batch
    input: Shape
    outputs: dict[str, Shape]
    tokens: list[int] | None
    comparisons: tuple[Comparison, ...]
    tolerance: float

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True)
class Traced:
    """A model as a program, with what a file should say about it.

    Attributes:
        program: the program; its input is called ``images``.
        outputs: names of its outputs, in order.
        notes: plain data that is kept inside the file.
    """

    program: torch.export.ExportedProgram
    outputs: tuple[str, ...]
    notes: dict[str, object]


class Written(ABC):
    """A file that was read back."""

    opset: int | None = None

    @abstractmethod
    def run(self, images: Tensor) -> dict[str, Tensor]:
        """Give the file's outputs by name."""

    @abstractmethod
    def values(self) -> Iterator[tuple[tuple[str, ...], tuple[int | None, ...]]]:
        """Walk over the values inside: the modules that each was computed in, and its shape."""


class Format(ABC):
    """A kind of file."""

    name: str
    suffix: str

    @abstractmethod
    def check(self, dtype: torch.dtype, opset: int | None) -> None:
        """Raise where something that the format needs is missing, or an option does not fit it."""

    @abstractmethod
    def write(self, traced: Traced, path: Path, opset: int | None) -> None:
        """Write a program; files beside ``path`` are allowed."""

    @abstractmethod
    def read(self, path: Path, outputs: tuple[str, ...]) -> Written:
        """Read a file back, as its users will; ``outputs`` are the names of what it gives."""


def first_line(error: BaseException) -> str:
    """Say in one line what went wrong inside a library."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
