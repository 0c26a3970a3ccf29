"""Options that several commands share, and their parsers."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitrail.adapters.saved import EMBEDDED, PREFIX
from vitrail.cli._shared import console
from vitrail.errors import VitrailError
from vitrail.surgery.saving import Settings, read_settings

RENAMED = {"--size": "--image-size", "--batch": "--batch-size"}
"""Former names of options, which still work but are not shown."""

JSON_FILES = ("bench", "evaluate")
"""Commands whose ``--json`` was followed by a file before 0.3, as ``-o`` is now."""

MAX_SIDE = 4096


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


def parse_schedule(text: str) -> str | float:
    """Parse a number; return anything else unchanged, for the library to check."""
    try:
        return float(text)
    except ValueError:
        return text


def parse_method(text: str) -> str | dict[str, Any]:
    """Parse the name of a merging method, or a JSON object with its name and options."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"--method {text!r} is not JSON ({error}). Expected a name, or an object such as "
            '\'{"name": "tome", "features": "values"}\'.'
        ) from error
    return found


def parse_size(text: str) -> tuple[int, ...]:
    """Parse ``384``, ``384x512`` for height and width, or ``8x64x64`` for frames, height and width."""
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 3 or not all(side.isascii() and side.isdigit() and 0 < int(side) <= MAX_SIDE for side in sides):
        raise typer.BadParameter(
            f"--image-size {text!r} is not a size. Expected pixels from 1 to {MAX_SIDE}, like --image-size 384, or "
            "height and width, like --image-size 384x512; for clips also frames before them, like 8x64x64."
        )
    return tuple(map(int, sides if len(sides) > 1 else sides * 2))


def parse_merge(text: str) -> Settings:
    """Parse ``r=8``, the JSON of ``vitrail tune``, or a directory of ``merging.save``."""
    try:
        return read_settings(text)
    except VitrailError as error:
        raise typer.BadParameter(f"--merge: {error}") from error


def parse_sweep(merge: str | None) -> dict[str, str | None]:
    """Return the settings of a merge by name: one, or for several values of an option unmerged and each of them.

    >>> parse_sweep("r=0,4,schedule=decreasing")
    {'unmerged': 'r=0', 'r=4': 'r=4,schedule=decreasing'}
    """
    parts: list[list[str]] = []
    for part in (merge or "").split(","):
        if parts and "=" not in part and part.strip():
            parts[-1].append(part)
        else:
            parts.append([part])
    several = [place for place, values in enumerate(parts) if len(values) > 1]
    if merge is None or not several:
        return {"": merge}
    key, equals, first = parts[several[0]][0].partition("=")
    if len(several) > 1 or not equals or key.strip() not in ("r", "keep", "gflops"):
        raise typer.BadParameter(
            f"--merge {merge!r}: a sweep has several values of one of r, keep and gflops, such as r=0,4,8."
        )
    settings: dict[str, str | None] = {"unmerged": "r=0"}
    for value in (first, *parts[several[0]][1:]):
        chosen = f"{key.strip()}={value.strip()}"
        others = (parts[place][0] for place in range(len(parts)) if place != several[0])
        if chosen not in ("r=0", "keep=1", "keep=1.0"):
            settings[chosen] = ",".join([chosen, *others])
    return settings


