"""``python -m experiments NAME``: train the missing runs of a study, or write its tables and plots."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.common.cli import FAILED, INTERRUPTED, INVALID, REPORTED, UNFINISHED, format_error, worst_exit_code
from experiments.common.datasets import VARIABLE
from experiments.common.parallel import run_parallel
from experiments.common.readme import write_readme
from experiments.common.runner import Runner
from experiments.common.study import Study
from vitrail.errors import InvalidOption
from vitrail.training.interrupt import Interrupted, Stop

HERE = Path(__file__).resolve().parent
FOLDERS = sorted(path.parent.relative_to(HERE) for path in HERE.glob("**/study.py"))
NAMES = [folder.as_posix() for folder in FOLDERS if folder.name != "common"]
CHOICES = sorted({*NAMES, *(name.partition("/")[0] for name in NAMES)})

app = typer.Typer(add_completion=False)
console = Console(highlight=False)


def log(text: str, study: str = "") -> None:
    """Print a line without wrapping or markup, after the name of its study if there are several."""
    console.print(f"{study}  {text}" if study else text, soft_wrap=True, markup=False)


def log_error(text: str) -> None:
    """Print an error in red."""
    console.print(text, style="red", soft_wrap=True, markup=False)


def load_study(name: str) -> Study:
    """Return a study by the name of its folder."""
    study: Study = import_module(f"experiments.{name.replace('/', '.')}.study").STUDY
    return study


def matching_names(word: str) -> list[str]:
    """Return the names of the studies that an argument selects: all, one, or those in a folder."""
    folder = word.rstrip("/")
    names = [name for name in NAMES if folder == "all" or f"{name}/".startswith(f"{folder}/")]
    if not names:
        raise typer.BadParameter(f"{word}: expected {', '.join(CHOICES)} or all")
    return names


@app.command()
def main(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(help=f"Studies: {', '.join(CHOICES)}, or all.")],
    tune: Annotated[bool, typer.Option(help="Run the search only.")] = False,
    plot: Annotated[bool, typer.Option(help="Train nothing; write tables and plots from the rows.")] = False,
    reduced: Annotated[bool, typer.Option(help="Check that the study runs: a minute or two on a CPU.")] = False,
    arms: Annotated[str, typer.Option(metavar="REGEX", help="Only arms that match.")] = "",
    seeds: Annotated[str, typer.Option(metavar="0,1", help="Only these seeds.")] = "",
    seconds: Annotated[
        float,
        typer.Option(help="Time limit: start no run that would exceed it, judged by the longest so far."),
    ] = float("inf"),
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes that share the runs; timed studies use one.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the rows, with a subfolder for each study; by default the studies' own."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help=f"Folder of the datasets; or set {VARIABLE}.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of the code, if there is no checkout.")] = None,
) -> None:
    """Train the missing runs of some studies. Rows are kept; repeat the command to resume.

    Exit codes: 1 if runs failed, 2 for other errors, 3 if there was no time for some runs, 130 if interrupted.
    """
    if data is not None:
        os.environ[VARIABLE] = str(data)
    chosen_seeds = _check_options(seeds, seconds, out, plot=plot, filtered=bool(arms or seeds), processes=processes)
    chosen = [name for word in names for name in matching_names(word)]
    studies = {name: load_study(name).at_reduced_size() if reduced else load_study(name) for name in chosen}
    parallel = [name for name in studies if processes > 1 and not studies[name].timed]
    summary, code, deadline = Summary(several=len(chosen) > 1), 0, time.monotonic() + seconds
    try:
        with Stop.listening() as stop:
            if parallel:
                code = run_parallel(_single_process_command(context, parallel), processes, log, stop)
            if code == INTERRUPTED:
                raise Interrupted("Interrupted. Repeat the command to resume.")
            for name in [name for name in studies if name not in parallel]:
                folder = _folder_of(name, out, reduced=reduced)
                with summary.errors_of(name):
                    if plot:
                        show(studies[name], folder)
                        continue
                    log_run = partial(log, study=name if summary.several else "")
                    runner = Runner(studies[name], folder, deadline - time.monotonic(), device, commit, log_run, stop)
                    runner.search_and_run(arms, chosen_seeds, search_only=tune)
                    summary.add(runner)
                    log_remaining(name, runner)
    except Interrupted as interrupted:
        log(str(interrupted))
        raise typer.Exit(INTERRUPTED) from interrupted
    raise typer.Exit(worst_exit_code([code, summary.exit_code()]))


@dataclass
class Summary:
    """Errors and unfinished runs of several studies."""

    several: bool
    errors: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    invalid: bool = False

    @contextmanager
    def errors_of(self, name: str) -> Iterator[None]:
        """Report the errors of one study, so that the others can continue."""
        try:
            yield
        except Interrupted:
            raise
        except REPORTED as error:
            self.invalid = True
            log_error((f"{name}: " if self.several else "") + format_error(error, "--out"))

    def add(self, runner: Runner) -> None:
        """Add the counts of a study's runner."""
        self.errors += runner.errors
        self.unfinished += runner.unfinished

    def exit_code(self) -> int:
        """Report the number of failed runs, and return the exit code."""
        if self.errors:
            kinds = "one error" if len(self.errors) == 1 else f"{len(self.errors)} different errors"
            log_error(f"{self.errors.total()} runs failed with {kinds}; see their rows.")
        return FAILED if self.errors else INVALID if self.invalid else UNFINISHED if self.unfinished else 0


