"""``python -m experiments NAME``: train what is missing of a study, or show what is there."""

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

from experiments.common.data import VARIABLE
from experiments.common.machine import PLAIN, told
from experiments.common.pages import EVIDENCE, write_pages
from experiments.common.running import Runner
from experiments.common.side_by_side import FAILED, LEFT, STOPPED, WRONG, gravest, side_by_side
from experiments.common.study import Study
from vitrail.errors import InvalidOption
from vitrail.training.interrupt import Interrupted, Stop

HERE = Path(__file__).resolve().parent
FOLDERS = sorted(path.parent.relative_to(HERE) for path in HERE.glob("**/study.py"))
NAMES = [folder.as_posix() for folder in FOLDERS if folder.name != "common"]
WORDS = sorted({*NAMES, *(name.partition("/")[0] for name in NAMES)})

app = typer.Typer(add_completion=False)
console = Console(highlight=False)


def say(text: str, of: str = "") -> None:
    """Print a line as it is, at once, however long it is; where there are several studies, with the name of its own."""
    console.print(f"{of}  {text}" if of else text, soft_wrap=True, markup=False)


def study_called(name: str) -> Study:
    """Find a study by the name of its folder."""
    found: Study = import_module(f"experiments.{name.replace('/', '.')}.study").STUDY
    return found


def names_of(word: str) -> list[str]:
    """Find the studies that a word means: all, one, or those in a folder."""
    wanted = word.rstrip("/")
    found = [name for name in NAMES if wanted == "all" or f"{name}/".startswith(f"{wanted}/")]
    if not found:
        raise typer.BadParameter(f"{word}: expected {', '.join(WORDS)} or all")
    return found


@app.command()
def main(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(help=f"Studies: {', '.join(WORDS)}, or all.")],
    tune: Annotated[bool, typer.Option(help="Only the search.")] = False,
    plot: Annotated[bool, typer.Option(help="Train nothing; write tables and plots from the rows.")] = False,
    reduced: Annotated[bool, typer.Option(help="A minute or two on a CPU, with drawn pictures: does it work?")] = False,
    arms: Annotated[str, typer.Option(metavar="REGEX", help="Only arms that match.")] = "",
    seeds: Annotated[str, typer.Option(metavar="0,1", help="Only these seeds.")] = "",
    seconds: Annotated[
        float,
        typer.Option(help="Start no run that would end later, by the longest so far; a first one is started anyway."),
    ] = float("inf"),
    processes: Annotated[
        int, typer.Option(min=1, help="So many at once share the runs; studies that measure time are done by one.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the rows are, in a folder for each study; by default where the study is."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help=f"The folder of the data; or {VARIABLE}.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    commit: Annotated[str | None, typer.Option(help="Of the code, where there is no checkout.")] = None,
) -> None:
    """Train what is missing of some studies. Rows are kept; asking again goes on.

    Ends with 1 if runs failed, 2 if something else is wrong, 3 if there was no time for some, and 130 if asked to stop.
    """
    if data is not None:
        os.environ[VARIABLE] = str(data)
    wanted = _checked(seeds, seconds, out, plot=plot, of_some=bool(arms or seeds), processes=processes)
    chosen = [name for word in names for name in names_of(word)]
    studies = {name: study_called(name).small() if reduced else study_called(name) for name in chosen}
    shared = [name for name in studies if processes > 1 and not studies[name].timed]
    tally, ended, until = Tally(many=len(chosen) > 1), 0, time.monotonic() + seconds
    try:
        with Stop.listening() as stop:
            if shared:
                ended = side_by_side(_own_command(context, shared), processes, say, stop)
            if ended == STOPPED:
                raise Interrupted("Stopped. Give the same command again to go on.")
            for name in [name for name in studies if name not in shared]:
                folder = _folder_of(name, out, reduced=reduced)
                with tally.of(name):
                    if plot:
                        show(studies[name], folder, evidence=EVIDENCE if folder == HERE / name else None)
                        continue
                    tell = partial(say, of=name if tally.many else "")
                    runner = Runner(studies[name], folder, until - time.monotonic(), device, commit, tell, stop)
                    runner.do(arms, wanted, only_tune=tune)
                    tally.add(runner)
                    conclude(name, runner)
    except Interrupted as stopped:
        say(str(stopped))
        raise typer.Exit(STOPPED) from stopped
    raise typer.Exit(gravest([ended, tally.concluded()]))


@dataclass
class Tally:
    """What went wrong in some studies, and what is left of them."""

    many: bool
    errors: Counter[str] = field(default_factory=Counter)
    left: int = 0
    wrong: bool = False

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Say what is wrong with one study; the others may be right."""
        try:
            yield
        except Interrupted:
            raise
        except PLAIN as error:
            self.wrong = True
            complain((f"{name}: " if self.many else "") + told(error, "--out"))

    def add(self, runner: Runner) -> None:
        """Count what a study's runs came to."""
        self.errors += runner.errors
        self.left += runner.left

    def concluded(self) -> int:
        """Say how many runs failed, and give the number that the command ends with."""
        if self.errors:
            kinds = "one error" if len(self.errors) == 1 else f"{len(self.errors)} different errors"
            complain(f"{self.errors.total()} runs failed, with {kinds}; their rows say why.")
        return FAILED if self.errors else WRONG if self.wrong else LEFT if self.left else 0


def _folder_of(name: str, out: Path | None, *, reduced: bool) -> Path:
    """Give the folder of a study's rows."""
    if out is not None:
        return out / name
    return HERE.parent / "runs" / "reduced" / name if reduced else HERE / name


def _own_command(context: typer.Context, names: list[str]) -> list[str]:
    """Give the command that does what this one was asked for, of some studies, by one process."""
    asked = {name: value for name, value in context.params.items() if name not in ("names", "processes")}
    options = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in asked.items()
        if value is not None and value is not False
    ]
    return [sys.executable, "-m", "experiments", *names, *options]


