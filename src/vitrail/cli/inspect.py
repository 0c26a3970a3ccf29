"""``vitrail inspect``: write a report about the artifact tokens of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from vitrail import report as reports
from vitrail._atomic_files import resolved
from vitrail._distributed import World, distributed
from vitrail._wording import counted
from vitrail.cli._shared import console, options, whole_datasets
from vitrail.cli._shared.media import check_sample, open_for
from vitrail.cli._shared.model import Loaded, load
from vitrail.cli._shared.output import OutputError, check_writable, write_text
from vitrail.cli._shared.prediction import predict
from vitrail.cli._shared.ranks import command
from vitrail.data import Dataset, open_dataset
from vitrail.embedding import survey_norms
from vitrail.errors import ImageError, UnsupportedInput
from vitrail.report import Report
from vitrail.report.page.formatting import number, percent
from vitrail.report.page.render import check_jinja
from vitrail.report.verdict import confidence_words

NAMED = 5
"""Skipped images that are printed by name; the report lists more."""

TIMEOUT = timedelta(hours=12)
"""How long ranks wait for each other: rank 0 computes probes when the others are done."""

EXAMPLES = (
    "vitrail inspect timm:vit_small_patch14_dinov2 photos/ --image-size 518 -o report.html",
    "vitrail inspect hf:facebook/dinov2-base pets.parquet --labels breed --limit 1000",
    "vitrail inspect timm:vit_tiny_patch16_224 --random-weights --no-probes",
    "vitrail inspect vitrail:audio sounds/ -o sounds.html",
    "On several devices: torchrun --nproc-per-node 4 -m vitrail inspect hf:facebook/dinov2-large photos/ --limit 0",
)

Labels = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of a parquet file with the classes.")]
Probes = Annotated[bool, typer.Option(help="Fit probes, which takes the longest.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of splits, draws and random weights.")]
PAGE = "Page to write, with its values as .json beside it; or .json."
Out = Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help=PAGE)]


def inspect(
    ctx: typer.Context,
    model: options.Model,
    images: options.Samples = None,
    out: Out = Path("report.html"),
    limit: options.Limit = 200,
    batch: options.Batch = 16,
    size: options.Size = None,
    labels: Labels = None,
    probes: Probes = True,
    cure: Annotated[bool, typer.Option(help="If there are artifacts, try test-time registers.")] = True,
    random_weights: options.RandomWeights = False,
    device: options.Device = None,
    seed: Seed = 0,
    engine: whole_datasets.Engine = "local",
    address: whole_datasets.Address = None,
    actors: whole_datasets.Actors = None,
) -> None:
    """Write a self-contained HTML page, and the same values as JSON beside it.

    With --engine ray, actors of a cluster count the norms of all images; these alone are written, as JSON.

    Existing files are overwritten, and only by complete ones. Unreadable images are skipped and named; the exit code is
    then 1.
    """
    if engine == "ray":
        _survey(ctx.params)
        return
    with session(out, device) as world:
        world.run(lambda: check_output(out, images or []))
        dataset = world.run(lambda: open_images(ctx.params))
        report = inspect_model(model, dataset, ctx.params, world)
        if report is None:
            return
        report.save(out)
        show(model, report)
        console.say(f"Report: {written(out)}", style="bold")
        console.answer(report.to_dict())
    if report.problems["num_skipped"] and world.world_size == 1:  # torchrun would report a crash
        raise typer.Exit(1)


def _survey(given: Mapping[str, Any]) -> None:
    """Count the norms of all images on a cluster, and write them as JSON."""
    name, out = given["model"], given["out"]
    with command():
        if out.suffix.lower() != ".json":
            raise OutputError(f"-o {out}: --engine ray writes norms alone, as JSON. Expected a name like norms.json.")
        check_output(out, given["images"] or [])
        dataset = open_images(given)
        with console.status(f"Loading {name}"):
            where = {"size": given["size"], "device": given["device"], "seed": given["seed"]}
            loaded = load(name, "inspect", random=given["random_weights"], **where)
        fitting = open_for(dataset, given["images"] or None, loaded.spec, **_data_options(given))
        with console.bars() as draw:
            found = survey_norms(
                loaded.model,
                fitting,
                batch=given["batch"],
                engine="ray",
                address=given["address"],
                actors=given["actors"],
                progress=lambda done, total: draw("images", done, total),
            )
        write_text(out, dumps(found.to_dict(), ensure_ascii=False, allow_nan=False) + "\n")
        share = percent(found.outlier_share)
        console.say(f"{found.verdict}: {share} of patch tokens in {counted(found.num_images, 'image')}", style="bold")
        console.say(f"Norms: {out}", style="bold")
        console.answer(found.to_dict())


def open_images(given: Mapping[str, Any]) -> Dataset:
    """Open the images of a command's options, and check before a model is loaded that one of them can be read."""
    dataset, reason = open_dataset(given["images"] or None, **_data_options(given)), None
    for index in range(len(dataset)):
        try:
            check_sample(dataset, index)
            return dataset
        except ImageError as error:
            reason = reason or error
    number = counted(len(dataset), dataset.noun.removesuffix("s"))
    raise ImageError(f"none of the {number} could be read. The first: {reason}")


