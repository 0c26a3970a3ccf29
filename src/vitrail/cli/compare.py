"""``vitrail compare``: two reports side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail import report as reports
from vitrail.adapters.registry import split_name
from vitrail.cli import inspect
from vitrail.cli._shared import console, options

EXAMPLES = (
    "vitrail compare before.json after.json -o compare.html",
    "vitrail compare timm:vit_small_patch14_dinov2 timm:vit_small_patch14_reg4_dinov2 photos/ --image-size 518",
)
EITHER = (
    "A report (its .json, or its page with the .json beside it) or a model: timm:NAME, hf:REPO-OR-FOLDER, "
    "torchvision:NAME, vitrail:RUN."
)


def compare(
    ctx: typer.Context,
    first: Annotated[str, typer.Argument(metavar="A", help=EITHER)],
    second: Annotated[str, typer.Argument(metavar="B", help="A report or a model, like A.")],
    images: options.Samples = None,
    out: inspect.Out = Path("compare.html"),
    limit: options.Limit = 200,
    batch: options.Batch = 16,
    size: options.Size = None,
    labels: inspect.Labels = None,
    probes: inspect.Probes = True,
    random_weights: options.RandomWeights = False,
    device: options.Device = None,
    seed: inspect.Seed = 0,
) -> None:
    """Inspect models by the options of `vitrail inspect`; load reports as they are."""
    names = (first, second)
    files = [Path(name) for name in names if is_report(name)]
    if images and len(files) == 2:
        raise typer.BadParameter("A and B are reports, and images are for models. Leave the images out.")
    inputs = [*(images or []), *files, *(path.with_suffix(".json") for path in files)]
    with inspect.session(out, device) as world:
        world.run(lambda: inspect.check_output(out, inputs))
        # damaged files are found before a model is loaded
        found = world.run(lambda: {name: reports.Report.load(name) for name in names if is_report(name)})
        if len(files) < 2:
            dataset = world.run(lambda: inspect.open_images(ctx.params))
            for name in dict.fromkeys(name for name in names if not is_report(name)):
                report = inspect.inspect_model(name, dataset, ctx.params, world)
                if report is not None:
                    found[name] = report
        if len(found) < len(set(names)):  # not rank 0
            return
        both = found[first], found[second]
        comparison = reports.compare(*both)
        comparison.save(out)
        for name, report in zip(names, both, strict=True):
            inspect.show(name, report)
        for remark in comparison.remarks:
            console.note(remark)
        console.say(comparison.verdict, style="bold")
        console.say(f"Comparison: {inspect.written(out)}", style="bold")
        console.answer(comparison.to_dict())


def is_report(name: str) -> bool:
    """Return whether a name is that of a file, not of a model."""
    return Path(name).suffix.lower() in (".json", ".html", ".htm") and split_name(name)[0] is None