def _checked(
    seeds: str, seconds: float, out: Path | None, *, plot: bool, of_some: bool, processes: int
) -> tuple[int, ...] | None:
    """Look at what was asked for, before anything is done; give the seeds, or None for all."""
    if not all(re.fullmatch("[0-9]+", seed.strip()) for seed in seeds.split(",") if seeds):
        raise typer.BadParameter(f"--seeds {seeds}: expected whole numbers with commas between them, like 0,1")
    if not seconds >= 0:
        raise typer.BadParameter(f"--seconds {seconds}: expected a number that is not below zero")
    if plot and of_some:
        raise typer.BadParameter("--plot shows all rows; expected neither --arms nor --seeds with it")
    if plot and processes > 1:
        raise typer.BadParameter("--plot trains nothing; expected no --processes with it")
    files = [] if out is None else [path for path in (out, *out.parents) if path.is_file()]
    if files:
        raise typer.BadParameter(f"--out {out}: expected a folder, and {files[0]} is a file")
    return tuple(int(seed) for seed in seeds.split(",")) if seeds else None


def show(study: Study, folder: Path, evidence: Path | None) -> None:
    """Write the pages of a study from its rows."""
    if not folder.is_dir():
        raise InvalidOption(f"there is no folder {folder}; expected one with rows of {study.name}")
    rows = write_pages(study, folder, evidence=evidence)
    say(f"{study.name}: {rows} rows in {folder}" + ("" if rows else "; nothing to show yet"))


def complain(text: str) -> None:
    """Print what is wrong, as it is."""
    console.print(text, style="red", soft_wrap=True, markup=False)


def conclude(name: str, runner: Runner) -> None:
    """Say what is left to do for a study, where a line for each run does not."""
    if runner.left:
        say(f"{name}: {runner.left} runs are left: no time. Give the same command again.")
    elif runner.tried or runner.elsewhere:
        return
    elif not runner.there:
        say(f"{name}: nothing was asked for; it has no search.")
    else:
        say(f"{name}: all {runner.there} runs that were asked for are there, in {runner.out}. --plot writes the pages.")


if __name__ == "__main__":
    app()