def _data_options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"limit": given["limit"] or None, "labels": given["labels"] or (), "size": given["size"]}


def inspect_model(name: str, dataset: Dataset, given: Mapping[str, Any], world: World) -> Report | None:
    """Load a model and inspect it by a command's options; return the report on rank 0, None on the others."""

    def load_checked() -> Loaded:
        where = {"size": given["size"], "device": given["device"], "seed": given["seed"]}
        loaded = load(name, "inspect", random=given["random_weights"], **where)
        if loaded.size is not None:  # not every model takes another size
            predict(loaded, torch.zeros(1, *loaded.spec.shape))
        return loaded

    with console.status(f"Loading {name}"):
        loaded = world.run(load_checked)
    fitting = world.run(lambda: open_for(dataset, given["images"] or None, loaded.spec, **_data_options(given)))
    if given["random_weights"]:
        console.note(f"{name} has random weights here: the results say nothing about trained ones.")
    chosen = {"batch_size": given["batch"], "probes": given["probes"], "cure": given.get("cure", False)}

    def work() -> Report | None:
        try:
            with console.bars() as progress:
                return reports.inspect(
                    loaded.model, fitting, **chosen, seed=given["seed"], progress=progress, name=name
                )
        except torch.OutOfMemoryError as error:
            raise UnsupportedInput(
                f"Not enough memory for batches of {given['batch']} images. Use a smaller --batch-size or --image-size."
            ) from error

    return world.run(work)


@contextmanager
def session(out: Path, device: str | None) -> Iterator[World]:
    """Join the ranks that torchrun started, if any, of which rank 0 prints; exit with a message on Ctrl-C."""
    where = "cpu" if device == "cpu" else None  # missing CUDA is reported when a model is loaded, by all ranks at once
    unchanged = f"Interrupted: no report was written. An existing {out} is unchanged."  # files are written completely
    with (
        command(console.out, console.err, interrupted=unchanged),
        distributed(where, TIMEOUT, tensors=False) as world,
    ):
        yield world


def check_output(out: Path, inputs: Sequence[Path]) -> None:
    """Raise before any work is done if the page and its JSON cannot be written, or would overwrite an input."""
    if out.suffix.lower() not in (".html", ".htm", ".json"):
        raise OutputError(
            f"-o {out}: expected the name of a page, like {out.stem or 'report'}.html, or of a .json file."
        )
    if out.suffix.lower() != ".json":
        check_jinja()
    for path in (out, out.with_suffix(".json")):
        check_writable(path, "-o")
        if any(resolved(path) == resolved(read) for read in inputs):
            raise OutputError(f"-o {out}: {path} is an input and would be overwritten. Name another file.")


def written(out: Path) -> str:
    """Name the files that were written."""
    return str(out) if out.suffix.lower() == ".json" else f"{out}, with its values in {out.with_suffix('.json').name}"


def show(name: str, report: Report) -> None:
    """Print the verdict, the numbers behind it, and skipped images."""
    norms, problems, cure, onset = report.norms, report.problems, report.cure, report.norms["onset"]
    cured = "–"
    if "effect" in cure:
        cured = f"{percent(cure['after']['outlier_share'])} of patch tokens"
        if "outlier_share" in cure["control"]:
            cured += f"; {percent(cure['control']['outlier_share'])} with random neurons"
    rows = {
        "images": f"{report.data['images']}",
        "threshold of the norm": number(norms["threshold"]),
        "high-norm tokens": f"{percent(norms['outlier_share'])} of patch tokens",
        "since layer": "–" if onset is None else f"{onset} of {len(norms['per_layer'])}, counted from 0",
        "confidence": confidence_words(norms["confidence"], norms["num_images"]),
        "with test-time registers": cured,
        "skipped images": f"{problems['num_skipped']}",
        "images with non-finite values": f"{problems['num_not_finite_images']}",
    }
    console.say(report.verdict, style="bold")
    console.say(f"Next: {report.next_step.replace('`', '')}")
    known = report.model["name"]
    table = console.table("model", name if name == known else f"{name}, {known}", left=2)
    for title, value in rows.items():
        table.add_row(title, value)
    console.show(table)
    for entry in problems["skipped"][:NAMED]:
        console.error(f"Skipped {entry['reason']}")
    if problems["num_skipped"] > NAMED:
        console.error(f"… and {problems['num_skipped'] - NAMED} more that could not be read.")
