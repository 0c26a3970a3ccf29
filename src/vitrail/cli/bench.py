"""``vitrail bench``: options, the table, the JSON line, and the plot of a sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from vitrail.cli import console, options
from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from vitrail.bench import BenchResult, Row

COLUMNS = ("variant", "form", "ms", "images/s", "TFLOP/s", "peak MB", "ready s", "diff")
EPILOG = (
    "Examples:\n\n"
    "vitrail bench timm:vit_base_patch16_224 --r 16 --batch 256 --dtype bf16 --compile\n\n"
    "vitrail bench timm:vit_base_patch16_224 --r 16 --batch 1 --dtype bf16 --compile --graph\n\n"
    "vitrail bench timm:vit_large_patch16_224 --r 8 --batch 128 --dtype bf16 --train --json training.json\n\n"
    "vitrail bench timm:vit_small_patch16_224 --r 0,4,8,13 --batch 8 --device cpu --plot sweep.png"
)


def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="timm:NAME, or hf:REPO-OR-FOLDER.")],
    r: Annotated[
        str,
        typer.Option("-r", "--r", metavar="N", help="Tokens to merge in each layer; several with commas are a sweep."),
    ],
    batch: Annotated[
        str, typer.Option("-b", "--batch", metavar="N", help="Pictures in a batch; several with commas are a sweep.")
    ] = "64",
    dtype: Annotated[str, typer.Option(metavar="D", help="fp32, bf16 or fp16, for weights and computation.")] = "fp32",
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="Where to run; by default on CUDA if there is one.", show_default=False),
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="N or HxW", help="Input size in pixels.")] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Also measure every variant through torch.compile.")
    ] = False,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Also measure every variant with each block compiled by itself.")
    ] = False,
    graph: Annotated[
        bool,
        typer.Option("--graph", help="Also measure each of these forms recorded as a CUDA graph: for small batches."),
    ] = False,
    train: Annotated[bool, typer.Option("--train", help="A training step: forward, backward, AdamW.")] = False,
    autocast: Annotated[
        bool, typer.Option("--autocast", help="Weights stay in float32, computation is in --dtype.")
    ] = False,
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained/--random-weights",
            help="Trained weights or random ones. Speed does not depend on them, so nothing is fetched by default.",
        ),
    ] = False,
    schedule: options.Schedule = "constant",
    proportional: options.Proportional = True,
    attention: Annotated[
        str, typer.Option(metavar="A", help="PyTorch's own attention: auto, flash, cudnn, efficient or math.")
    ] = "auto",
    compile_mode: Annotated[
        str, typer.Option(metavar="M", help="Mode of torch.compile: default, or max-autotune-no-cudagraphs.")
    ] = "default",
    cold: Annotated[bool, typer.Option("--cold", help="Compile from empty caches, as on a new machine.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare the merged model with the reference.")
    ] = True,
    seconds: Annotated[float, typer.Option(metavar="S", help="Time for measuring, shared by all rows.")] = 10.0,
    limit: Annotated[
        float | None, typer.Option(metavar="S", help="Prepare no further form after this time, and measure.")
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the JSON here, too.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a sweep: png, svg or pdf.")
    ] = None,
) -> None:
    """Measure how fast merging makes a model, and how much of the possible speed-up that is.

    Three variants take turns: the model as its library runs it, merged, and sliced (the limit: as many tokens as
    merged, the others cut off for free). Prints a table, says what it means, and ends with one line of JSON.
    """
    pixels = options.parse_size(size)
    counts = {"r": parse_counts("--r", r, 0), "batch": parse_counts("--batch", batch, 1)}
    swept = [name for name, values in counts.items() if len(values) > 1]
    if len(swept) > 1:
        raise typer.BadParameter("A sweep is over one of --r and --batch; give a single number for the other.")
    if plot_file is not None and not swept:
        raise typer.BadParameter("--plot draws a sweep: give several values, like --r 0,4,8,16 or --batch 1,8,64.")
    settings: dict[str, Any] = {
        "forms": _forms(compile_, blocks, graph),
        "dtype": dtype,
        "device": device,
        "size": pixels,
        "train": train,
        "autocast": autocast,
        "pretrained": pretrained,
        "schedule": options.number_or_word(schedule),
        "proportional": proportional,
        "attention": attention,
        "compile_mode": compile_mode,
        "cold": cold,
        "check": check,
        "seconds": seconds,
        "limit": limit,
        "threads": threads,
    }
    with console.user_errors(), console.notes():
        _run(model, counts, swept, settings, json_file, plot_file)


def parse_counts(name: str, text: str, least: int) -> list[int]:
    """Read ``16``, or ``0,4,8,16`` for a sweep."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= least for part in parts):
        raise typer.BadParameter(
            f"{name} {text!r} is not a number of {least} or more. Expected one, like {name} 16, or several for a "
            f"sweep, like {name} 4,8,16."
        )
    values = [int(part) for part in parts]
    if len(set(values)) < len(values):
        python = " A list with one number for each layer is measured from Python: BenchConfig(model, r=(16, 16, 8, …))."
        raise typer.BadParameter(
            f"{name} {text!r} names a value twice. Give each value of a sweep once.{python if name == '--r' else ''}"
        )
    return values


