"""The run directory: its files, and loading a trained model from it.

    config.yaml                     the resolved options
    log.jsonl                       a line for each start, epoch and evaluation
    .vitrail-run                    the marker of a run directory
    checkpoints/step-00001234/      what training resumes from; also model directories
    last/, best/                    model directories: after the last step, and at the best evaluation

A model directory has ``config.json`` and ``model.safetensors``, as ``save_pretrained`` writes them, and
``labels.json``: class names, preprocessing, and how the model was trained. If it was trained with a merging method that
learns, the method's weights are in ``method.safetensors``; tokens added to a trained model are in ``vitrail.json`` and
the file that it names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._atomic_files import directory_lock, write_bytes
from vitrail.adapters import find
from vitrail.adapters.registry import declared_spec, library_of, load_model, named_classes, split_name
from vitrail.adapters.saved import (
    PREFIX,
    load_saved,
    model_folder,
    named,
    read_config,
    read_labels,
    read_targets,
    saved_library,
)
from vitrail.analysis.roles import Disagreement
from vitrail.data.labels.targets import TargetSpec
from vitrail.data.sources.base import LABEL
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption, ModelLoadError, TrainingError, UnsupportedModel
from vitrail.models.saving import CONFIG
from vitrail.surgery import AddedTokens, Merging, added_tokens
from vitrail.surgery.merging import trained_methods
from vitrail.surgery.saving import TOKENS, Base, Settings, add_saved_tokens
from vitrail.training.config import OPTIONS, read_yaml
from vitrail.training.evaluation.result import Evaluation
from vitrail.training.log import read_log

SETTINGS, LOG, CHECKPOINTS = "config.yaml", "log.jsonl", "checkpoints"
BEST, LAST = "best", "last"
SHARDS = "shards"
TENSORBOARD = "tensorboard"
MARKER = ".vitrail-run"
"""File that marks a directory as a run: nothing else is ever overwritten."""
PREVIOUS = ".previous"
"""Directory of the run that is being overwritten, until the new one has a checkpoint."""
OWN = (CHECKPOINTS, BEST, LAST, LOG, SETTINGS, TENSORBOARD, MARKER)
"""What a run writes; the checkpoints move first, and the marker last."""


@dataclass(frozen=True)
class Labels:
    """Metadata of a trained model.

    Attributes:
        classes: class names by column of labels.
        preprocessing: preprocessing of images or arrays.
        trained: how it was trained, and its evaluation.
        architecture: content of ``config.json`` for models of other libraries.
        folder: where it was loaded from.
        targets: what columns hold that hold no classes: values with their scale, several classes at once, masks.
    """

    classes: dict[str, tuple[str, ...]]
    preprocessing: InputSpec | None
    trained: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    targets: dict[str, TargetSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A finished run.

    ``evaluation`` is the last one, without confusion matrices if it was read from the log; None without held-out data.
    ``best`` has score and step of the best one.
    """

    folder: Path
    evaluation: Evaluation | None = None
    best: dict[str, Any] | None = None

    @property
    def last(self) -> Path:
        """Directory of the last model."""
        return self.folder / LAST

    def load(self) -> tuple[nn.Module, Labels]:
        """Return the last model and its metadata."""
        return load_trained(self.last)


def is_run(folder: Path) -> bool:
    """Return whether a directory holds a run: by its marker, or, of an older version, by its files."""
    if (folder / MARKER).is_file():
        return True
    try:
        known = set(read_yaml(folder / SETTINGS)) <= set(OPTIONS)
    except InvalidOption:
        return False
    return known and (folder / CHECKPOINTS).is_dir()


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Raise if a directory is not empty, unless it holds a run that may be overwritten."""
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:  # a symlink loop, no permission, a name that is too long
        raise _cannot_write(folder, error) from error
    if taken and not is_run(folder) and not (folder / PREVIOUS / MARKER).is_file():
        raise TrainingError(
            f"{folder} is not empty and not a run directory; nothing was changed. Choose another one, out= (-o)"
        )
    if taken and not overwrite:
        raise TrainingError(
            f"{folder} already holds a run; nothing was changed. Resume it with resume=True (--resume), replace it "
            "with overwrite=True (--overwrite), or choose another directory, out= (-o)"
        )


def claim(folder: Path, until: ExitStack, *, resume: bool, overwrite: bool) -> None:
    """Create the run directory if needed, and lock it until the stack closes.

    A run that is overwritten moves aside; it comes back if this one ends without a checkpoint. Other files stay.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        until.enter_context(directory_lock(folder))
        _bring_back(folder)
        if resume:
            return
        check_free(folder, overwrite=overwrite)
        aside = folder / PREVIOUS
        until.callback(_bring_back, folder)
        present = [name for name in OWN if os.path.lexists(folder / name)]
        if present:
            aside.mkdir()
            for name in present:
                (folder / name).rename(aside / name)
        (folder / MARKER).touch()  # first, and at once: a run that is killed here is one that can be overwritten
        (folder / CHECKPOINTS).mkdir()
    except BlockingIOError as error:
        raise TrainingError(
            f"{folder} is in use by another run; nothing was changed. Wait for it, or choose another one, out= (-o)"
        ) from error
    except OSError as error:
        raise _cannot_write(folder, error) from error


def recover(folder: Path) -> None:
    """Bring back a run that was to be overwritten by one that was killed before its first checkpoint."""
    if (folder / PREVIOUS).is_dir():
        with suppress(OSError), directory_lock(folder):  # locked: the new run is at work
            _bring_back(folder)


def forget_previous(folder: Path) -> None:
    """Delete the run that was overwritten: the new one has a checkpoint."""
    shutil.rmtree(folder / PREVIOUS, ignore_errors=True)


