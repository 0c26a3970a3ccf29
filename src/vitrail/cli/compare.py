"""``vitrail compare``: two reports side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail._distributed import World
from vitrail.adapters.registry import split_name
from vitrail.cli._shared import console, options
from vitrail.cli.inspect import (
    Images,
    Labels,
    Limit,
    Out,
    Probes,
    Seed,
    Settings,
    check_output,
    interruptible,
    processes,
    run_inspect,
    show,
    written,
)

if TYPE_CHECKING:
    from vitrail.report import Report

COMPARE_EPILOG = (
    "Examples:\n\n"
    "vitrail compare before.json after.json -o compare.html\n\n"
    "vitrail compare timm:vit_small_patch14_dinov2 timm:vit_small_patch14_reg4_dinov2 photos/ --size 518"
)
EITHER = (
    "A report (its .json, or its page with the .json beside it) or a model: timm:NAME, hf:REPO-OR-FOLDER, "
    "torchvision:NAME, vitrail:RUN."
)


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help=EITHER)],
    second: Annotated[str, typer.Argument(metavar="B", help="A report or a model, like A.")],
    images: Images = None,
    out: Out = Path("compare.html"),
    limit: Limit = 200,
    batch: options.Batch = 16,
    size: options.Size = None,
    labels: Labels = None,
    probes: Probes = True,
    random_weights: options.RandomWeights = False,
    device: options.DeviceOf = None,
    seed: Seed = 0,
) -> None:
    """Compare two reports, or two models, which are inspected on the same images first.

    Options are those of `vitrail inspect` and apply to models; reports are taken as they are.
    """
    names = (first, second)
    reports = [Path(name) for name in names if is_report(name)]
    if images and len(reports) == 2:
        raise typer.BadParameter("A and B are reports, and images are for models. Leave the images out.")
    pixels = options.parse_size(size)
    settings = Settings(images or [], limit, batch, pixels, labels, probes, random_weights, device, seed)
    inputs = [*settings.images, *reports, *(path.with_suffix(".json") for path in reports)]
    with console.user_errors(), console.notes(), interruptible(out), processes(device) as world:
        world.run(lambda: check_output(out, inputs))
        both = load_or_inspect(names, settings, world)
        if both is None:
            return
        from vitrail.report import compare as compare_reports

        comparison = compare_reports(*both)
        comparison.save(out)
        for name, report in zip(names, both, strict=True):
            show(name, report)
        for remark in comparison.remarks:
            console.note(remark)
        console.say(comparison.verdict, style="bold")
        console.say(f"Comparison: {written(out)}", style="bold")


def load_or_inspect(names: tuple[str, str], settings: Settings, world: World) -> tuple[Report, Report] | None:
    """Load or make both reports; return them on rank 0, None on the others."""
    from vitrail.report import Report

    # damaged files are found before a model is loaded
    found = world.run(lambda: {name: Report.load(name) for name in names if is_report(name)})
    models = [name for name in names if name not in found]
    if models:
        collection = world.run(settings.open)
        for name in dict.fromkeys(models):
            report = run_inspect(name, collection, settings, world)
            if report is not None:
                found[name] = report
    return None if len(found) < len(set(names)) else (found[names[0]], found[names[1]])


def is_report(name: str) -> bool:
    """Return whether a name is that of a file, not of a model."""
    return Path(name).suffix.lower() in (".json", ".html", ".htm") and split_name(name)[0] is None