def with_present_names(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return arguments of a command with the present names of its options; ``known`` are the names it has.

    >>> with_present_names(["model", "--size=384", "--", "--size"], {"--image-size"})
    ['model', '--image-size=384', '--', '--size']
    """
    renamed: list[str] = []
    for place, argument in enumerate(arguments):
        if argument == "--":
            return [*renamed, *arguments[place:]]
        name, equals, value = argument.partition("=")
        present = RENAMED.get(name, name)
        renamed.append(present + equals + value if name not in known and present in known else argument)
    return renamed


def with_json_files(arguments: Sequence[str]) -> list[str]:
    """Return arguments with ``-o FILE.json`` for ``--json FILE.json``, the way to write a file before 0.3.

    >>> with_json_files(["model", "--json", "found.json", "--r=8"])
    ['model', '-o', 'found.json', '--r=8']
    """
    renamed: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--json" and value:
            renamed += ["-o", value]
        elif renamed and renamed[-1] == "--json" and argument.endswith(".json"):
            renamed[-1:] = ["-o", argument]
        else:
            renamed.append(argument)
    if renamed != [*arguments]:
        console.note("--json FILE is deprecated and will be removed in 0.4; use -o FILE. --json alone prints JSON.")
    return renamed


SOURCES = "Files or folders of images, clips or sounds, parquet files, shards, or hf:OWNER/NAME."
SAMPLES = f"{SOURCES} Default: samples of the package."
Samples = Annotated[list[Path] | None, typer.Argument(metavar="IMAGES", help=SAMPLES, show_default=False)]
INCLUDED = ", ".join(f"{PREFIX}{name}" for name in EMBEDDED)
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help=f"timm:NAME, hf:REPO-OR-FOLDER, torchvision:NAME, vitrail:RUN, or {INCLUDED}."
    ),
]
METHODS = "Merging method: a name of vitrail.list_methods(), or JSON with its name and options."
Method = Annotated[Any, typer.Option(metavar="NAME", parser=parse_method, help=METHODS)]
COUNTS = "Tokens to merge per layer, or comma-separated, one for each layer."
R = Annotated[Any, typer.Option("-r", "--r", metavar="N", parser=parse_r, help=COUNTS)]
Keep = Annotated[float | None, typer.Option(metavar="F", help="Share of patches left at the end; replaces -r.")]
Gflops = Annotated[
    float | None, typer.Option(metavar="G", help="Budget per image, in 10⁹ multiply-adds; replaces -r and --keep.")
]
SCHEDULES = "constant, decreasing, increasing, or an inflection from -1 to 1; by default the method's own."
Schedule = Annotated[Any, typer.Option(metavar="S", parser=parse_schedule, help=SCHEDULES, show_default=False)]
Order = Annotated[Literal["paper", "original"], typer.Option(help="Order of the merged tokens.")]
Proportional = Annotated[
    bool, typer.Option("--proportional/--no-proportional", help="Weight merged tokens by size in attention.")
]
SIZES = "Input size in pixels, if the model supports another one; for clips also TxHxW, with frames."
Size = Annotated[Any, typer.Option("--image-size", metavar="N or HxW", parser=parse_size, help=SIZES)]
MERGE_DEFAULTS = {"schedule": None, "order": "paper", "proportional": True, "method": "tome"}
"""Defaults of the options that describe a merging one by one."""
MERGES = "Merge tokens: r=8 or keep=0.5,method=energy, the JSON of vitrail tune, or a directory of merging.save."
Merge = Annotated[Any, typer.Option("--merge", metavar="SETTINGS", parser=parse_merge, help=MERGES)]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Use random weights (always the same) instead of a download.")
]
Batch = Annotated[int, typer.Option("-b", "--batch-size", min=1, metavar="N", help="Images per batch.")]
Device = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option(help="Device; CUDA if available by default.", show_default=False)
]
Limit = Annotated[
    int, typer.Option(min=0, metavar="N", help="Maximum number of images, spread over the data; 0 for all.")
]
Folder = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Output directory.")]


def _choose_output(context: typer.Context, parameter: typer.CallbackParam, wanted: bool) -> None:
    """Set what this command prints, until it ends."""
    setattr(console.output, str(parameter.name), wanted)
    context.call_on_close(lambda: setattr(console.output, str(parameter.name), False))


JSON = typer.Option(
    "--json",
    callback=_choose_output,
    expose_value=False,
    rich_help_panel="Output",
    help="Print the results as JSON instead of text.",
)
QUIET = typer.Option(
    "--quiet",
    callback=_choose_output,
    expose_value=False,
    rich_help_panel="Output",
    help="Print errors only, and the JSON if asked for.",
)


def of_all_commands(json: Annotated[bool, JSON] = False, quiet: Annotated[bool, QUIET] = False) -> None:
    """Declare the options that every command has."""


def merge_options(given: Mapping[str, Any]) -> Settings:
    """Return the merging of a command's options: ``--merge``, or -r, --keep or --gflops and what goes with them."""
    amount = {name: given[name] for name in ("r", "keep", "gflops") if given[name] is not None}
    single = {name: given[name] for name in ("schedule", "order", "proportional", "method")}
    if given["merge"] is not None:
        if amount or single != MERGE_DEFAULTS:
            raise typer.BadParameter("--merge replaces -r, --keep, --gflops, --schedule, --order and --method.")
        chosen: Settings = given["merge"]
        return chosen
    if len(amount) > 1 or (not amount and given["method"] == "tome"):  # other methods may decide by themselves
        raise typer.BadParameter("Pass one of -r, --keep, --gflops and --merge, such as -r 16; -r 0 merges nothing.")
    return read_settings(amount | single)