def _bring_back(folder: Path) -> None:
    aside = folder / PREVIOUS
    if not aside.is_dir():
        return
    if any((folder / CHECKPOINTS).glob("step-*")):
        forget_previous(folder)
        return
    for name in OWN:
        if (aside / name).exists():
            _remove(folder / name)
            (aside / name).rename(folder / name)
        elif name in (LOG, SETTINGS, TENSORBOARD):
            _remove(folder / name)  # of the new run
    aside.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _cannot_write(folder: Path, error: OSError) -> TrainingError:
    return TrainingError(f"cannot write to {folder} ({error.strerror or error}); choose another directory, out= (-o)")


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically."""
    try:
        write_bytes(path, text.encode())
    except OSError as error:
        raise TrainingError(f"cannot write {path} ({error.strerror or error})") from error


def write_model(folder: Path, model: nn.Module, states: Mapping[str, Tensor], labels: Labels) -> None:
    """Write a model directory with the weights ``states``, which may differ from the model's current ones.

    Those of a merging method are in a file of their own, once it has learned: `load_trained` returns the model without
    merging. Added tokens are in the settings beside the model, and `load_trained` adds them again.
    """
    expects = None if labels.preprocessing is None else asdict(labels.preprocessing)
    values = {"classes": labels.classes, "preprocessing": expects, "trained": labels.trained}
    if labels.targets:
        values["targets"] = {column: target.to_dict() for column, target in labels.targets.items()}
    own, method_states = trained_methods.split_states(states)
    own, added_states = added_tokens.split_states(own)
    if method_states and ("passes" not in method_states or bool(method_states["passes"])):
        folder.mkdir(parents=True, exist_ok=True)
        trained_methods.save_method(Merging.of(model).method, folder, method_states)
    library_of(labels.architecture).save(folder, model, own, labels.architecture, values)
    if added_states:
        specs, _ = AddedTokens.of(model).saved()
        named = {f"{TOKENS}.{name}": value for name, value in added_states.items()}
        Settings({TOKENS: specs}, named, Base.of(model, find(model), weights=False)).write(folder)


@checked
def load_trained(path: str | Path) -> tuple[nn.Module, Labels]:
    """Return a trained model in evaluation mode and its metadata, from a model or run directory or by name.

    For a run, this is the best model if there is one, and else the last; ``RUN/last`` is always the last.
    """
    folder = model_of(named(path))
    model, architecture = load_saved(folder), saved_library(folder).describe(read_config(folder))
    add_saved_tokens(model, folder)
    values = read_labels(folder)
    expects = values.get("preprocessing")
    preprocessing = InputSpec.from_dict(expects) if expects else declared_spec(model)
    classes = {name: tuple(names) for name, names in values.get("classes", {}).items()}
    trained = values.get("trained", {})
    return model, Labels(classes, preprocessing, trained, architecture, folder, read_targets(values))


def load_classifier(name: str | Path) -> tuple[nn.Module, Labels]:
    """Return a model to evaluate and what is known about it: a trained one, or one of a library, such as ``timm:NAME``.

    The classes of a library's model are those that it was published with (``id2label`` of transformers), if any.
    """
    origin, _ = split_name(str(name))
    if origin is None or Path(str(name)).exists() or f"{origin.prefix}:" == PREFIX:
        return load_trained(name)
    model = load_model(str(name)).eval()
    try:
        found = find(model)
        outputs = found.adapter.num_classes(model, found.trunk)
    except UnsupportedModel:  # can be evaluated, though not merged
        outputs = int(getattr(model, "num_classes", 0))
    names = named_classes(model, outputs)
    return model, Labels({LABEL: names} if names else {}, declared_spec(model), folder=Path(str(name)))


def model_of(path: Path) -> Path:
    """Return the model directory in a directory; raise if there is none."""
    try:
        return model_folder(path)
    except ModelLoadError as error:
        why = error
        if (path / SETTINGS).is_file():
            folders = sorted((path / CHECKPOINTS).glob(f"step-*/{CONFIG}"))
            kept = f"; its newest checkpoint, {folders[-1].parent}, can be loaded" if folders else ""
            why = ModelLoadError(
                f"{path} is a run without a model yet{kept}. If it was interrupted, use resume=True (--resume)"
            )
        elif (path / SHARDS).is_dir():
            why = ModelLoadError(
                f"{path} is a sharded checkpoint, not a model; use the run's {LAST}/, or resume it with resume=True "
                "(--resume)"
            )
        raise why from None


def last_evaluation(folder: Path) -> Evaluation | None:
    """Return a run's last evaluation from its log, without confusion matrices; None if there was none."""
    lines = read_log(folder / LOG, "evaluation") if (folder / LOG).is_file() else []
    if not lines:
        return None
    last = {field.name: lines[-1][field.name] for field in fields(Evaluation) if field.name in lines[-1]}
    columns = read_labels(model_of(folder / LAST)).get("classes", {})
    main = [name for kind in ("calibration", "r2", "mean_ap", "miou") for name in last.get(kind) or ()]
    single = [names for column, names in columns.items() if f"task.{column}" not in main]
    last["classes"] = {
        name: tuple(columns[name.removeprefix("task.")] if name.startswith("task.") else single[0]) for name in main
    }
    for kind in ("ap", "iou"):
        last[kind] = {name: tuple(values) for name, values in (last.get(kind) or {}).items()}
    if last.get("disagreement") is not None:
        heads = last["disagreement"]
        rows = (torch.tensor(heads[name], dtype=torch.float64) for name in ("argmax", "divergence"))
        last["disagreement"] = Disagreement(tuple(heads["heads"]), *rows)
    return Evaluation(**{**last, "confusion": {}, "notes": tuple(last.get("notes", ()))})
