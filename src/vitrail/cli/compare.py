"""``vitrail compare``: two inspections side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail._distributed import Crew
from vitrail.cli import _console as console
from vitrail.cli import _options as options
from vitrail.cli.inspect import (
    Labels,
    Limit,
    Out,
    Pictures,
    Probes,
    Seed,
    Settings,
    check_page,
    processes,
    run_inspect,
    show,
    stoppable,
)

if TYPE_CHECKING:
    from vitrail.report import Report

COMPARE_EPILOG = (
    "Examples:\n\n"
    "vitrail compare before.json after.json -o compare.html\n\n"
    "vitrail compare timm:vit_small_patch14_dinov2 timm:vit_small_patch14_reg4_dinov2 photos/ --size 518"
)
WHAT = "A report's JSON (or its page, with the JSON beside it), or a model: timm:NAME, or hf:REPO-OR-FOLDER."


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help=WHAT)],
    second: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    pictures: Pictures = None,
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
    """Compare two reports, or two models that are inspected on the same pictures first.

    The options are for models, and those of `vitrail inspect`; reports are taken as they are.
    """
    names = (first, second)
    files = [Path(name) for name in names if is_report(name)]
    if pictures and len(files) == 2:
        raise typer.BadParameter("Both are reports, and pictures are for models. Leave the pictures out.")
    pixels = options.parse_size(size)
    settings = Settings(pictures or [], limit, batch, pixels, labels, probes, random_weights, device, seed)
    with console.user_errors(), console.notes(), stoppable(out), processes(device) as crew:
        page = crew.together(lambda: check_page(out, [*settings.pictures, *files, *_beside(files)]))
        reports = run_compare(names, settings, crew)
        if reports is None:
            return
        from vitrail.report import compare as side_by_side

        comparison = side_by_side(*reports)
        comparison.save(page)
        for name, report in zip(names, reports, strict=True):
            show(name, report)
        for remark in comparison.remarks:
            console.note(remark)
        console.say(comparison.verdict, style="bold")
        console.say(f"Comparison: {page}, with its values in {page.with_suffix('.json').name}", style="bold")


def run_compare(names: tuple[str, str], settings: Settings, crew: Crew) -> tuple[Report, Report] | None:
    """Read or make both reports; of several processes, the first one gets them."""
    from vitrail.report import Report

    def read() -> dict[str, Report]:
        return {name: Report.load(name) for name in names if is_report(name)}

    found = crew.together(read)  # mistakes in files are found before a model is loaded
    models = [name for name in names if name not in found]
    if models:
        collection = crew.together(settings.open)
        for name in dict.fromkeys(models):
            report = run_inspect(name, collection, settings, crew)
            if report is not None:
                found[name] = report
    return None if len(found) < len(set(names)) else (found[names[0]], found[names[1]])


def is_report(name: str) -> bool:
    """Whether a name is a file's, and not a model's."""
    return Path(name).suffix.lower() in (".json", ".html", ".htm") and not name.startswith(("timm:", "hf:"))


def _beside(files: list[Path]) -> list[Path]:
    """Give the values beside pages: these are what is read."""
    return [path.with_suffix(".json") for path in files]
