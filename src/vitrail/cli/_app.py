"""The Typer application and its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli._shared import console, options
from vitrail.cli._shared.ranks import exit_at_once
from vitrail.cli.bench import EPILOG as BENCH_EPILOG
from vitrail.cli.bench import bench
from vitrail.cli.compare import COMPARE_EPILOG, compare
from vitrail.cli.evaluate import EVALUATE_EPILOG, evaluate
from vitrail.cli.export import EPILOG as EXPORT_EPILOG
from vitrail.cli.export import export
from vitrail.cli.inspect import INSPECT_EPILOG, inspect
from vitrail.cli.train import TRAIN_EPILOG, train

app = typer.Typer(
    name="vitrail",
    help="Merge, inspect, train and benchmark the tokens of Vision Transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    with exit_at_once():
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
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Parse options of all commands."""


@app.command(
    epilog="Examples:\n\n"
    "vitrail merge timm:vit_base_patch16_224 photos/ -r 16 -o glass\n\n"
    "vitrail merge timm:vit_small_patch14_dinov2 cat.jpg --keep 0.25 --size 518\n\n"
    "vitrail merge hf:facebook/deit-small-patch16-224 cat.jpg --gflops 2.5 --schedule decreasing\n\n"
    "vitrail merge timm:vit_tiny_patch16_224 cat.jpg -r 16 --random-weights"
)
def merge(
    model: options.Model,
    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGES", help="Image files, folders, parquet files, shards, or hf:OWNER/NAME."),
    ],
    r: options.R = None,
    keep: options.Keep = None,
    gflops: options.Gflops = None,
    out: options.Folder = Path("glass"),
    schedule: options.Schedule = "constant",
    order: options.OrderOf = options.Order.paper,
    proportional: options.Proportional = True,
    method: options.Method = "tome",
    size: options.Size = None,
    random_weights: options.RandomWeights = False,
    device: options.DeviceOf = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Most images, spread over the data; 0 for all.")] = 0,
) -> None:
    """Merge a model's tokens on your images, and draw the groups as stained glass.

    Writes for each image the stained glass (one pane per remaining token) and a side-by-side view, and a summary with
    tokens per layer, FLOPs, and how close the merged model's output is to the unmerged one's.
    """
    settings = options.merge_options(r, keep, gflops, schedule, order, proportional, method)
    pixels = options.parse_size(size)
    with console.user_errors(), console.notes():
        from vitrail.cli.merge import run_merge

        summary = run_merge(
            model, images, settings, out, size=pixels, random=random_weights, device=device, limit=limit or None
        )
    if summary.skipped:
        raise typer.Exit(1)


@app.command(
    epilog="Examples:\n\nvitrail demo -o demo\n\nvitrail demo --model runs/student --pictures photos/ -o student"
)
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="RUN",
            help="A trained model: a run directory. By default the one bundled with Vitrail.",
            show_default=False,
        ),
    ] = None,
    pictures: Annotated[
        list[Path] | None,
        typer.Option(
            "--pictures",
            metavar="PATH",
            help="Images, or a folder of them, instead of the samples.",
            show_default=False,
        ),
    ] = None,
    out: options.Folder = Path("demo"),
) -> None:
    """Show a trained model's predictions while its tokens merge; takes seconds, without a download.

    Writes for each image a sheet with the predictions, the stained glass and the attention of special tokens, a report
    on the model, and a summary.
    """
    with console.user_errors(), console.notes():
        from vitrail.cli.demo import run_demo

        run_demo(out, model, pictures or ())


app.command(epilog=BENCH_EPILOG)(bench)
app.command(epilog=EXPORT_EPILOG)(export)
app.command(epilog=INSPECT_EPILOG)(inspect)
app.command(epilog=COMPARE_EPILOG)(compare)
app.command(epilog=TRAIN_EPILOG)(train)
app.command(epilog=EVALUATE_EPILOG)(evaluate)
