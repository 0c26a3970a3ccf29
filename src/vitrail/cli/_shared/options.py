"""Options that several commands share, and their parsers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.merging import METHODS
from vitrail.surgery.trained_methods import is_method

MAX_SIDE = 4096


class Order(StrEnum):
    """Orders of the merged tokens."""

    paper = "paper"
    original = "original"


class Device(StrEnum):
    """Devices to run on."""

    cpu = "cpu"
    cuda = "cuda"


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="timm:NAME, hf:REPO-OR-FOLDER, torchvision:NAME, or vitrail:RUN.")
]
Method = Annotated[
    str, typer.Option("--method", metavar="NAME", help="Merging method, such as tome, or a run that trained one.")
]
R = Annotated[
    str | None,
    typer.Option("-r", "--r", metavar="N", help="Tokens to merge per layer, or comma-separated, one for each layer."),
]
Keep = Annotated[
    float | None,
    typer.Option(metavar="F", help="Instead of -r: the share of patches left at the end."),
]
Gflops = Annotated[
    float | None,
    typer.Option(metavar="G", help="Instead of -r: a budget per image, in 10⁹ multiply-adds."),
]
Schedule = Annotated[
    str,
    typer.Option(metavar="S", help="constant, decreasing, increasing, or an inflection from -1 to 1."),
]
OrderOf = Annotated[Order, typer.Option(help="Order of the merged tokens.")]
Proportional = Annotated[
    bool,
    typer.Option("--proportional/--no-proportional", help="Weight merged tokens by size in attention."),
]
Size = Annotated[
    str | None,
    typer.Option(metavar="N or HxW", help="Input size in pixels, if the model supports another one."),
]
RandomWeights = Annotated[
    bool,
    typer.Option("--random-weights", help="Use random weights (always the same) instead of a download."),
]
Batch = Annotated[int, typer.Option("-b", "--batch", min=1, metavar="N", help="Images per batch.")]
DeviceOf = Annotated[
    Device | None,
    typer.Option(help="Device; CUDA if available by default.", show_default=False),
]
Folder = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Output directory.")]


def merge_options(
    r: str | None,
    keep: float | None,
    gflops: float | None,
    schedule: str,
    order: Order,
    proportional: bool,
    method: str = "tome",
) -> dict[str, Any]:
    """Return keyword arguments for ``vitrail.merge``."""
    given: dict[str, Any] = {"r": None if r is None else parse_r(r), "keep": keep, "gflops": gflops}
    amount = {name: value for name, value in given.items() if value is not None}
    if len(amount) != 1:
        raise typer.BadParameter("Pass one of -r, --keep and --gflops, such as -r 16; -r 0 merges nothing.")
    if not is_method(method):
        raise typer.BadParameter(
            f"--method {method!r} is not a method. Expected one of {', '.join(sorted(METHODS))}, or the directory of a "
            "run that trained one."
        )
    settings = {"schedule": number_or_word(schedule), "order": order.value, "proportional": proportional}
    return amount | settings | {"method": method}


def parse_r(text: str) -> int | list[int]:
    """Parse ``16``, or ``16,16,8,8`` for each layer."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise typer.BadParameter(
            f"-r {text!r} is not a number of tokens. Expected 0 or more for all layers, like -r 16, or one "
            "number for each layer, like -r 16,16,8,8."
        )
    return values[0] if len(values) == 1 else values


def number_or_word(text: str) -> str | float:
    """Parse a number; return anything else unchanged, for the library to check."""
    try:
        return float(text)
    except ValueError:
        return text


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Parse ``384``, or ``384x512`` for height and width."""
    if text is None:
        return None
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() and 0 < int(side) <= MAX_SIDE for side in sides):
        raise typer.BadParameter(
            f"--size {text!r} is not a size. Expected pixels from 1 to {MAX_SIDE}, like --size 384, or height and "
            "width, like --size 384x512."
        )
    return int(sides[0]), int(sides[-1])
