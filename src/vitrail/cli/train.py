"""``vitrail train``: from labelled pictures to a model folder, with progress, notes, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, TaskID

from vitrail.cli import _console as console
from vitrail.cli import _options as options
from vitrail.cli._ranks import first_rank_prints, first_rank_reports
from vitrail.errors import InvalidOption

if TYPE_CHECKING:
    from vitrail.training import Event, Run

TRAIN_EPILOG = (
    "Examples:\n\n"
    "vitrail train --data photos/ --preset tiny -o runs/first\n\n"
    "vitrail train --data train.parquet --validation val.parquet --model timm:resnet18 -o runs/teacher\n\n"
    "vitrail train --data train.parquet --tokens cls,distillation,register=4 --teacher runs/teacher -o runs/student\n\n"
    "vitrail train --data pets.parquet --tasks breed,species --merge r=8,over_epochs=10\n\n"
    "vitrail train -o runs/first --resume\n\n"
    "On several devices: torchrun --nproc-per-node 4 -m vitrail train --data photos/"
)

Text = str | None
_DATA, _MODEL, _RECIPE, _MACHINE, _FILES = "Data", "Model and losses", "Recipe", "Machine", "Files"


def _option(panel: str, help_: str, metavar: str | None = None, *names: str) -> Any:
    return typer.Option(*names, help=help_, metavar=metavar, rich_help_panel=panel, show_default=False)


def train(
    data: Annotated[
        Text, _option(_DATA, "Folder of class folders, parquet, shards, hf:OWNER/NAME …", "DATA", "--data")
    ] = None,
    validation: Annotated[
        Text, _option(_DATA, "The same, or a share to hold out (0.1), or none.", "DATA", "--validation")
    ] = None,
    labels: Annotated[Text, _option(_DATA, "The column of classes.", "COLUMN", "--labels")] = None,
    tasks: Annotated[Text, _option(_DATA, "Several columns to learn, with commas.", "COLUMNS", "--tasks")] = None,
    share: Annotated[float | None, _option(_DATA, "Share of the training data to use.", "F", "--share")] = None,
    model: Annotated[
        Text, _option(_MODEL, "One of ours, timm:NAME, hf:REPO, or a folder to go on from.", "M", "--model")
    ] = None,
    tokens: Annotated[
        Text, _option(_MODEL, "Special tokens, like cls,distillation,register=4.", "TOKENS", "--tokens")
    ] = None,
    heads: Annotated[Text, _option(_MODEL, "Of tasks: tokens, or shared by one class token.", "H", "--heads")] = None,
    teacher: Annotated[
        Text, _option(_MODEL, "A model to learn from: a run, timm:NAME, hf:REPO.", "M", "--teacher")
    ] = None,
    distillation: Annotated[Text, _option(_MODEL, "hard, soft or features.", "D", "--distillation")] = None,
    merge: Annotated[
        Text, _option(_MODEL, "Merging while training, like r=8,over_epochs=10.", "MERGE", "--merge")
    ] = None,
    image_size: Annotated[int | None, _option(_MODEL, "Pixels of a side.", "N", "--image-size")] = None,
    patch_size: Annotated[int | None, _option(_MODEL, "Pixels of a patch's side.", "N", "--patch-size")] = None,
    preset: Annotated[Text, _option(_RECIPE, "tiny, small (default) or full.", "P", "--preset")] = None,
    epochs: Annotated[int | None, _option(_RECIPE, "Times to go through the data.", "N", "--epochs")] = None,
    batch_size: Annotated[
        int | None, _option(_RECIPE, "Pictures in a step, over all devices.", "N", "--batch-size")
    ] = None,
    accumulate: Annotated[
        int | None, _option(_RECIPE, "Parts that a batch is computed in.", "N", "--accumulate")
    ] = None,
    optimizer: Annotated[Text, _option(_RECIPE, "adamw or muon.", "O", "--optimizer")] = None,
    lr: Annotated[float | None, _option(_RECIPE, "Highest learning rate.", "F", "--lr")] = None,
    weight_decay: Annotated[float | None, _option(_RECIPE, "Weight decay.", "F", "--weight-decay")] = None,
    augment: Annotated[Text, _option(_RECIPE, "none, flip, light, medium or strong.", "A", "--augment")] = None,
    mixup: Annotated[float | None, _option(_RECIPE, "Mixup's alpha; 0 for none.", "F", "--mixup")] = None,
    cutmix: Annotated[float | None, _option(_RECIPE, "Cutmix's alpha; 0 for none.", "F", "--cutmix")] = None,
    drop_path: Annotated[float | None, _option(_RECIPE, "Drop path of the last block.", "F", "--drop-path")] = None,
    ema: Annotated[float | None, _option(_RECIPE, "Decay of averaged weights; 0 for none.", "F", "--ema")] = None,
    seed: Annotated[int | None, _option(_RECIPE, "Seed of all that is random.", "N", "--seed")] = None,
    device: Annotated[Text, _option(_MACHINE, "cpu or cuda.", "D", "--device")] = None,
    dtype: Annotated[
        Text,
        _option(_MACHINE, "fp32, bf16 (autocast) or bf16-weights (all in bf16, from float32 weights).", "D", "--dtype"),
    ] = None,
    compile_: Annotated[Text, _option(_MACHINE, "whole, blocks, pictures or off.", "C", "--compile")] = None,
    shard: Annotated[Text, _option(_MACHINE, "Several devices: ddp, or fsdp for large models.", "S", "--shard")] = None,
    workers: Annotated[
        int | None, _option(_MACHINE, "Processes or threads that read pictures.", "N", "--workers")
    ] = None,
    out: Annotated[Text, _option(_FILES, "Folder of the run.", "DIR", "-o", "--out")] = None,
    config: Annotated[
        Path | None, _option(_FILES, "A YAML file with these and all other fields.", "FILE", "--config")
    ] = None,
    set_: Annotated[list[str] | None, _option(_FILES, "Any other field, like --set clip=0.5.", "F=V", "--set")] = None,
    resume: Annotated[bool, _option(_FILES, "Go on with the run in -o.", None, "--resume")] = False,
    overwrite: Annotated[bool, _option(_FILES, "Replace a run that is there.", None, "--overwrite")] = False,
    seconds: Annotated[
        float | None, _option(_FILES, "Stop after so many, with a checkpoint; --resume goes on.", "S", "--seconds")
    ] = None,
    tensorboard: Annotated[bool, _option(_FILES, "Log for TensorBoard, too.", None, "--tensorboard")] = False,
) -> None:
    """Train a model on labelled pictures: labels, tasks, a teacher, registers, merging, in one recipe.

    Options win over the file, and what neither says is decided by the preset. Writes a run's folder: the resolved
    config, a log, checkpoints, and the last and the best model. After a crash, --resume loses nothing.
    """
    named = dict(locals())
    for name in ("config", "set_", "resume", "overwrite", "seconds", "compile_", "tensorboard"):
        named.pop(name)
    given = {name: value for name, value in named.items() if value is not None}
    given |= {"compile": compile_} if compile_ is not None else {}
    given |= {"tensorboard": True} if tensorboard else {}
    with first_rank_prints(), console.user_errors(), console.notes():
        fields = {**_file(config), **given, **_set(set_ or [])}
        if isinstance(fields.get("validation"), str):
            fields["validation"] = options.number_or_word(fields["validation"])
        finished = _run(fields, resume, overwrite, seconds)
        _conclude(finished)


def _run(fields: dict[str, Any], resume: bool, overwrite: bool, seconds: float | None) -> Run:
    from vitrail import training
    from vitrail.training.interrupt import Interrupted, OutOfTime

    try:
        with _shown() as tell, first_rank_reports():
            return training.train(None, resume=resume, overwrite=overwrite, seconds=seconds, tell=tell, **fields)
    except Interrupted as stop:
        console.error(str(stop))
        raise typer.Exit(3 if isinstance(stop, OutOfTime) else 130) from stop


@contextmanager
def _shown() -> Iterator[Any]:
    """Give what shows the events of a run: bars for what goes on, a line for each evaluation."""
    with console.progress() as progress:
        tasks: dict[str, TaskID] = {}

        def tell(event: Event) -> None:
            if event.kind == "note":
                console.note(event.text)
            elif event.kind == "start":
                console.say(event.text)
            elif event.kind == "evaluation":
                console.say(f"{_epochs(event)}  {_scores(event.values)}")
            elif event.kind in ("reading", "evaluating", "train"):
                _bar(progress, tasks, event)
            elif event.kind == "epoch" and not console.err.is_terminal:
                rate = event.values["images_per_s"]
                console.say(f"{_epochs(event)}  loss {event.values['loss']:.4f}  {rate:,.0f} images/s")

        yield tell


def _bar(progress: Progress, tasks: dict[str, TaskID], event: Event) -> None:
    title = {"reading": f"Reading {event.text}", "evaluating": "Evaluating", "train": "Training"}[event.kind]
    if event.kind == "train" and "loss" in event.values:
        title = f"Training, epoch {event.values['epoch'] + 1}, loss {event.values['loss']:.3f}"
    key = f"{event.kind} {event.text}"
    if key not in tasks:
        tasks[key] = progress.add_task(title, total=event.total)
    finished = event.kind != "train" and event.done == event.total
    progress.update(tasks[key], description=title, completed=event.done, total=event.total, visible=not finished)


def _epochs(event: Event) -> str:
    return f"step {event.done} of {event.total}"


def _scores(values: dict[str, Any]) -> str:
    return "  ".join(f"{name} {100 * share:.2f} %" for name, share in values["accuracy"].items())


def _conclude(run: Run) -> None:
    """Say where things are, and what to do next."""
    from vitrail.adapters.saved import read_config, read_labels

    folder = run.folder
    console.say(f"The run is in {folder}", style="bold")
    console.say(
        "  last/ is the model after the last step" + (", best/ that of the best evaluation" if run.best else "")
    )
    if run.best:
        console.say(f"  best score {100 * run.best['score']:.2f} % after step {run.best['step']}")
    name = shlex.quote(str(folder / "last"))
    console.say("Next:")
    ours = _is_ours(folder / "last")
    merged = "; --merge r=8 with merging" if ours else ""
    console.say(f"  vitrail evaluate {name} DATA             # how good it is, head by head{merged}")
    if not ours:
        return
    told = read_config(folder / "last")
    if not told.get("num_classes") and not any(token.get("classes") for token in told.get("tokens", ())):
        console.say(f"  vitrail train --model {name} --data LABELLED  # finetune it")
    elif read_labels(folder / "last").get("classes"):
        console.say(
            f"  vitrail demo --model {name}              # its answers, merged more and more, and its attention"
        )
    console.say(f"  vitrail inspect vitrail:{name} PICTURES  # artifact tokens, attention, what tokens hold")
    console.say(f"  vitrail export vitrail:{name} -r 8 -o model.onnx")


def _is_ours(folder: Path) -> bool:
    from vitrail.models.saving import ARCHITECTURE, CONFIG

    return ARCHITECTURE in (folder / CONFIG).read_text(encoding="utf-8")


def _file(path: Path | None) -> dict[str, Any]:
    from vitrail.training.config.config import read_yaml

    return {} if path is None else read_yaml(path)


def _set(pairs: list[str]) -> dict[str, Any]:
    """Read ``name=value`` as YAML reads a value."""
    if not pairs:
        return {}
    from vitrail.training.config.config import read_value

    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InvalidOption(f"--set {pair}: expected a field and its value, like --set clip=0.5")
        values[name.strip().replace("-", "_")] = read_value(text)
    return values
