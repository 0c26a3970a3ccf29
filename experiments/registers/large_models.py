"""Long training of ViT-B models, measured at all their checkpoints.

    python -m experiments.registers.long --seconds 540      # repeat until it reports that training is finished
    python -m experiments.registers.long --plot             # write the README section and the plot from the rows

Each command resumes from the newest checkpoint, as ``vitrail train --resume`` does.
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

from experiments.common.cli import UNFINISHED, exit_on_error
from experiments.common.datasets import VARIABLE
from experiments.common.machine import git_commit, machine_info
from experiments.common.plots import COLORS, figure, lines
from experiments.common.readme import replace_section
from experiments.common.results import add_row, read_rows
from experiments.common.study import Rows, Study, to_json
from experiments.common.tables import markdown
from experiments.registers.high_norm_tokens import HEADINGS, table_cells
from experiments.registers.measure import measure_model, norm_fields
from experiments.registers.report import highest_norm, outliers_left
from experiments.registers.scenes import DataWithScenes
from experiments.registers.study import STUDY, register_arm
from vitrail._atomic_files import write_bytes
from vitrail.analysis.survey import survey
from vitrail.data import Dataset
from vitrail.errors import InvalidOption
from vitrail.training import Event, Run, evaluate, load_trained, read_log, train
from vitrail.training.interrupt import Interrupted
from vitrail.training.run_directory import CHECKPOINTS, LAST

HERE = Path(__file__).resolve().parent
ROWS = HERE / "long_run" / "results.jsonl"
RUNS = HERE.parents[1] / "runs" / "registers-long"
REQUIRED = (
    "arm", "epochs", "seconds", "accuracy", "over_training", "since", "norms", "power", "dense", "device", "commit",
)  # fmt: skip
SNAPSHOTS, PLOTTED = 10, 6
"""Checkpoints that are measured, and plotted, evenly spread over the run."""

NO_BREAK = "\N{NO-BREAK SPACE}"
HIGH_NORM_TITLE = "The 0.1 % of patch tokens with the highest norms in the last layer, artifacts or not:"
LR = {"adamw": 5e-4, "muon": 1e-3}
MASKED = 0.3
"""Share of patches that is masked for the loss on patches."""
OPTIMIZER_NAMES = {"adamw": "AdamW", "muon": "Muon"}


@dataclass(frozen=True)
class LargeRun:
    """Options of a run: recipe, number of registers, epochs, optimizer, weight of the loss on patches."""

    recipe: str = "labels"
    registers: int = 0
    epochs: int = 100
    optimizer: str = "adamw"
    patches: float = 0.0

    @property
    def name(self) -> str:
        """Name of the run in rows and tables."""
        by = OPTIMIZER_NAMES.get(self.optimizer, self.optimizer)
        return f"ViT-B, {' + '.join(self._losses)}, {by}, {self.registers} registers"

    @property
    def folder(self) -> str:
        """Name of its run directory."""
        return f"{'-'.join(self._losses).replace(' ', '-')}-{self.registers}-{self.epochs}-{self.optimizer}"

    @property
    def _losses(self) -> list[str]:
        weight = "" if self.patches == 1 else f"{self.patches:g} "
        return [self.recipe, *([f"{weight}patches"] if self.patches else [])]

    def fields(self, study: Study) -> dict[str, Any]:
        """Return the training options: those of the study, for a larger model and more epochs."""
        if self.patches and self.recipe != "dino":
            raise InvalidOption(f"--patches {self.patches:g} needs --recipe dino; got --recipe {self.recipe}")
        interval = max(1, self.epochs // SNAPSHOTS)
        masking = {"patches": self.patches, "hidden": MASKED} if self.patches else {}
        return {
            **study.fields(register_arm(self.registers)), "model": "vit_base_patch16", "optimizer": self.optimizer,
            "lr": LR.get(self.optimizer), "drop_path": 0.2, "recipe": self.recipe, "recipe_options": masking,
            "epochs": self.epochs, "save_every": interval, "evaluate_every": interval, "keep": 2 * SNAPSHOTS,
        }  # fmt: skip


def resume_training(
    folder: Path, options: Mapping[str, Any], data: DataWithScenes, seconds: float, device: str | None
) -> Run | None:
    """Train for some seconds, from the newest checkpoint if there is one; return None if training is not finished."""

    def log(event: Event) -> None:
        if event.kind == "epoch":
            epoch, loss = event.values["epoch"] + 1, event.values["loss"]
            typer.echo(f"epoch {epoch}  loss {loss:.3f}  {event.done:,} of {event.total:,} steps")

    given = {**options, "data": data.train, "validation": data.monitored(256), "device": device, "out": str(folder)}
    resume = any((folder / CHECKPOINTS).glob("step-*"))
    try:
        return train(resume=resume, overwrite=not resume, seconds=seconds, on_event=log, **given)
    except Interrupted:
        return None


# Results.


def measure_checkpoints(folder: Path, scenes: Dataset, device: torch.device) -> dict[str, Any]:
    """Return the norms by layer of every checkpoint, and the first epoch with artifacts."""
    per_epoch = read_log(folder / "log.jsonl", "epoch")[0]["step"]

    def load(path: Path) -> nn.Module:
        return load_trained(path)[0].to(device)

    models = {
        path.name.removeprefix("step-"): partial(load, path) for path in sorted((folder / CHECKPOINTS).glob("step-*"))
    }
    found = survey(models, scenes, batch_size=64)
    over_training = [
        {"epoch": int(entry.name) / per_epoch, **norm_fields(entry.norms.to_dict())}
        for entry in found.entries
        if entry.norms is not None
    ]
    return {"over_training": over_training, "since": None if found.first is None else int(found.first) / per_epoch}


def measure_run(folder: Path, name: str, data: DataWithScenes, device: str | None) -> dict[str, Any]:
    """Measure a finished run: once on the validation set, then on the scenes."""
    model, labels = load_trained(folder / LAST)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = "bf16" if place.type == "cuda" else "fp32"
    found = evaluate(folder / LAST, data.validation, device=device, dtype=dtype, seconds=0)
    log = read_log(folder / "log.jsonl", "epoch")
    return {
        "arm": name,
        "epochs": len(log),
        "seconds": log[-1]["seconds"],
        "accuracy": dict(found.accuracy),
        "learned": [(line["epoch"], line["score"]) for line in read_log(folder / "log.jsonl", "evaluation")],
        "losses": [line["losses"] for line in log],
        **measure_checkpoints(folder, data.scenes(), place),
        **measure_model(model.to(place), labels, data.scenes()),
    }


def section(rows: Rows, plot: str = "long_run/norms.png") -> str:
    """Return the tables of the runs, how they were measured, and the plot."""
    devices, commits = (sorted({row[name] or "unknown" for row in rows}) for name in ("device", "commit"))
    measured = f"One run each, on {', '.join(devices)}, commit {', '.join(commits)}."
    head = [
        "model", "epochs", "hours", "accuracy, %", "artifacts", "since epoch", "outliers, %", "highest norm / median",
        "planted 2 % at 5× found, %", "0.5 % at 5×", "LOST on keys, %", "mIoU, %",
        "outliers with test-time registers, %", "with random neurons",
    ]  # fmt: skip
    table = markdown([head, *(_line(row) for row in rows)])
    with_tokens = [row for row in rows if "tail" in row]
    if with_tokens:
        cells = ([row["arm"], f"{row['epochs']}", *table_cells(row["tail"])] for row in with_tokens)
        table += f"\n\n{HIGH_NORM_TITLE}\n\n{markdown([['model', 'epochs', *HEADINGS], *cells])}"
    return f"{table}\n\n{measured}\n\n![{_description(rows)}]({plot})"


def _description(rows: Rows) -> str:
    """Return what the plot shows, for readers who do not see it."""
    last = [max(layer["max"] / layer["50"] for layer in row["over_training"][-1]["layers"]) for row in rows]
    at_end = f"{min(last):.2f} to {max(last):.2f}" if len(rows) > 1 else f"{max(last):.2f}"
    return (
        f"Highest patch norm over the median by layer and epoch; at the end its largest value in any layer is {at_end}"
    )


def _line(row: Mapping[str, Any]) -> list[str]:
    treated = [outliers_left(row, when) for when in ("after", "control")]
    return [
        row["arm"], f"{row['epochs']}", f"{row['seconds'] / 3600:.2f}",
        f"{100 * next(iter(row['accuracy'].values())):.2f}", row["norms"]["verdict"],
        "–" if row["since"] is None else f"{row['since']:.0f}", f"{100 * row['norms']['outlier_share']:.2f}",
        f"{highest_norm(row):.2f}", f"{100 * row['power']['0.02']['5']:.0f}", f"{100 * row['power']['0.005']['5']:.0f}",
        f"{100 * row['dense']['keys']['fixed']:.1f}", f"{100 * row['dense']['miou']:.1f}",
        *("–" if one is None else f"{one:.2f}" for one in treated),
    ]  # fmt: skip


def plot_norms(rows: Rows, folder: Path) -> None:
    """Plot the highest norm over the median by layer, for some checkpoints of each run."""
    top = max(x["max"] / x["50"] for row in rows for one in row["over_training"] for x in one["layers"])
    with figure(folder / "norms.png", columns=len(rows), width=3.6 * len(rows)) as panels:
        for axes, row in zip(panels, rows, strict=True):
            every = row["over_training"]
            over = [every[round(at)] for at in np.linspace(0, len(every) - 1, min(PLOTTED, len(every)))]
            curves = {
                f"epoch {one['epoch']:.0f}": [[(at, x["max"] / x["50"]) for at, x in enumerate(one["layers"])]]
                for one in over
            }
            shades = {
                name: {"color": COLORS[0], "alpha": 0.2 + 0.8 * number / max(len(over) - 1, 1)}
                for number, name in enumerate(curves)
            }
            lines(axes, curves, "layer", "highest norm / median norm", styles=shades)
            axes.set(title=_title(row), ylim=(1, 1.05 * top))
            axes.set_xticks(range(2, len(over[0]["layers"]) + 1, 2))
            axes.legend(fontsize=8, ncols=2)


def _title(row: Mapping[str, Any]) -> str:
    """Wrap the name of a run to the width of its plot, between its parts."""
    parts = [*row["arm"].split(", "), f"{row['epochs']} epochs"]
    return fill(", ".join(part.replace(" ", NO_BREAK) for part in parts), 30).replace(NO_BREAK, " ")


def main(
    seconds: Annotated[float, typer.Option(help="Time limit; training stops with a checkpoint.")] = float("inf"),
    recipe: Annotated[str, typer.Option(help="labels or dino.")] = "labels",
    registers: Annotated[int, typer.Option(help="Number of registers.", min=0)] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Total epochs; the learning rate decays over them.")] = 100,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    patches: Annotated[
        float,
        typer.Option(
            min=0.0, help=f"With --recipe dino: weight of the loss on masked patches ({MASKED:.0%} are masked)."
        ),
    ] = 0.0,
    out: Annotated[Path, typer.Option(help="Folder of the run directories.")] = RUNS,
    rows: Annotated[Path, typer.Option(help="File of the result rows.")] = ROWS,
    plot: Annotated[bool, typer.Option(help="Train nothing; write tables and plot from the rows.")] = False,
    data: Annotated[Path | None, typer.Option(help=f"Folder of the datasets; or set {VARIABLE}.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of the code, if there is no checkout.")] = None,
) -> None:
    """Train a large model, or resume its training; measure it when it is finished. Needs a GPU."""
    if data is not None:
        os.environ[VARIABLE] = str(data)
    with exit_on_error("--rows or --out"):
        if plot:
            _write_section(rows)
        else:
            _train_and_measure(
                LargeRun(recipe, registers, epochs, optimizer, patches), seconds, out, rows, device, commit
            )


def _write_section(rows: Path) -> None:
    """Write the section and the plot: for the study's own rows into its README, for others next to them."""
    found = read_rows(rows, REQUIRED)
    if not found:
        raise InvalidOption(f"{rows} has no rows. Train a model first")
    page = HERE / "README.md" if rows.resolve() == ROWS else rows.parent / "README.md"
    plot = rows.parent / "norms.png"
    plot_norms(found, rows.parent)
    text = section(found, os.path.relpath(plot, page.parent))
    blank = "# Large models\n\n<!-- long -->\n<!-- /long -->\n"
    written = replace_section(page, text, "long", blank=blank)
    write_bytes(page, written.encode())
    typer.echo(f"{len(found)} rows of {rows}, in {page}")


def _train_and_measure(
    large: LargeRun, seconds: float, out: Path, rows: Path, device: str | None, commit: str | None
) -> None:
    if any((row["arm"], row["epochs"]) == (large.name, large.epochs) for row in read_rows(rows, REQUIRED)):
        typer.echo(f"Already trained; see {rows}.")
        return
    data, folder, options = STUDY.data(), out / large.folder, large.fields(STUDY)
    assert isinstance(data, DataWithScenes)
    rows.parent.mkdir(parents=True, exist_ok=True)  # fail before training if it cannot be written
    if resume_training(folder, options, data, seconds, device) is None:
        typer.echo(f"Stopped; {folder} has a checkpoint. Repeat the command to resume.")
        raise typer.Exit(UNFINISHED)
    row = {**measure_run(folder, large.name, data, device), "fields": to_json(options)}
    add_row(rows, {**row, **machine_info(), "commit": commit or git_commit()})
    typer.echo(f"Finished; results are in {rows}.")


if __name__ == "__main__":
    typer.run(main)