def _folder_of(name: str, out: Path | None, *, reduced: bool) -> Path:
    """Return the folder of a study's rows."""
    if out is not None:
        return out / name
    return HERE.parent / "runs" / "reduced" / name if reduced else HERE / name


def _single_process_command(context: typer.Context, names: list[str]) -> list[str]:
    """Return the command line of one process for some studies, with the options of this one."""
    given = {name: value for name, value in context.params.items() if name not in ("names", "processes")}
    options = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in given.items()
        if value is not None and value is not False
    ]
    return [sys.executable, "-m", "experiments", *names, *options]


def _check_options(
    seeds: str, seconds: float, out: Path | None, *, plot: bool, filtered: bool, processes: int
) -> tuple[int, ...] | None:
    """Check the options before anything runs; return the seeds, or None for all."""
    if not all(re.fullmatch("[0-9]+", seed.strip()) for seed in seeds.split(",") if seeds):
        raise typer.BadParameter(f"--seeds {seeds}: expected integers separated by commas, such as 0,1")
    if not seconds >= 0:
        raise typer.BadParameter(f"--seconds {seconds}: expected a number of at least 0")
    if plot and filtered:
        raise typer.BadParameter("--plot shows all rows; use it without --arms and --seeds")
    if plot and processes > 1:
        raise typer.BadParameter("--plot trains nothing; use it without --processes")
    files = [] if out is None else [path for path in (out, *out.parents) if path.is_file()]
    if files:
        raise typer.BadParameter(f"--out {out}: expected a folder, but {files[0]} is a file")
    return tuple(int(seed) for seed in seeds.split(",")) if seeds else None


def show(study: Study, folder: Path) -> None:
    """Write the tables and plots of a study from its rows."""
    if not folder.is_dir():
        raise InvalidOption(f"folder {folder} does not exist; expected one with rows of {study.name}")
    rows = write_readme(study, folder)
    log(f"{study.name}: {rows} rows in {folder}" + ("" if rows else "; nothing to show yet"))


def log_remaining(name: str, runner: Runner) -> None:
    """Report what remains to do for a study, unless the lines of its runs already do."""
    if runner.unfinished:
        log(f"{name}: {runner.unfinished} runs remain, no time left. Repeat the command to resume.")
    elif runner.tried or runner.failed_elsewhere:
        return
    elif not runner.existing:
        log(f"{name}: nothing to do; the study has no search.")
    else:
        log(f"{name}: all {runner.existing} runs exist in {runner.out}. Write tables and plots with --plot.")


if __name__ == "__main__":
    app()
