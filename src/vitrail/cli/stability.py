"""``vitrail stability``: gradients, residual branches and loss spikes of a run, as a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail._wording import counted
from vitrail.cli._shared import console
from vitrail.cli._shared.output import check_writable, write_atomically
from vitrail.cli._shared.ranks import command
from vitrail.drawing.plots import require_matplotlib
from vitrail.training.stability.plot import TITLES, plot_stability
from vitrail.training.stability.result import BRANCHES, Stability, read_stability

EXAMPLES = (
    "vitrail train --data photos/ --options '{depth: 24, layer_scale: 1e-5}' --diagnostics stability -o runs/deep",
    "vitrail stability runs/deep -o stability.png",
)


def stability(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or its log.jsonl.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Plot to write: png, svg or pdf.")
    ] = None,
) -> None:
    """Print for each layer its gradients, how much it adds to the residual stream, and what LayerScale leaves of it.

    The run must have been trained with --diagnostics stability. Gradients are those of the whole run, the other columns
    the last measurement; the plot shows all of them over the steps.
    """
    with command():
        if out is not None:
            check_writable(out, "-o")
            require_matplotlib(out.suffix.removeprefix("."))
        found = read_stability(run)
        _print(found)
        if out is not None:
            content = plot_stability(found, out.suffix.removeprefix("."))
            write_atomically(out, lambda file: file.write(content))
            console.say(f"Plot: {out}", style="bold")


def _print(found: Stability) -> None:
    columns = (*BRANCHES, *(f"{branch}_scale" for branch in BRANCHES))
    table = console.table("layer", "gradient", "largest", "attention", "MLP", "att. scale", "MLP scale")
    for row in found.rows():
        last = ["–" if name not in row else f"{row[name][-1]:.3g}" for name in columns]
        table.add_row(str(row["layer"]), f"{row['gradient']:.3g}", f"{row['largest_gradient']:.3g}", *last)
    console.out.print(table)
    console.say(f"{counted(len(found.loss), 'step')}, {counted(len(found.spikes), 'spike')} of the loss")
    for spike in found.spikes:
        steps = f"step {spike.first}" if spike.first == spike.last else f"steps {spike.first}–{spike.last}"
        ending = "" if spike.ended else ", to the end of the run"
        console.say(f"  {steps}: {spike.loss:.4g} after {spike.usual:.4g}{ending}")
    for branch, layers in found.held_back.items():
        if layers:
            numbers = ", ".join(map(str, layers))
            console.say(f"Held back: {TITLES[branch]} is scaled to less than a tenth in layers {numbers}")
