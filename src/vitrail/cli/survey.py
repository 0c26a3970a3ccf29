"""``vitrail survey``: artifact tokens of several models or checkpoints, on one page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from vitrail.adapters.saved import PREFIX, named
from vitrail.analysis.survey import survey as survey_models
from vitrail.cli import inspect
from vitrail.cli._shared import console, options
from vitrail.cli._shared.model import load
from vitrail.report.page.formatting import percent
from vitrail.report.surveying import SurveyReport
from vitrail.report.verdict import confidence_words
from vitrail.training.run_directory import CHECKPOINTS, LAST

EXAMPLES = (
    "vitrail survey runs/student --data photos/ -o survey.html",
    "vitrail survey timm:vit_small_patch14_dinov2 timm:vit_base_patch14_dinov2 --data photos/ --image-size 518",
)
MODELS = "Models by name, or run directories: all their checkpoints, by step."


def survey(
    ctx: typer.Context,
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODELS)],
    images: Annotated[
        list[Path] | None, typer.Option("--data", metavar="IMAGES", help=options.SAMPLES, show_default=False)
    ] = None,
    out: inspect.Out = Path("survey.html"),
    limit: options.Limit = 200,
    batch: options.Batch = 16,
    size: options.Size = None,
    random_weights: options.RandomWeights = False,
    device: options.Device = None,
    seed: inspect.Seed = 0,
) -> None:
    """Analyze the norms of several models on the same images, one model at a time.

    A model that fails is named in the table, and the others go on; the exit code is then 1.
    """
    with inspect.session(out, device):
        inspect.check_output(out, images or [])
        dataset = inspect.open_images({**ctx.params, "labels": None})

        def loader(name: str) -> Callable[[], nn.Module]:
            settings = {"random": random_weights, "size": size, "device": device, "seed": seed}
            return lambda: load(name, "inspect", **settings).model

        wanted = [checkpoint for name in models for checkpoint in checkpoints(name)]
        if random_weights:
            console.note("The models have random weights here: the results say nothing about trained ones.")
        with console.bars() as progress:
            found = survey_models(
                {name: loader(name) for name in dict.fromkeys(wanted)},
                dataset,
                batch_size=batch,
                progress=partial(_show, progress),
            )
        number = len(dataset)
        report = SurveyReport(found, f"{number} image{'' if number == 1 else 's'}")
        report.save(out)
        table = console.table("model", "verdict", "above threshold", "since layer", "confidence")
        for row in found.table():
            share = percent(row["outlier_share"]) if row["threshold"] is not None else "–"
            since = "–" if row["onset"] is None else str(row["onset"])
            sure = "–" if row["confidence"] is None else confidence_words(row["confidence"], number)
            table.add_row(row["name"], row["verdict"] or "failed", share, since, sure)
        console.show(table)
        for row in found.table():
            if row["problem"]:
                console.error(f"{row['name']}: {row['problem']}")
        console.say(report.verdict, style="bold")
        console.say(f"Next: {report.next_step.replace('`', '')}")
        console.say(f"Survey: {inspect.written(out)}", style="bold")
        console.answer(report.to_dict())
    if any(entry.norms is None for entry in found.entries):
        raise typer.Exit(1)


def _show(progress: Callable[[str, int, int], object], name: str, done: int, total: int | None) -> None:
    progress(name, done, total or 1)


def checkpoints(name: str) -> list[str]:
    """Return the names of a run's checkpoints by step and of its last model; other names stay."""
    folder = named(name)
    steps = sorted(folder.glob(f"{CHECKPOINTS}/step-*/config.json"))
    if not steps:
        return [name]
    last = folder / LAST / "config.json"
    return [f"{PREFIX}{file.parent}" for file in (*steps, *([last] if last.is_file() else []))]
