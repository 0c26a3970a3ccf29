"""The commands, their options and their help."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli import console
from vitrail.cli.bench import EPILOG, bench
from vitrail.cli.export import EXPORT_EPILOG, export

MAX_SIDE = 4096
HELP = "Vision Transformers with fewer tokens: merge what is alike, and see it as stained glass."

app = typer.Typer(
    name="vitrail",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Order(StrEnum):
    """Orders of the merged tokens."""

    paper = "paper"
    original = "original"


class Device(StrEnum):
    """Devices to run on."""

    cpu = "cpu"
    cuda = "cuda"


def main() -> None:
    """Run the command line."""
    app(prog_name="vitrail")


def _show_version(wanted: bool) -> None:
    if wanted:
        from vitrail import __version__

        console.say(f"vitrail {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
) -> None:
    """Hold what all commands share."""


def parse_r(text: str | None) -> int | list[int] | None:
    """Read ``16``, or ``16,16,8,8`` for each layer."""
    if text is None:
        return None
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise typer.BadParameter(
            f"{text!r} is not a number of tokens. Expected 0 or more for all layers, like -r 16, or one "
            "number for each layer, like -r 16,16,8,8."
        )
    return values[0] if len(values) == 1 else values


def parse_schedule(text: str) -> str | float:
    """Read a schedule's name, or a number; which of them are known is the library's to say."""
    try:
        return float(text)
    except ValueError:
        return text


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Read ``384``, or ``384x512`` for height and width."""
    if text is None:
        return None
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() and 0 < int(side) <= MAX_SIDE for side in sides):
        raise typer.BadParameter(
            f"{text!r} is not a size. Expected pixels from 1 to {MAX_SIDE}, like --size 384, or height and "
            "width, like --size 384x512."
        )
    return int(sides[0]), int(sides[-1])


@app.command(
    epilog="Examples:\n\n"
    "vitrail merge timm:vit_base_patch16_224 photos/ -r 16 -o glass\n\n"
    "vitrail merge timm:vit_small_patch14_dinov2 cat.jpg --keep 0.25 --size 518\n\n"
    "vitrail merge hf:facebook/deit-small-patch16-224 cat.jpg --gflops 2.5 --schedule decreasing\n\n"
    "vitrail merge timm:vit_tiny_patch16_224 cat.jpg -r 16 --random-weights"
)
def merge(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="timm:NAME, or hf:REPO-OR-FOLDER.")],
    pictures: Annotated[list[Path], typer.Argument(metavar="PICTURES", help="Picture files, and folders of them.")],
    r: Annotated[
        str | None,
        typer.Option("-r", metavar="N", help="Tokens to merge in each layer, or one number for each, with commas."),
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(metavar="F", help="Instead of -r: the share of patches that is left at the end."),
    ] = None,
    gflops: Annotated[
        float | None,
        typer.Option(metavar="G", help="Instead of -r: a budget for one picture, in 10⁹ multiply-adds."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder for the results.")] = Path("glass"),
    schedule: Annotated[
        str,
        typer.Option(metavar="S", help="constant, decreasing, increasing, or an inflection from -1 to 1."),
    ] = "constant",
    order: Annotated[Order, typer.Option(help="Order of the merged tokens.")] = Order.paper,
    proportional: Annotated[
        bool,
        typer.Option("--proportional/--no-proportional", help="Count merged tokens by their size in attention."),
    ] = True,
    size: Annotated[
        str | None,
        typer.Option(metavar="N or HxW", help="Input size in pixels, where the model allows another one."),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Do not fetch trained weights (the same random ones each time)."),
    ] = False,
    device: Annotated[
        Device | None,
        typer.Option(help="Where to run; by default on CUDA if there is one.", show_default=False),
    ] = None,
) -> None:
    """Merge a model's tokens on your pictures, and paint what was merged as stained glass.

    Writes for each picture the stained glass (one pane per kept token) and a side-by-side view, and a summary
    with tokens per layer, FLOPs, and how close the merged model's output stays to the unmerged one's.
    """
    given: dict[str, Any] = {"r": parse_r(r), "keep": keep, "gflops": gflops}
    if sum(value is not None for value in given.values()) != 1:
        raise typer.BadParameter("Give one of -r, --keep and --gflops, to say how much to merge, like -r 16.")
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"schedule": parse_schedule(schedule), "order": order.value, "proportional": proportional}
    pixels = parse_size(size)
    with console.user_errors(), console.notes():
        from vitrail.cli.merge import run_merge

        place = None if device is None else device.value
        summary = run_merge(model, pictures, options, out, size=pixels, random=random_weights, device=place)
    if summary.skipped:
        raise typer.Exit(1)


@app.command(epilog="Example: vitrail demo -o demo")
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder for the results.")] = Path("demo"),
) -> None:
    """Show it on three sample pictures, with a small model and random weights: no download, some seconds."""
    with console.user_errors(), console.notes():
        from vitrail.cli.demo import run_demo

        run_demo(out)


app.command(epilog=EPILOG)(bench)
app.command(epilog=EXPORT_EPILOG)(export)
