"""``vitrail bench``: measure how fast merging makes a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from vitrail.bench import MODES, VARIANTS, BenchConfig, BenchResult
from vitrail.bench.result import LEGEND, summary, title
from vitrail.bench.sweep import plot, sweep
from vitrail.cli._shared import console, options
from vitrail.cli._shared.model import load
from vitrail.cli._shared.output import check_writable, write_atomically, write_text
from vitrail.cli._shared.ranks import INTERRUPTED, command
from vitrail.data.media.modality import MODALITIES
from vitrail.drawing.plots import require_matplotlib
from vitrail.errors import VitrailError

COLUMNS = ("variant", "mode", "ms", "{samples}/s", "TMAC/s", "peak MB", "ready s", "diff")
EXAMPLES = (
    "vitrail bench timm:vit_base_patch16_224 --r 16 --batch-size 256 --dtype bf16 --compile",
    "vitrail bench timm:vit_base_patch16_224 --r 16 --batch-size 1 --dtype bf16 --compile --graph",
    "vitrail bench timm:vit_large_patch16_224 --r 8 --batch-size 8 --dtype bf16 --capture",
    "vitrail bench timm:vit_large_patch16_224 --r 8 --batch-size 128 --dtype bf16 --train -o training.json",
    "vitrail bench vitrail:video --r 12 --batch-size 8",
    "vitrail bench vitrail:tiny --merge r=4,8,method=energy --batch-size 8",
    "vitrail bench timm:vit_small_patch16_224 --r 0,4,8,13 --batch-size 8 --device cpu --plot sweep.png",
)
SWEEP = "; comma-separated values for a sweep."
MERGE_SWEEP = " Several values of r, keep or gflops for a sweep: r=4,8,method=energy."
PASSED = (
    "dtype", "device", "train", "autocast", "pretrained", "proportional", "attention", "compile_mode", "cold", "check",
    "seconds", "limit", "threads",
)  # fmt: skip
"""Options that `BenchConfig` takes as they are."""


def _parse_counts(text: str, name: str, least: int) -> list[int]:
    """Parse ``16``, or ``0,4,8,16`` for a sweep."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= least for part in parts):
        raise typer.BadParameter(
            f"{name} {text!r} is not a number of {least} or more. Expected one, like {name} 16, or several for a "
            f"sweep, like {name} 4,8,16."
        )
    values = [int(part) for part in parts]
    if len(set(values)) < len(values):
        python = " For one number per layer, use Python: BenchConfig(model, r=(16, 16, 8, …))." if name == "--r" else ""
        raise typer.BadParameter(f"{name} {text!r} repeats a value. Pass each value of a sweep once.{python}")
    return values


def parse_merges(text: str) -> list[str]:
    """Parse settings of a merge, or several values of one of them for a sweep."""
    found = [settings for name, settings in options.parse_sweep(text).items() if settings and name != "unmerged"]
    for settings in found:
        options.parse_merge(settings)
    return found or ["r=0"]


parse_r, parse_batch = partial(_parse_counts, name="--r", least=0), partial(_parse_counts, name="--batch-size", least=1)


def bench(
    ctx: typer.Context,
    model: options.Model,
    r: Annotated[
        Any, typer.Option("-r", "--r", metavar="N", parser=parse_r, help="Tokens to merge per layer" + SWEEP)
    ] = None,
    merge: Annotated[
        Any, typer.Option("--merge", metavar="SETTINGS", parser=parse_merges, help=options.MERGES + MERGE_SWEEP)
    ] = None,
    batch: Annotated[
        Any, typer.Option("-b", "--batch-size", metavar="N", parser=parse_batch, help="Images per batch" + SWEEP)
    ] = "64",
    dtype: Annotated[str, typer.Option(metavar="D", help="fp32, bf16 or fp16, for weights and computation.")] = "fp32",
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Device; CUDA if available.")] = None,
    size: options.Size = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Also measure with torch.compile.")] = False,
    blocks: Annotated[bool, typer.Option("--blocks", help="Also measure with each block compiled separately.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Also measure each mode as a CUDA graph.")] = False,
    capture: Annotated[
        bool, typer.Option("--capture", help="Also measure the models as vitrail.capture runs them.")
    ] = False,
    train: Annotated[bool, typer.Option("--train", help="A training step: forward, backward, AdamW.")] = False,
    autocast: Annotated[bool, typer.Option("--autocast", help="Weights in float32, computation in --dtype.")] = False,
    pretrained: Annotated[
        bool, typer.Option("--pretrained/--random-weights", help="Random by default: speed does not depend on weights.")
    ] = False,
    schedule: options.Schedule = "constant",
    proportional: options.Proportional = True,
    attention: Annotated[
        str, typer.Option(metavar="A", help="PyTorch's attention: auto, flash, cudnn, efficient or math.")
    ] = "auto",
    compile_mode: Annotated[
        str,
        typer.Option(metavar="M", help="Mode: default, reduce-overhead or max-autotune-no-cudagraphs."),
    ] = "default",
    cold: Annotated[bool, typer.Option("--cold", help="Compile from empty caches, as on a new machine.")] = False,
    check: Annotated[bool, typer.Option(help="Compare the merged model with the reference.")] = True,
    seconds: Annotated[float, typer.Option(metavar="S", help="Time budget for measuring, shared by all rows.")] = 10.0,
    limit: Annotated[float | None, typer.Option(metavar="S", help="Prepare no further mode after this time.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Also write the JSON here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Plot: png, svg or pdf.")] = None,
) -> None:
    """Time three variants interleaved: the model as its library runs it; merged; and sliced, the lower bound.

    The sliced model has as many tokens as the merged one and the others cut off for free. Prints a table and a summary,
    and ends with one line of JSON where the output goes to a file or a pipe.
    """
    if (r is None) == (merge is None):
        raise typer.BadParameter("Pass one of --r and --merge, such as --r 16 or --merge keep=0.5,method=energy.")
    if merge is not None and (schedule, proportional) != ("constant", True):
        raise typer.BadParameter(
            "--merge replaces --schedule and --proportional: write --merge r=8,schedule=decreasing."
        )
    counts = {"batch": batch} | ({"r": r} if merge is None else {"merge": merge})
    swept = [name for name, values in counts.items() if len(values) > 1]
    if len(swept) > 1:
        raise typer.BadParameter("Sweep either --r or --merge, or --batch-size; give a single value for the other.")
    if plot_file is not None and not swept:
        raise typer.BadParameter("--plot needs a sweep: give several values, like --r 0,4,8,16 or --batch-size 1,8,64.")
    wanted = {"eager": True, "compiled": compile_, "blocks": blocks, "graph": graph, "capture": capture}
    with command():
        config = BenchConfig(
            model,
            **{name: values[0] for name, values in counts.items()},
            modes=tuple(mode for mode in MODES if all(wanted[part] for part in mode.split("-"))),
            size=size,
            schedule=schedule,
            **{name: ctx.params[name] for name in PASSED},
        )
        name = swept[0] if swept else "batch"
        _run(config, name, counts[name], out, plot_file)