def table(result: BenchResult) -> Table:
    """Make the table of one measurement."""
    made = Table(*COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(made.columns):
        column.justify, column.no_wrap = "left" if number < 2 else "right", True
    best = {variant: result.best(variant) for variant in result.config.variants}
    for row in result.rows:
        made.add_row(*cells(row), style="bold" if row is best[row.variant] else "")
    return made


def cells(row: Row) -> tuple[str, ...]:
    """Give a row of the table as text."""
    return (
        row.variant,
        row.form,
        f"{row.ms:.4g} ±{row.spread:.0%}",
        f"{row.images_per_s:.4g}" if row.images_per_s < 1000 else f"{row.images_per_s:.0f}",
        f"{row.tflops:.3g}",
        "–" if row.peak_mb is None else f"{row.peak_mb:.0f}",
        f"{row.ready_s:.2f}",
        "–" if row.difference is None else f"{row.difference:.1e}",
    )


def sweep_table(results: Sequence[BenchResult], name: str) -> Table:
    """Make the table that sums up a sweep: one line for each value, every variant in its best form."""
    variants = results[0].config.variants
    made = Table(
        name,
        "tokens",
        "GFLOPs",
        *(f"{variant} ms" for variant in variants),
        "speed-up",
        "efficiency",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in made.columns:
        column.justify, column.no_wrap = "right", True
    for result in results:
        rows = [result.best(variant) for variant in variants]
        made.add_row(
            str(getattr(result.config, name)),
            str(result.tokens_per_layer[-1]),
            f"{result.flops_after / 1e9:.3g}",
            *("–" if row is None else f"{row.ms:.4g}" for row in rows),
            *("–" if ratio is None else f"{ratio:.2f}" for ratio in (result.speedup, result.efficiency)),
        )
    return made


def _forms(compile_: bool, blocks: bool, graph: bool) -> tuple[str, ...]:
    from vitrail.bench import FORMS

    wanted = {"eager": True, "compiled": compile_, "blocks": blocks, "graph": graph}
    return tuple(form for form in FORMS if all(wanted[part] for part in form.split("-")))


def _run(
    model: str,
    counts: dict[str, list[int]],
    swept: Sequence[str],
    settings: dict[str, Any],
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    from vitrail.bench import BenchConfig
    from vitrail.bench.sweep import check_plot, plot, sweep
    from vitrail.cli.files import check_writable, write_atomically, write_text
    from vitrail.cli.model import load

    config = BenchConfig(model, r=counts["r"][0], batch=counts["batch"][0], **settings)
    config.check_here()
    for path, option in ((json_file, "--json"), (plot_file, "--plot")):
        if path is not None:
            check_writable(path, option)
    form = "" if plot_file is None else plot_file.suffix.lstrip(".").lower()
    if plot_file is not None:
        check_plot(form)
    name = swept[0] if swept else "r"
    results: list[BenchResult] = []
    failure: VitrailError | KeyboardInterrupt | None = None
    with console.err.status(f"Loading {model}") as status:
        loaded = load(model, random=not config.pretrained, size=config.size, device="cpu", shown=False)
        try:
            for result in sweep(config, name, counts[name], model=loaded.model, tell=lambda text: status.update(text)):
                status.stop()  # it would share a line with the results
                _print(result, legend=not results)
                results.append(result)
                status.start()
        except (VitrailError, KeyboardInterrupt) as error:  # what a sweep found so far is kept
            if not results:
                raise
            failure = error
    data = {"sweep": name, "runs": [result.to_dict() for result in results]} if swept else results[0].to_dict()
    line = json.dumps(data, ensure_ascii=False, allow_nan=False)
    if swept:
        console.out.print(sweep_table(results, name))
    try:
        if isinstance(failure, KeyboardInterrupt):
            console.note(f"Stopped after {len(results)} of {len(counts[name])} values of {name}; no file was written.")
        else:
            if plot_file is not None:
                write_atomically(plot_file, lambda file: file.write(plot(results, name, form)), "--plot")
                console.say(f"The plot is in {plot_file}")
            if json_file is not None:
                write_text(json_file, f"{line}\n", "--json")
    finally:
        typer.echo(line)  # also where a file could not be written: it was minutes of work
    if failure is not None:
        raise failure


def _print(result: BenchResult, legend: bool) -> None:
    from vitrail.bench.words import LEGEND, sentences, title

    console.say(title(result), style="bold")
    console.out.print(table(result))
    if legend:
        console.say(LEGEND, style="dim")
    for sentence in sentences(result):
        console.say(sentence)
    console.say("")
