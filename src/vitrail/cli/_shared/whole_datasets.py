"""What ``vitrail embed`` and ``vitrail predict`` share: loading and merging the model, progress, and the last lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
import typer

from vitrail._wording import counted
from vitrail.cli._shared import console
from vitrail.cli._shared.model import Loaded, load
from vitrail.data.media.modality import MODALITIES, Modality
from vitrail.embedding import Progress
from vitrail.embedding.embedder import Core
from vitrail.embedding.output import Output, Skipped, skipped_name
from vitrail.embedding.run import Plan
from vitrail.errors import UnsupportedInput
from vitrail.surgery.saving import apply

NAMED = 5
"""Skipped samples that are printed by name; the side file lists all."""

Data = Annotated[
    list[str],
    typer.Argument(
        metavar="DATA", help="Image files, folders, parquet files, shards, hf:OWNER/NAME; also s3://, gs://."
    ),
]
Precision = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    typer.Option(help="How the model computes; float16 on a GPU by default, float32 on a CPU.", show_default=False),
]
Fit = Annotated[Literal["crop", "stretch"], typer.Option(help="Crop the center of images, or stretch whole images.")]
Exact = Annotated[bool, typer.Option("--exact-decoding", help="Decode JPEGs at full size even where less would do.")]
Batch = Annotated[
    int | None, typer.Option("-b", "--batch-size", min=1, metavar="N", help="Images per batch; 16, on a GPU 128.")
]
Workers = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Threads or processes that decode; one for each core by default.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a result of other settings.")]
Engine = Annotated[Literal["local", "ray"], typer.Option(help="This process, or actors of a Ray cluster.")]
Address = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Ray cluster; by default a new one here.")]
Actors = Annotated[int | None, typer.Option(min=1, metavar="N", help="Actors of Ray, each with the model.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of random weights.")]


def load_changed(given: Mapping[str, Any], command: str) -> Loaded:
    """Load the model of a command's options, in its precision, and apply its ``--merge``."""
    name = given["model"]
    with console.err.status(f"Loading {name}"):
        where = {"size": given["size"], "device": given["device"], "seed": given["seed"]}
        loaded = load(name, command, random=given["random_weights"], **where)
    if given["random_weights"]:
        console.note(f"{name} has random weights here: the results mean nothing.")
    if given["precision"] is None and loaded.device.type == "cuda":
        loaded.model.to(torch.float16)
    if given["merge"] is not None:
        apply(given["merge"], loaded.model)
    return loaded


class Shown:
    """A progress bar with throughput split into decoding and model; ``last`` is the latest state."""

    def __init__(self, draw: Callable[..., None], samples: Modality) -> None:
        self._draw = draw
        self._samples = samples
        self.last: Progress | None = None

    def update(self, state: Progress) -> None:
        """Draw a state."""
        speeds = f"decoding {state.decoding_per_s:,.0f}/s, model {state.model_per_s:,.0f}/s"
        self._draw(self._samples.plural, state.done, state.total, f"  {state.images_per_s:,.0f}/s ({speeds})")
        self.last = state


@contextmanager
def progress_of(batch: int | None, samples: Modality) -> Iterator[Shown]:
    """Yield a progress bar; a lack of memory is an error with what to do."""
    with console.bars() as draw:
        try:
            yield Shown(draw, samples)
        except torch.OutOfMemoryError as error:
            raise UnsupportedInput(
                f"not enough memory for batches of {batch or 'the default size'}; use a smaller --batch-size"
            ) from error


def conclude(out: str, rows: int, skipped: tuple[Skipped, ...], last: Progress | None, samples: Modality) -> None:
    """Print what was written, how fast, and what was skipped; exit with 1 if samples were skipped."""
    if last is not None and last.images:
        bound = "decoding" if last.decoding_per_s < last.model_per_s else "the model"
        many = samples.plural
        console.say(
            f"{counted(last.images, samples.noun)} in {last.seconds:,.1f} s: {last.images_per_s:,.1f} {many}/s. "
            f"Decoding reaches {last.decoding_per_s:,.1f} {many}/s with {counted(last.workers, 'worker')}, the model "
            f"{last.model_per_s:,.1f}; the run is bound by {bound}"
        )
    for _, _, reason in skipped[:NAMED]:
        console.error(f"Skipped {reason}")
    if len(skipped) > NAMED:
        console.error(f"… and {len(skipped) - NAMED} more that could not be read.")
    output = Output.of(out)
    if skipped:
        beside = skipped_name(output.name) if output.name else "skipped.csv"
        console.error(
            f"{counted(len(skipped), samples.noun)} could not be read; {beside} beside the result lists them."
        )
    console.say(f"Written: {out}, {counted(rows, 'row')}", style="bold")
    console.answer({"out": out, "rows": rows, "skipped": [{"name": one[1], "reason": one[2]} for one in skipped]})
    if skipped:
        raise typer.Exit(1)


def run(kind: type[Core], given: Mapping[str, Any], command: str, chosen: Mapping[str, Any]) -> None:
    """Run a core over a dataset by a command's options, and print what became of it."""
    out = given["out"]
    Output.of(out)  # before the model is loaded
    loaded = load_changed(given, command)
    name = f"{given['model']} (random weights, seed {given['seed']})" if given["random_weights"] else given["model"]
    plan = Plan.of(
        kind,
        {**chosen, "precision": given["precision"]},
        loaded.model,
        given["data"],
        given["size"],
        given["fit"],
        given["exact_decoding"],
        given["batch"],
        given["workers"],
        given["limit"] or None,
        name,
    )
    where = {one: given[one] for one in ("overwrite", "engine", "address", "actors")}
    samples = MODALITIES[loaded.spec.modality]
    with progress_of(given["batch"], samples) as show:
        rows, skipped = plan.write(out, progress=show.update, **where)
    conclude(out, rows, skipped, show.last, samples)


INTERRUPTED = "Interrupted. Finished shards are kept: run the same command again, and it computes the rest."
