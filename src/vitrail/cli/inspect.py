"""``vitrail inspect``: does a model have artifact tokens, where, since when, what do they hold, what helps?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from vitrail._distributed import Crew, joined
from vitrail.cli import _console as console
from vitrail.cli import _options as options
from vitrail.cli._ranks import first_rank_prints, first_rank_reports
from vitrail.errors import UnsupportedInput

if TYPE_CHECKING:
    from vitrail.data import Collection
    from vitrail.report import Report

NAMED = 5
"""How many skipped pictures are named one by one; the report names more."""

PATIENCE = timedelta(hours=12)
"""How long processes wait for each other: the first one goes on with probes when the others are done."""

INSPECT_EPILOG = (
    "Examples:\n\n"
    "vitrail inspect timm:vit_small_patch14_dinov2 photos/ --size 518 -o report.html\n\n"
    "vitrail inspect hf:facebook/dinov2-base pets.parquet --labels breed --limit 1000\n\n"
    "vitrail inspect timm:vit_tiny_patch16_224 --random-weights --no-probes\n\n"
    "On several devices: torchrun --nproc-per-node 4 -m vitrail inspect timm:vit_large_patch14_dinov2 photos/ --limit 0"
)

Pictures = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="PICTURES_OR_DATA",
        help="Picture files, a folder of them or of class folders, or parquet files; the sample pictures by default.",
        show_default=False,
    ),
]
Limit = Annotated[
    int, typer.Option(min=0, metavar="N", help="Most pictures to look at, spread over the data; 0 for all.")
]
Labels = Annotated[str | None, typer.Option(metavar="COLUMN", help="The column of a parquet file with the classes.")]
Probes = Annotated[bool, typer.Option("--probes/--no-probes", help="Fit probes, which takes the longest.")]
Cure = Annotated[
    bool,
    typer.Option("--cure/--no-cure", help="Where there are artifacts, try test-time registers on the same pictures."),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of splits, draws and random weights.")]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The page; its values go beside it, as JSON.")]


@dataclass(frozen=True)
class Settings:
    """What to look at, and how; the same for every model of a comparison."""

    pictures: Sequence[Path]
    limit: int = 200
    batch: int = 16
    size: tuple[int, ...] | None = None
    labels: str | None = None
    probes: bool = True
    random: bool = False
    device: str | None = None
    seed: int = 0
    cure: bool = False

    def open(self) -> Collection:
        """Open the pictures, and make sure that one of them can be read before a model is loaded."""
        from vitrail.data import Preprocessing, open_collection

        collection = open_collection(
            self.pictures or None, limit=self.limit or None, labels=self.labels, size=self.size
        )
        next(collection.batches(Preprocessing((1, 1)), 1))
        return collection


def inspect(
    model: options.Model,
    pictures: Pictures = None,
    out: Out = Path("report.html"),
    limit: Limit = 200,
    batch: options.Batch = 16,
    size: options.Size = None,
    labels: Labels = None,
    probes: Probes = True,
    cure: Cure = True,
    random_weights: options.RandomWeights = False,
    device: options.DeviceOf = None,
    seed: Seed = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the values as JSON instead of the table.")] = False,
) -> None:
    """Look for artifact tokens in a model: whether there are any, where, since when, and what they hold.

    Writes a page that can be read without network, and the same values as JSON beside it. Files that are there already
    are replaced by complete ones only. Pictures that cannot be read are skipped and named, and the exit code is 1 then.
    """
    pixels = options.parse_size(size)
    settings = Settings(pictures or [], limit, batch, pixels, labels, probes, random_weights, device, seed, cure)
    with console.user_errors(), console.notes(), stoppable(out), processes(device) as crew:
        page = crew.together(lambda: check_page(out, settings.pictures))
        collection = crew.together(settings.open)
        report = run_inspect(model, collection, settings, crew)
        if report is None:
            return
        report.save(page)
        if json:
            console.say(report.to_json().rstrip())
        else:
            show(model, report)
            console.say(f"Report: {page}, with its values in {page.with_suffix('.json').name}", style="bold")
    if report.problems["num_skipped"] and crew.world == 1:  # torchrun would take it for a crash
        raise typer.Exit(1)


def run_inspect(name: str, collection: Collection, settings: Settings, crew: Crew) -> Report | None:
    """Load a model and inspect it; of several processes, the first one gets the report."""
    import torch
    from PIL import Image

    from vitrail.cli._model import load
    from vitrail.cli.asking import ask
    from vitrail.report import inspect as look

    def ready() -> Any:
        loaded = load(name, random=settings.random, size=settings.size, device=settings.device, seed=settings.seed)
        if settings.size is not None:
            ask(loaded, Image.new("RGB", list(settings.size[::-1])))  # not every model takes another size
        return loaded

    with console.err.status(f"Loading {name}"):
        loaded = crew.together(ready)
    if settings.random:
        console.note(f"{name} has random weights here: what is found says nothing about trained ones.")

    def work() -> Report | None:
        try:
            with console.bars() as progress:
                return look(
                    loaded.model,
                    collection,
                    batch_size=settings.batch,
                    probes=settings.probes,
                    cure=settings.cure,
                    seed=settings.seed,
                    progress=progress,
                    name=name,
                )
        except torch.OutOfMemoryError as error:
            raise UnsupportedInput(
                f"There is not enough memory for {settings.batch} pictures at once. Give a smaller --batch, or --size."
            ) from error

    return crew.together(work)


def check_page(out: Path, inputs: Sequence[Path]) -> Path:
    """Find out now, not after minutes of work, whether a page and its JSON can be written, and over nothing read."""
    from vitrail.cli._output import OutputError, check_writable

    if out.suffix.lower() not in (".html", ".htm"):
        raise OutputError(
            f"-o {out}: expected the name of a page, like {out.stem or 'report'}.html. Its values go beside it as JSON."
        )
    for path in (out, out.with_suffix(".json")):
        check_writable(path, "-o")
        if any(path.resolve() == read.resolve() for read in inputs):
            raise OutputError(f"-o {out}: {path} is read, and would be written over. Name another file.")
    return out


def show(name: str, report: Report) -> None:
    """Print the verdict, the numbers behind it, and what was skipped."""
    norms, problems = report.norms, report.problems
    console.say(report.verdict, style="bold")
    known = report.model["name"]
    table = Table(title=Text(name if name == known else f"{name}, {known}"), box=box.SIMPLE, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    share, onset, confidence = norms["outlier_share"], norms.get("onset"), norms.get("confidence")
    rows = {
        "pictures": f"{report.data['pictures']}",
        "threshold of the norm": _number(norms["threshold"]),
        "outliers": "–" if share is None else f"{100 * share:.3g} % of patch tokens",
        "since layer": "–" if onset is None else f"{onset} of {len(norms['per_layer'])}, counted from 0",
        "confidence": f"{100 * min(confidence, 0.999):.1f} %" if confidence else "–",
        "with test-time registers": _cured(report.cure),
        "skipped pictures": f"{problems['num_skipped']}",
        "pictures not finite": f"{problems['num_not_finite_pictures']}",
    }
    for title, value in rows.items():
        table.add_row(title, value)
    console.out.print(table)
    for entry in problems["skipped"][:NAMED]:
        console.error(f"Skipped {entry['reason']}")
    if problems["num_skipped"] > NAMED:
        console.error(f"… and {problems['num_skipped'] - NAMED} more that could not be read.")


def _cured(cure: Mapping[str, Any]) -> str:
    """Say what became of the outliers; a dash where nothing was tried."""
    if "effect" not in cure:
        return "–"
    after, control = (cure[when].get("outlier_share") for when in ("after", "control"))
    beside = "" if control is None else f"; {100 * control:.3g} % with random neurons"
    return f"{100 * after:.3g} % of patch tokens{beside}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


@contextmanager
def stoppable(out: Path) -> Iterator[None]:
    """Answer Ctrl-C with a sentence; files are written whole or not at all."""
    try:
        yield
    except KeyboardInterrupt as stop:
        console.error(f"Stopped: no report was written. If there was one at {out} before, it is still there.")
        raise typer.Exit(130) from stop


@contextmanager
def processes(device: str | None) -> Iterator[Crew]:
    """Join the processes that torchrun started, if it did; all but the first one are silent."""
    where = "cpu" if device == "cpu" else None  # that CUDA is missing is said when a model is loaded, by all at once
    with (
        first_rank_prints(console.out, console.err),
        first_rank_reports(),
        joined(where, PATIENCE, tensors=False) as crew,
    ):
        yield crew