def table(result: BenchResult, samples: str = "images") -> Table:
    """Return the table of one benchmark, of inputs called ``samples``; the best row of each variant is bold."""
    made = console.table(*(column.format(samples=samples) for column in COLUMNS), left=2)
    made.columns[0].no_wrap = made.columns[1].no_wrap = True
    for row in result.rows:
        made.add_row(
            row.variant,
            row.mode,
            f"{row.ms:.4g} ±{row.spread:.0%}",
            f"{row.images_per_s:.4g}" if row.images_per_s < 1000 else f"{row.images_per_s:.0f}",
            f"{row.tflops / 2:.3g}",
            "–" if row.peak_mb is None else f"{row.peak_mb:.0f}",
            f"{row.ready_s:.2f}",
            "–" if row.difference is None else f"{row.difference:.1e}",
            style="bold" if row is result.best(row.variant) else "",
        )
    return made


def sweep_table(results: Sequence[BenchResult], name: str) -> Table:
    """Return the summary table of a sweep: one line per value, every variant in its best mode.

    Unless the batch size changes, the unmerged model is always the same, so it has no column.
    """
    variants = [variant for variant in VARIANTS if name == "batch" or variant != "unmerged"]
    times = [f"{variant} ms" for variant in variants]
    made = console.table(name, "tokens", "GMACs", *times, "speed-up", "efficiency", left=0)
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


def _run(
    config: BenchConfig, name: str, values: Sequence[int] | Sequence[str], out: Path | None, plot_file: Path | None
) -> None:
    config.check_here()
    for path, option in ((out, "-o"), (plot_file, "--plot")):
        if path is not None:
            check_writable(path, option)
    plot_format = "" if plot_file is None else plot_file.suffix.lstrip(".").lower()
    if plot_file is not None:
        require_matplotlib(plot_format)
    results: list[BenchResult] = []
    failure: VitrailError | KeyboardInterrupt | None = None
    with console.status(f"Loading {config.model}") as status:
        loaded = load(config.model, "bench", random=not config.pretrained, size=config.size, device="cpu")
        try:
            for result in sweep(config, name, values, model=loaded.model, tell=status.update):
                status.stop()  # it would share a line with the results
                console.say(title(result), style="bold")
                console.show(table(result, MODALITIES[loaded.spec.modality].plural))
                if not results:
                    console.say(LEGEND, style="dim")
                console.say("\n".join([*summary(result), ""]))
                results.append(result)
                status.start()
        except (VitrailError, KeyboardInterrupt) as error:  # keep the results so far
            if not results:
                raise
            failure = error
    data = results[0].to_dict()
    if len(values) > 1:
        data = {"sweep": name, "runs": [result.to_dict() for result in results]}
        console.show(sweep_table(results, name))
        times = [row.ms for result in results if (row := result.best("unmerged")) is not None]
        if name != "batch" and times:
            console.say(
                f"Unmerged: {median(times):.4g} ms, the median of {len(times)} runs ({min(times):.4g} to "
                f"{max(times):.4g}); each speed-up compares with its own run, which was interleaved."
            )
    line = json.dumps(data, ensure_ascii=False, allow_nan=False)
    shown = console.output.json or not (console.output.quiet or console.out.is_terminal)
    try:
        if isinstance(failure, KeyboardInterrupt):
            console.note(f"Interrupted after {len(results)} of {len(values)} values of {name}; no file was written.")
        else:
            if plot_file is not None:
                write_atomically(plot_file, lambda file: file.write(plot(results, name, plot_format)), "--plot")
                console.say(f"Plot: {plot_file}")
            if out is not None:
                write_text(out, f"{line}\n")
    except VitrailError:
        shown = True  # measuring took minutes
        raise
    finally:
        if shown:
            typer.echo(line)
    if isinstance(failure, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED) from failure
    if failure is not None:
        raise failure
