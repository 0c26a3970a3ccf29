"""``python -m experiments.methods COMMAND``: compare merging methods on trained models.

    python -m experiments.methods train --models vit_s --seeds 0    # models (several processes may run side by side)
    python -m experiments.methods learn --models vit_s --seeds 0    # learned methods
    python -m experiments.methods measure --models vit_s --seeds 0  # accuracy and fidelity
    python -m experiments.methods tune --models vit_s --seeds 0     # settings by vitrail.tune
    python -m experiments.methods dense --models vit_s --seeds 0    # segmentation and boxes on Pets
    python -m experiments.methods time --models vit_s               # throughput: alone on the machine, seed 0
    python -m experiments.methods plot                              # tables and plots from the rows
    python -m experiments.methods learn,measure --models tiny       # one after the other, in one process
    python -m experiments.methods all --reduced                     # everything in a minute on a CPU

Every command skips what its rows already hold, so it can be repeated after an interrupt or at its time limit.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.common.cli import FAILED, UNFINISHED, exit_on_error
from experiments.common.datasets import VARIABLE
from experiments.methods.dense import DENSE, dense_subject
from experiments.methods.learn import learn
from experiments.methods.measure import ACCURACY, SPEED, Rows, measure_subject, time_subject
from experiments.methods.report import write_report
from experiments.methods.subjects import FULL, KINDS, SMALL, Size, load_subject, train_model
from experiments.methods.tuning import TUNED, tune_subject
from experiments.methods.variants import FEW, Variant, all_variants, dense_variants
from vitrail.errors import InvalidOption

HERE = Path(__file__).resolve().parent
STATES = HERE.parents[1] / "runs" / "methods"
COMMANDS = ("train", "learn", "measure", "tune", "dense", "time", "plot")

app = typer.Typer(add_completion=False)


@dataclass
class Work:
    """What a command works on.

    Attributes:
        rows: folder of the rows; ``states`` has models and learned methods.
        shares: the only budgets to measure and time; all if empty.
        failed: number of failures so far; ``unfinished`` if the time limit was reached.
    """

    rows: Path
    states: Path
    size: Size
    models: list[tuple[str, int]]
    pattern: str
    until: float
    device: str | None
    commit: str | None
    failed: int = 0
    unfinished: bool = False
    shares: tuple[float, ...] = ()

    def variants(self, kind: str) -> list[Variant]:
        """Return the variants for a kind of model."""
        inputs = KINDS[kind].inputs
        found = [one for one in all_variants() if inputs in one.needs and re.search(self.pattern, one.name)]
        return found if inputs == "images" else [one for one in found if one.name in FEW]

    def file(self, name: str) -> Rows:
        """Return the rows of a file."""
        return Rows(self.rows / name, self.commit)

    def report(self, lines: Iterator[str]) -> None:
        """Print lines as they come."""
        for line in lines:
            self.unfinished |= line == "out of time"
            typer.echo(line)


def _train(work: Work, kind: str, seed: int) -> None:
    began = time.monotonic()
    seconds = None if work.until == float("inf") else max(1.0, work.until - began)
    folder = train_model(kind, seed, work.states, work.size, work.device, seconds)
    typer.echo(f"{folder.name}  {time.monotonic() - began:.0f} s")


def _learn(work: Work, kind: str, seed: int) -> None:
    for variant in work.variants(kind):
        if variant.trains is None:
            continue
        if time.monotonic() > work.until:
            work.unfinished = True
            return
        try:
            file, seconds = learn(kind, seed, variant, work.states, work.size, work.device)
            typer.echo(f"{file.name}  {seconds:.0f} s")
        except Exception as error:  # a failed method must not stop the others
            work.failed += 1
            typer.echo(f"{kind}/{seed}/{variant.name}  {type(error).__name__}: {error}")


def _measure(work: Work, kind: str, seed: int) -> None:
    subject = load_subject(kind, seed, work.states, work.size, work.device)
    variants = [one for one in work.variants(kind) if not (one.slow and seed)]
    learned = work.states / "learned"
    size = work.size
    if work.shares:
        fine, coarse = (tuple(one for one in all_ if one in work.shares) for all_ in (size.fine, size.shares))
        size = replace(size, fine=fine, shares=coarse)
    work.report(measure_subject(subject, variants, size, work.file(ACCURACY), learned, work.until))


def _tune(work: Work, kind: str, seed: int) -> None:
    if KINDS[kind].inputs != "images":
        return
    subject = load_subject(kind, seed, work.states, work.size, work.device)
    names = [name for name in TUNED if re.search(work.pattern, name)]
    work.report(tune_subject(subject, names, work.size, work.file(ACCURACY), work.until))


def _dense(work: Work, kind: str, seed: int) -> None:
    if KINDS[kind].inputs != "images":
        return
    subject = load_subject(kind, seed, work.states, work.size, work.device)
    variants = [one for one in dense_variants() if re.search(work.pattern, one.name)]
    work.report(dense_subject(subject, variants, work.size, work.file(DENSE), work.until))


def _time(work: Work, kind: str, seed: int) -> None:
    if seed != KINDS[kind].seeds[0]:
        return  # throughput depends on shapes, hardly on weights
    subject = load_subject(kind, seed, work.states, work.size, work.device)
    accuracy, speed, learned = work.file(ACCURACY), work.file(SPEED), work.states / "learned"
    work.report(time_subject(subject, work.variants(kind), work.size, accuracy, speed, learned, work.until, TUNED,
                             work.shares))  # fmt: skip


STEPS: dict[str, Callable[[Work, str, int], None]] = {
    "train": _train, "learn": _learn, "measure": _measure, "tune": _tune, "dense": _dense, "time": _time,
}  # fmt: skip


@app.command()
def main(
    command: Annotated[str, typer.Argument(help=f"Some of {', '.join(COMMANDS)}, separated by commas, or all.")],
    models: Annotated[str, typer.Option(metavar="NAMES", help=f"Of {', '.join(KINDS)}; by default all.")] = "",
    seeds: Annotated[str, typer.Option(metavar="0,1", help="Only these seeds.")] = "",
    methods: Annotated[str, typer.Option(metavar="REGEX", help="Only variants that match.")] = "",
    shares: Annotated[str, typer.Option(metavar="0.6,0.5", help="Measure and time only these budgets.")] = "",
    seconds: Annotated[float, typer.Option(help="Time limit: begin nothing after it.")] = float("inf"),
    out: Annotated[Path | None, typer.Option(help="Folder of the rows; by default the study's own.")] = None,
    states: Annotated[Path | None, typer.Option(help="Folder of trained models and methods.")] = None,
    reduced: Annotated[bool, typer.Option(help="Check that it runs: a minute on a CPU.")] = False,
    data: Annotated[Path | None, typer.Option(help=f"Folder of the datasets; or set {VARIABLE}.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of the code, if there is no checkout.")] = None,
) -> None:
    """Run a command for some models and seeds. Exit codes: 1 if something failed, 2 for other errors, 3 for no time."""
    if data is not None:
        os.environ[VARIABLE] = str(data)
    torch.set_float32_matmul_precision("high")
    base = STATES.with_name("methods-reduced") if reduced else STATES
    rows = out or (base if reduced else HERE)
    with exit_on_error("--out"):
        commands = COMMANDS if command == "all" else tuple(command.split(","))
        if not set(commands) <= set(COMMANDS):
            raise InvalidOption(f"{command}: expected some of {', '.join(COMMANDS)}, separated by commas, or all")
        work = Work(
            rows, states or (out if reduced and out else base), SMALL if reduced else FULL, _chosen(models, seeds),
            methods, time.monotonic() + seconds, device, commit, shares=_budgets(shares),
        )  # fmt: skip
        for name in commands:
            if name == "plot":
                write_report(work.rows)
            else:
                for kind, seed in work.models:
                    STEPS[name](work, kind, seed)
    raise typer.Exit(FAILED if work.failed else UNFINISHED if work.unfinished else 0)


def _budgets(shares: str) -> tuple[float, ...]:
    """Return the budgets that were asked for."""
    try:
        found = tuple(float(share) for share in shares.split(",") if share.strip())
    except ValueError:
        found = (0.0,)
    if not all(0 < share <= 1 for share in found):
        raise InvalidOption(f"--shares takes shares of the multiply-adds between 0 and 1, such as 0.6; got {shares!r}")
    return found


def _chosen(models: str, seeds: str) -> list[tuple[str, int]]:
    """Return the models with their seeds."""
    names = [name.strip() for name in models.split(",") if name.strip()] or list(KINDS)
    unknown = [name for name in names if name not in KINDS]
    if unknown or not all(re.fullmatch("[0-9]+", seed.strip()) for seed in seeds.split(",") if seeds):
        raise InvalidOption(
            f"--models takes some of {', '.join(KINDS)}, and --seeds integers; got {models!r} and {seeds!r}"
        )
    wanted = {int(seed) for seed in seeds.split(",")} if seeds else None
    return [(name, seed) for name in names for seed in KINDS[name].seeds if wanted is None or seed in wanted]


if __name__ == "__main__":
    app()
