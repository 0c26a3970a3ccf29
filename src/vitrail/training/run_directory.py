"""The folder of a run: what is where, and how a trained model is read back.

    config.yaml                     everything that the run was asked for, resolved
    log.jsonl                       a line for each epoch, each evaluation, each start
    checkpoints/step-00001234/      what training goes on from; a model folder, too
    last/, best/                    model folders: the weights after the last epoch, and at the best evaluation

A model folder has ``config.json`` and ``model.safetensors``, as ``save_pretrained`` writes them, and
``labels.json``: the names of the classes, what the model expects of a picture, and how it was trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._atomic_files import held
from vitrail.adapters.registry import library_of
from vitrail.adapters.saved import load_saved, model_folder, named, read_config, read_labels, saved_library
from vitrail.analysis.roles import Disagreement
from vitrail.data.spec import InputSpec
from vitrail.errors import ModelLoadError, TrainingError
from vitrail.models.saving import CONFIG, write_whole
from vitrail.training.evaluation.result import Evaluation
from vitrail.training.log import read_log
from vitrail.training.objective.teacher import expected_by

SETTINGS, LOG, CHECKPOINTS = "config.yaml", "log.jsonl", "checkpoints"
BEST, LAST = "best", "last"
SHARDS = "shards"


@dataclass(frozen=True)
class Labels:
    """What travels with a trained model.

    Attributes:
        classes: names of the classes by column of labels.
        preprocessing: what the model expects of a picture or an array.
        trained: how it was trained, and how good it was at its evaluation.
        architecture: what ``config.json`` says of a model that is not ours.
        folder: where it was read from.
    """

    classes: dict[str, tuple[str, ...]]
    preprocessing: InputSpec | None
    trained: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()


@dataclass(frozen=True)
class Run:
    """A finished run: where it is, and how good the model was at the last evaluation.

    Attributes:
        folder: the run's folder.
        evaluation: the last evaluation, without confusion tables where it was read back from the log; None where there
            was nothing to evaluate on.
        best: score and step of the best one.
    """

    folder: Path
    evaluation: Evaluation | None = None
    best: dict[str, Any] | None = None

    @property
    def last(self) -> Path:
        """The folder of the last model."""
        return self.folder / LAST

    def load(self) -> tuple[nn.Module, Labels]:
        """Load the last model, with the names of its classes."""
        return load_trained(self.last)


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds anything, unless it is a run that may be replaced."""
    is_run = (folder / SETTINGS).is_file()
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not (is_run and overwrite):
        if not is_run:
            raise TrainingError(
                f"{folder} holds something that is no run, and nothing was changed; name another, out= (-o)"
            )
        raise TrainingError(
            f"{folder} holds a run already, and nothing was changed. Go on with it by resume=True (--resume), begin "
            "anew in its place by overwrite=True (--overwrite), or name another folder, out= (-o)"
        )


def keep_to_itself(folder: Path, until: ExitStack) -> None:
    """Make a run's folder, where it is not there, and keep it to this run until the end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        until.enter_context(held(folder))
    except BlockingIOError as error:
        raise TrainingError(
            f"{folder}: another run is at work there, and nothing was changed. Wait for it, or name another, out= (-o)"
        ) from error
    except OSError as error:
        raise _cannot_make(folder, error) from error


def claim(folder: Path, *, overwrite: bool) -> None:
    """Make the folder of a new run, without what is left of an old one."""
    check_free(folder, overwrite=overwrite)
    try:
        if overwrite and folder.exists():
            for name in (CHECKPOINTS, BEST, LAST, "tensorboard"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in (LOG, SETTINGS):
                (folder / name).unlink(missing_ok=True)
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_make(folder, error) from error


def _cannot_make(folder: Path, error: OSError) -> TrainingError:
    return TrainingError(f"{folder} could not be made ({error.strerror or error}); name another, out= (-o)")


def write_text(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise TrainingError(f"{path} could not be written ({error.strerror or error})") from error


def write_model(folder: Path, model: nn.Module, states: Mapping[str, Tensor], labels: Labels) -> None:
    """Write a model folder; ``states`` are the weights, which need not be those that the model has now."""
    expects = None if labels.preprocessing is None else asdict(labels.preprocessing)
    values = {"classes": labels.classes, "preprocessing": expects, "trained": labels.trained}
    library_of(labels.architecture).save(folder, model, states, labels.architecture, values)


def load_trained(path: str | Path) -> tuple[nn.Module, Labels]:
    """Load a trained model, in evaluation mode, with its labels: from a model folder, from a run, or by its name.

    Of a run the best model is taken where there was an evaluation, and else the last; name ``RUN/last`` for that one.
    """
    folder = model_of(named(path))
    model, told = load_saved(folder), saved_library(folder).describe(read_config(folder))
    values = read_labels(folder)
    expects = values.get("preprocessing")
    preprocessing = InputSpec.from_dict(expects) if expects else expected_by(model)
    classes = {name: tuple(names) for name, names in values.get("classes", {}).items()}
    return model, Labels(classes, preprocessing, values.get("trained", {}), told, folder)


def model_of(path: Path) -> Path:
    """Find the model in a folder; of a run that has none yet, say so."""
    try:
        return model_folder(path)
    except ModelLoadError:
        if (path / SETTINGS).is_file():
            folders = sorted((path / CHECKPOINTS).glob(f"step-*/{CONFIG}"))
            kept = f"; its newest checkpoint is {folders[-1].parent}, a model, too" if folders else ""
            raise ModelLoadError(
                f"{path} is a run that has no model yet{kept}. If nobody trains it now, go on with it by resume=True "
                "(--resume)"
            ) from None
        if (path / SHARDS).is_dir():
            raise ModelLoadError(
                f"{path} is a checkpoint of several processes that held a part of the model each; use {LAST} of the "
                "run, or go on with it by resume=True (--resume)"
            ) from None
        raise


def last_evaluation(folder: Path) -> Evaluation | None:
    """Read a run's last evaluation back from its log; None where there was none. The log has no confusion tables."""
    lines = read_log(folder / LOG, "evaluation") if (folder / LOG).is_file() else []
    if not lines:
        return None
    last = {name.name: lines[-1][name.name] for name in fields(Evaluation) if name.name in lines[-1]}
    columns = read_labels(model_of(folder / LAST)).get("classes", {})
    own = [names for column, names in columns.items() if f"task.{column}" not in last["calibration"]]
    last["classes"] = {
        answer: tuple(columns[answer.removeprefix("task.")] if answer.startswith("task.") else own[0])
        for answer in last["calibration"]
    }
    if last.get("disagreement") is not None:
        heads = last["disagreement"]
        rows = (torch.tensor(heads[name], dtype=torch.float64) for name in ("argmax", "divergence"))
        last["disagreement"] = Disagreement(tuple(heads["heads"]), *rows)
    return Evaluation(**{**last, "confusion": {}, "notes": tuple(last.get("notes", ()))})


def full(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put together what several processes hold parts of, on the host; all of them call it. The rest stays as it is."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return {
            name: value.full_tensor().cpu() if isinstance(value, DTensor) else value.detach()
            for name, value in states.items()
        }
