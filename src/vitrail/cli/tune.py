"""``vitrail tune``: the largest merge within a tolerance, or the best within a budget, on the user's own images."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitrail.cli._shared import console, options
from vitrail.cli._shared.model import load
from vitrail.cli._shared.output import check_writable
from vitrail.cli._shared.ranks import command
from vitrail.tuning import Tuning
from vitrail.tuning import tune as find_setting

EXAMPLES = (
    "vitrail tune timm:vit_small_patch16_224 photos/ --within 'agreement 0.99'",
    "vitrail tune vitrail:tiny photos/ --within 'kl 0.02' --method tome --method energy --search evolution",
    "vitrail tune hf:facebook/dinov2-small photos/ --within 'cosine 0.98' -o tune.json",
    "vitrail tune vitrail:video clips/ --within 'agreement 0.99'",
    "vitrail tune timm:vit_base_patch16_224 photos/ --gflops 9 --quality kl",
)


def tune(
    model: options.Model,
    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGES", help=options.SOURCES),
    ],
    within: Annotated[
        str | None,
        typer.Option(metavar="Q", help="Tolerance: agreement, kl, cosine, dense_error or accuracy_loss, and a bound."),
    ] = None,
    gflops: Annotated[
        float | None, typer.Option(metavar="G", help="Budget for one image, in 10⁹ multiply-adds; replaces --within.")
    ] = None,
    latency_ms: Annotated[
        float | None,
        typer.Option(
            "--latency", metavar="MS", help="Budget for one batch, measured on this machine; replaces --within."
        ),
    ] = None,
    quality: Annotated[str, typer.Option(metavar="Q", help="What to maximize within a budget.")] = "agreement",
    method: Annotated[
        list[str], typer.Option(metavar="NAME", help="Merging method; repeat it to choose from several.")
    ] = ["tome"],  # noqa: B006 (typer copies it)
    search: Annotated[Literal["greedy", "evolution", "policy"], typer.Option(help="How to search.")] = "greedy",
    labels: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Label column, where the quality needs labels.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Result, as JSON.")] = Path("tune.json"),
    seconds: Annotated[float, typer.Option(min=1, metavar="S", help="How long it may take.")] = 600.0,
    limit: Annotated[int, typer.Option(min=4, metavar="N", help="Maximum number of images.")] = 500,
    batch_size: options.Batch = 32,
    proportional: options.Proportional = True,
    size: options.Size = None,
    random_weights: options.RandomWeights = False,
    device: options.Device = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the split and of the search.")] = 0,
) -> None:
    """Compare merged models with the unmerged one on your images, without labels.

    A search proposes how many tokens to merge in each layer; images that it did not see decide. Ctrl-C ends the search
    and keeps the best setting so far.
    """
    with command():
        check_writable(out, "--out")
        with console.status(f"Loading {model}"):
            loaded = load(model, "tune", random=random_weights, size=size, device=device)
        with console.bars() as progress:
            found = find_setting(
                loaded.model,
                images,
                within,
                gflops=gflops,
                latency_ms=latency_ms,
                quality=quality,
                method=[options.parse_method(one) for one in method],
                search=search,
                labels=labels,
                limit=limit,
                batch_size=batch_size,
                seconds=seconds,
                seed=seed,
                proportional=proportional,
                on_progress=progress,
            )
        found.save(out)
        _print(found, out)
        console.answer(json.loads(out.read_text("utf-8")))


def _print(found: Tuning, out: Path) -> None:
    table = console.table("schedule", "tokens merged per layer", "GFLOPs", found.quality, left=2)
    for one in found.curve:
        table.add_row(one.family, " ".join(map(str, one.r)), f"{one.flops / 1e9:.3g}", f"{one.value:.4f}")
    console.show(table)
    ends = "" if found.interval is None else f" (95 % interval {found.interval[0]:.4f} to {found.interval[1]:.4f})"
    method, r = _method_text(found.config["method"]), found.config["r"]
    console.say(f"Chosen: {method}, merging {' '.join(map(str, r))} tokens per layer ({found.family} schedule)", "bold")
    if found.value is not None:
        console.say(f"{found.quality} {found.value:.4f} on {found.held_out} held-out images{ends}")
    console.say(f"{found.flops / 1e9:.3g} of {found.flops_unmerged / 1e9:.3g} GFLOPs")
    if found.speedup is not None:
        between = found.speedup_interval
        ends = "" if between is None else f" (95 % interval {between[0]:.2f} to {between[1]:.2f})"
        console.say(f"{found.speedup:.2f}× the throughput of the unmerged model{ends}, batch {found.batch}")
    for text in _notes(found):
        console.note(text)
    options = ["-r", ",".join(map(str, r)), "--method", shlex.quote(method)]
    options += [] if found.config["proportional"] else ["--no-proportional"]
    console.say(f"Apply it: {' '.join(['vitrail merge MODEL IMAGES', *options])}")
    console.say(f"In Python: vitrail.tuning.Tuning.load({str(out)!r}).apply(model)")


def _method_text(method: Any) -> str:
    """Return a method as ``--method`` takes it."""
    return method if isinstance(method, str) else json.dumps(method)


def _notes(found: Tuning) -> list[str]:
    """Return what limits the result."""
    notes = []
    if found.interrupted:
        notes.append("interrupted; this is the best setting so far")
    if found.value is None:
        notes.append("its quality on held-out images was not measured: only the tuning images chose it")
    if found.speedup is None:
        notes.append("its speed was not measured")
    elif found.is_slower:
        notes.append("it is slower than the unmerged model on this machine; try a larger batch, or vitrail bench")
    elif not found.is_faster:
        notes.append(
            "the difference in speed is within the noise of timing on this machine; try a larger batch, or "
            "vitrail bench"
        )
    return notes
