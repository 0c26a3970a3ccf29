"""Large models for as long as there is time: trained by several commands, looked at over all their checkpoints.

    python -m experiments.registers.long --seconds 540      # again and again, until it says that it is trained
    python -m experiments.registers.long --plot             # the section of the README and the plot, from the rows

Each command goes on from the newest checkpoint, as ``vitrail train --resume`` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from experiments.common.data import VARIABLE
from experiments.common.machine import commit, ending_plainly, machine
from experiments.common.plots import COLOURS, figure, lines
from experiments.common.rows import add_row, read_rows
from experiments.common.study import Rows, Study, plain
from experiments.common.tables import markdown, rewritten
from experiments.registers import tail
from experiments.registers.looking import examine, norms_told
from experiments.registers.scenes import WithScenes
from experiments.registers.showing import left, longest
from experiments.registers.study import STUDY, arm
from vitrail.analysis.survey import survey
from vitrail.data.collection import Collection
from vitrail.errors import InvalidOption
from vitrail.models.saving import write_whole
from vitrail.training import Event, Run, evaluate, load_trained, read_log, train
from vitrail.training.interrupt import Interrupted
from vitrail.training.run_directory import CHECKPOINTS, LAST

HERE = Path(__file__).resolve().parent
ROWS = HERE / "long_run" / "results.jsonl"
RUNS = HERE.parents[1] / "runs" / "registers-long"
NEEDED = (
    "arm", "epochs", "seconds", "accuracy", "over_training", "since", "norms", "power", "dense", "device", "commit",
)  # fmt: skip
SNAPSHOTS, DRAWN = 10, 6
"""Checkpoints that are looked at, and drawn, evenly spread over the run."""


UNBROKEN = "\N{NO-BREAK SPACE}"
LONGEST = "The longest thousandth of the patch tokens in the last layer, artifacts or not:"
LR = {"adamw": 5e-4, "muon": 1e-3}
HIDDEN = 0.3
"""The share of patches that is hidden where answers about hidden ones are learned."""
WRITTEN = {"adamw": "AdamW", "muon": "Muon"}


@dataclass(frozen=True)
class Asked:
    """A run: what it learns from, how many registers it has, for how long, and by which optimiser."""

    recipe: str = "labels"
    registers: int = 0
    epochs: int = 100
    optimizer: str = "adamw"
    patches: float = 0.0

    @property
    def name(self) -> str:
        """What the run is called."""
        by = WRITTEN.get(self.optimizer, self.optimizer)
        return f"ViT-B, {' + '.join(self._learned)}, {by}, {self.registers} registers"

    @property
    def folder(self) -> str:
        """The folder that it is written to."""
        return f"{'-'.join(self._learned).replace(' ', '-')}-{self.registers}-{self.epochs}-{self.optimizer}"

    @property
    def _learned(self) -> list[str]:
        weight = "" if self.patches == 1 else f"{self.patches:g} "
        return [self.recipe, *([f"{weight}patches"] if self.patches else [])]

    def fields(self, study: Study) -> dict[str, Any]:
        """Give the study's recipe, for a larger model and a longer time."""
        if self.patches and self.recipe != "dino":
            raise InvalidOption(f"--patches {self.patches:g} is for --recipe dino; got --recipe {self.recipe}")
        now_and_then = max(1, self.epochs // SNAPSHOTS)
        hiding = {"patches": self.patches, "hidden": HIDDEN} if self.patches else {}
        return {
            **study.fields(arm(self.registers)), "model": "vit_base_patch16", "optimizer": self.optimizer,
            "lr": LR.get(self.optimizer), "drop_path": 0.2, "recipe": self.recipe, "recipe_options": hiding,
            "epochs": self.epochs, "save_every": now_and_then, "evaluate_every": now_and_then, "keep": 2 * SNAPSHOTS,
        }  # fmt: skip


def go_on(folder: Path, wanted: Mapping[str, Any], data: WithScenes, seconds: float, device: str | None) -> Run | None:
    """Train for some seconds, from the newest checkpoint if there is one; None where more is left to do."""

    def tell(event: Event) -> None:
        if event.kind == "epoch":
            epoch, loss = event.values["epoch"] + 1, event.values["loss"]
            typer.echo(f"epoch {epoch}  loss {loss:.3f}  {event.done:,} of {event.total:,} steps")

    given = {**wanted, "data": data.train, "validation": data.watched(256), "device": device, "out": str(folder)}
    begun = any((folder / CHECKPOINTS).glob("step-*"))
    try:
        return train(resume=begun, overwrite=not begun, seconds=seconds, on_event=tell, **given)
    except Interrupted:
        return None


# What came out.


def over_checkpoints(folder: Path, scenes: Collection, device: torch.device) -> dict[str, Any]:
    """Give the norms by layer of every checkpoint, in order, and the epoch since which there are artifacts."""
    per_epoch = read_log(folder / "log.jsonl", "epoch")[0]["step"]

    def loaded(path: Path) -> nn.Module:
        return load_trained(path)[0].to(device)

    models = {
        path.name.removeprefix("step-"): partial(loaded, path) for path in sorted((folder / CHECKPOINTS).glob("step-*"))
    }
    found = survey(models, scenes, batch_size=64)
    over = [
        {"epoch": int(entry.name) / per_epoch, **norms_told(entry.norms.to_dict())}
        for entry in found.entries
        if entry.norms is not None
    ]
    return {"over_training": over, "since": None if found.first is None else int(found.first) / per_epoch}


def row_of(folder: Path, name: str, data: WithScenes, device: str | None) -> dict[str, Any]:
    """Look at a run that has ended: once at the validation set, then at everything else."""
    model, labels = load_trained(folder / LAST)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    half = "bf16" if where.type == "cuda" else "fp32"
    found = evaluate(folder / LAST, data.validation, device=device, dtype=half, seconds=0)
    log = read_log(folder / "log.jsonl", "epoch")
    return {
        "arm": name,
        "epochs": len(log),
        "seconds": log[-1]["seconds"],
        "accuracy": dict(found.accuracy),
        "learned": [(line["epoch"], line["score"]) for line in read_log(folder / "log.jsonl", "evaluation")],
        "losses": [line["losses"] for line in log],
        **over_checkpoints(folder, data.scenes(), where),
        **examine(model.to(where), labels, data.scenes()),
    }


def section(rows: Rows, plot: str = "long_run/norms.png") -> str:
    """Write one line for each run, on what it was measured, and the plot."""
    devices, commits = (sorted({row[name] or "unknown" for row in rows}) for name in ("device", "commit"))
    measured = f"One run each, on {', '.join(devices)}, commit {', '.join(commits)}."
    head = [
        "model", "epochs", "hours", "accuracy, %", "artifacts?", "since epoch", "share of outliers, %",
        "longest over median", "2 % at 5× would be found, %", "0.5 % at 5×", "LOST with keys, %", "mIoU, %",
        "outliers with test-time registers, %", "with random neurons",
    ]  # fmt: skip
    table = markdown([head, *(_line(row) for row in rows)])
    looked = [row for row in rows if "tail" in row]
    if looked:
        tails = ([row["arm"], f"{row['epochs']}", *tail.cells(row["tail"])] for row in looked)
        table += f"\n\n{LONGEST}\n\n{markdown([['model', 'epochs', *tail.HEAD], *tails])}"
    return f"{table}\n\n{measured}\n\n![norms by layer and epoch]({plot})"


def _line(row: Mapping[str, Any]) -> list[str]:
    cures = [left(row, when) for when in ("after", "control")]
    return [
        row["arm"], f"{row['epochs']}", f"{row['seconds'] / 3600:.2f}",
        f"{100 * next(iter(row['accuracy'].values())):.2f}", row["norms"]["verdict"],
        "–" if row["since"] is None else f"{row['since']:.0f}", f"{100 * row['norms']['outlier_share']:.2f}",
        f"{longest(row):.2f}", f"{100 * row['power']['0.02']['5']:.0f}", f"{100 * row['power']['0.005']['5']:.0f}",
        f"{100 * row['dense']['keys']['fixed']:.1f}", f"{100 * row['dense']['miou']:.1f}",
        *("–" if one is None else f"{one:.2f}" for one in cures),
    ]  # fmt: skip


def draw(rows: Rows, folder: Path) -> None:
    """Draw how far the longest patch token is above the median, by layer, for each checkpoint of each run."""
    top = max(x["max"] / x["50"] for row in rows for one in row["over_training"] for x in one["layers"])
    with figure(folder / "norms.png", columns=len(rows), width=3.6 * len(rows)) as sides:
        for axes, row in zip(sides, rows, strict=True):
            every = row["over_training"]
            over = [every[round(at)] for at in np.linspace(0, len(every) - 1, min(DRAWN, len(every)))]
            curves = {
                f"epoch {one['epoch']:.0f}": [[(at, x["max"] / x["50"]) for at, x in enumerate(one["layers"], 1)]]
                for one in over
            }
            shades = {
                name: {"color": COLOURS[0], "alpha": 0.2 + 0.8 * number / max(len(over) - 1, 1)}
                for number, name in enumerate(curves)
            }
            lines(axes, curves, "layer", "longest patch over the median", styles=shades)
            axes.set(title=_title(row), ylim=(1, 1.05 * top))
            axes.set_xticks(range(2, len(over[0]["layers"]) + 1, 2))
            axes.legend(fontsize=8, ncols=2)


def _title(row: Mapping[str, Any]) -> str:
    """Give a run's name in lines as wide as its plot, broken between its parts."""
    parts = [*row["arm"].split(", "), f"{row['epochs']} epochs"]
    return fill(", ".join(part.replace(" ", UNBROKEN) for part in parts), 30).replace(UNBROKEN, " ")


def main(
    seconds: Annotated[float, typer.Option(help="Stop after so many, with a checkpoint.")] = float("inf"),
    recipe: Annotated[str, typer.Option(help="labels or dino.")] = "labels",
    registers: Annotated[int, typer.Option(help="How many.", min=0)] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="In all; the learning rate falls over them.")] = 100,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    patches: Annotated[
        float,
        typer.Option(
            min=0.0, help=f"With --recipe dino: weight of the loss on patches, of which {HIDDEN:.0%} are hidden."
        ),
    ] = 0.0,
    out: Annotated[Path, typer.Option(help="Where the runs are.")] = RUNS,
    rows: Annotated[Path, typer.Option(help="Where to note what came out.")] = ROWS,
    plot: Annotated[bool, typer.Option(help="Train nothing; write what the rows say.")] = False,
    data: Annotated[Path | None, typer.Option(help=f"The folder of the data; or {VARIABLE}.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    of: Annotated[str | None, typer.Option("--commit", help="Of the code, where there is no checkout.")] = None,
) -> None:
    """Go on with the run of a large model, which needs a GPU; when it has ended, look at it."""
    if data is not None:
        os.environ[VARIABLE] = str(data)
    with ending_plainly("--rows or --out"):
        if plot:
            _show(rows)
        else:
            _go_on_and_look(Asked(recipe, registers, epochs, optimizer, patches), seconds, out, rows, device, of)


def _show(rows: Path) -> None:
    """Write the section and the plot: of our rows into our page, of others into one beside them."""
    found = read_rows(rows, NEEDED)
    if not found:
        raise InvalidOption(f"{rows} has no rows; expected some that this command has noted. Train a model first")
    page = HERE / "README.md" if rows.resolve() == ROWS else rows.parent / "README.md"
    text = section(found, os.path.relpath(rows.parent / "norms.png", page.parent))
    blank = "# Large models, for long\n\n<!-- long -->\n<!-- /long -->\n"
    written = rewritten(page, text, "long", blank=blank)
    draw(found, rows.parent)
    write_whole(page, written.encode())
    typer.echo(f"{len(found)} rows of {rows}, in {page}")


def _go_on_and_look(asked: Asked, seconds: float, out: Path, rows: Path, device: str | None, of: str | None) -> None:
    if any((row["arm"], row["epochs"]) == (asked.name, asked.epochs) for row in read_rows(rows, NEEDED)):
        typer.echo(f"Trained and noted in {rows} already.")
        return
    data, folder, wanted = STUDY.data(), out / asked.folder, asked.fields(STUDY)
    assert isinstance(data, WithScenes)
    rows.parent.mkdir(parents=True, exist_ok=True)  # what cannot be noted would be known only when all is trained
    if go_on(folder, wanted, data, seconds, device) is None:
        typer.echo(f"Stopped; {folder} has a checkpoint. Give the same command again.")
        raise typer.Exit(3)
    row = {**row_of(folder, asked.name, data, device), "fields": plain(wanted)}
    add_row(rows, {**row, **machine(), "commit": of or commit()})
    typer.echo(f"Trained, and noted in {rows}.")


if __name__ == "__main__":
    typer.run(main)
