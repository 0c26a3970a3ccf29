"""``vitrail train``: options generated from the training configuration, progress, and the next steps."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail import training
from vitrail.adapters.saved import read_config, read_labels, read_targets
from vitrail.cli._shared import console
from vitrail.cli._shared.ranks import command
from vitrail.data.media.modality import MODALITIES
from vitrail.errors import InvalidOption
from vitrail.models.saving import ARCHITECTURE
from vitrail.training import Event, Run
from vitrail.training.config import OPTIONS, default_text, read_value, read_yaml
from vitrail.training.config.options import Option
from vitrail.training.evaluation.result import headlines
from vitrail.training.interrupt import Interrupted, OutOfTime

EXAMPLES = (
    "vitrail train --data photos/ --preset tiny -o runs/first",
    "vitrail train --data train.parquet --validation val.parquet --model timm:resnet18 -o runs/teacher",
    "vitrail train --data train.parquet --tokens cls,distillation,register=4 --teacher runs/teacher -o runs/student",
    "vitrail train --data pets.parquet --tasks breed,species --merge r=8,over_epochs=10",
    "vitrail train --data ages.csv --labels age --kind regression",
    "vitrail train --data photos/ --masks masks/ --kind dense --mask-classes sky,road,car",
    "vitrail train --data sounds/ --patch-size 8,8 --sampling '{rate: 8000}'",
    "vitrail train -o runs/first --resume",
    "On several devices: torchrun --nproc-per-node 4 -m vitrail train --data photos/",
)


def _run_option(*flags: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel="Run", show_default=False)


def train(
    config: Annotated[Path | None, _run_option("--config", metavar="FILE", help="YAML file with options.")] = None,
    set_: Annotated[
        list[str] | None,
        _run_option("--set", metavar="NAME=VALUE", help="An option in YAML syntax, such as --set clip=0.5."),
    ] = None,
    resume: Annotated[bool, _run_option("--resume", help="Resume the run in -o.")] = False,
    overwrite: Annotated[bool, _run_option("--overwrite", help="Replace the run in -o.")] = False,
    seconds: Annotated[
        float | None,
        _run_option("--seconds", metavar="S", help="Stop after this time with a checkpoint; exit code 3."),
    ] = None,
    **options: Any,
) -> None:
    """Write a run directory with the resolved config, a log, checkpoints, and the last and the best model.

    Options take precedence over the --config file; the preset decides everything else. --resume continues an
    interrupted run.
    """
    with command():
        given = {name: value for name, value in options.items() if value is not None}
        given = {**({} if config is None else read_yaml(config)), **given, **_read_pairs(set_ or [])}
        limits: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "seconds": seconds}
        try:
            with _progress() as on_event:
                run = training.train(None, on_event=on_event, **limits, **given)
        except Interrupted as stop:
            planned = isinstance(stop, OutOfTime)
            (console.note if planned else console.error)(str(stop))
            raise typer.Exit(3 if planned else 130) from stop
        _print_next_steps(run)
        console.answer({"run": str(run.folder), "best": run.best})


def _parameter(option: Option) -> inspect.Parameter:
    """Return the command-line parameter of a training option."""
    default = default_text(option)
    declared = typer.Option(
        *option.flags,
        help=f"{option.help} [default: {default}]" if default else option.help,
        metavar=option.kind.metavar or None,
        rich_help_panel=option.group,
        show_default=False,
    )
    annotation = Annotated[option.kind.cli_type | None, declared]  # type: ignore[name-defined]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_OWN = list(inspect.signature(train, eval_str=True).parameters.values())[:-1]
train.__signature__ = inspect.Signature([*_OWN, *map(_parameter, OPTIONS.values())])  # type: ignore[attr-defined]


def _read_pairs(pairs: list[str]) -> dict[str, Any]:
    """Return the options of ``--set NAME=VALUE``."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InvalidOption(f"--set {pair}: expected NAME=VALUE, such as --set clip=0.5")
        values[name.strip().replace("-", "_")] = read_value(text)
    return values


@contextmanager
def _progress() -> Iterator[Callable[[Event], None]]:
    """Yield a callback that shows the events of a run: progress bars, and a line for each evaluation."""
    with console.bars() as update:

        def show(event: Event) -> None:
            step = f"step {event.done} of {event.total}"
            if event.kind == "note":
                console.note(event.text)
            elif event.kind == "start":
                console.say(event.text)
            elif event.kind == "evaluation":
                console.say(f"{step}  {'  '.join(headlines(event.values))}")
            elif event.kind in ("reading", "evaluating"):
                update(f"{event.kind} {event.text}".strip(), event.done, event.total)
            elif event.kind == "train":
                loss = event.values.get("loss")
                detail = "" if loss is None else f", epoch {event.values['epoch'] + 1}, loss {loss:.3f}"
                update("training", event.done, event.total, detail)
            elif event.kind == "epoch" and not console.err.is_terminal:
                rate = event.values["images_per_s"]
                console.say(f"{step}  loss {event.values['loss']:.4f}  {rate:,.0f} {event.text}/s")

        yield show


def _print_next_steps(run: Run) -> None:
    """Print what the run wrote, and the commands to run next."""
    last, name = run.folder / "last", shlex.quote(str(run.folder / "last"))
    console.say(f"Run directory: {run.folder}", style="bold")
    best = ", best/ the one with the best score" if run.best else ""
    console.say(f"  last/ is the model after the last step{best}")
    if run.best:
        score, targets = run.best["score"], read_targets(read_labels(last))
        text = f"{score:.4f}" if targets else f"{100 * score:.2f} %"
        console.say(f"  best score {text} after step {run.best['step']}")
    steps = {f"evaluate {name} DATA": "accuracy of each head; --merge r=8 with merging"}
    config = read_config(last)
    if config.get("architecture") == ARCHITECTURE:  # a model of ours
        labels = read_labels(last)
        modality = (labels.get("preprocessing") or {}).get("modality", "image")
        noun = MODALITIES[modality].plural.upper().replace(" ", "_")
        if not labels.get("classes"):
            steps[f"train --model {name} --data LABELED"] = "fine-tune it"
        elif modality != "image":
            steps[f"merge vitrail:{name} {noun} -r 8"] = "drawings, predictions and cost of merging"
        elif labels["classes"].keys() - labels.get("targets", {}).keys():
            steps[f"demo --model {name}"] = "predictions and attention at several merge rates"
        steps[f"inspect vitrail:{name} {noun}"] = "artifact tokens, attention, features"
        steps[f"export vitrail:{name} -r 8 -o model.onnx"] = "a file that runs without Vitrail"
    console.say("Next:")
    for step, about in steps.items():
        console.say(f"  vitrail {step}")
        console.say(f"    {about}", style="dim")
