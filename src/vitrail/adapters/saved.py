"""Saved models: in a run directory, in a directory of their own, or embedded in the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._checks import as_path, check_sizes
from vitrail._reading import read_text
from vitrail.adapters.base import Library
from vitrail.data.labels.targets import TargetSpec
from vitrail.errors import InvalidOption, ModelLoadError
from vitrail.models.saving import CONFIG, LABELS, LABELS_ATTRIBUTE, WEIGHTS
from vitrail.models.weights_file import read_tensors

PREFIX = "vitrail:"

PLACES = (".", "best", "last")
"""Subdirectories that may hold a model, in order; a run directory has its best and its last one."""

EMBEDDED = {name: Path(__file__).parents[1] / "weights" / name for name in ("tiny", "audio", "video")}
"""Trained models that come with the package, ``vitrail:NAME``, and their directories: of images, sounds and clips."""


def named(model: str | Path) -> Path:
    """Return the directory that a name refers to, with or without the prefix ``vitrail:``.

    The name of an embedded model always refers to it; ``vitrail:local-dir:tiny`` is a directory.
    """
    name = str(as_path("model", model) if str(model) else model).removeprefix(PREFIX)
    if name != str(model) and name in EMBEDDED:
        return EMBEDDED[name]
    return Path(name.removeprefix("local-dir:")).expanduser()


def is_saved(model: str | Path) -> bool:
    """Return whether a name refers to a directory with a saved model, or to a run directory with one."""
    return any((named(model) / place / CONFIG).is_file() for place in PLACES)


def model_folder(path: Path) -> Path:
    """Return the directory of a model: the directory itself, or the best or last model of a run."""
    for place in PLACES:
        if (path / place / CONFIG).is_file():
            return path / place
    if name := next((name for name, folder in EMBEDDED.items() if folder == path), None):
        raise ModelLoadError(
            f"{PREFIX}{name} is not part of this installation: {path} has no {CONFIG}. Install a version of "
            "Vitrail that includes it, or name a run directory"
        )
    raise ModelLoadError(f"{path} holds no model; expected a run directory, or one with {CONFIG} and {WEIGHTS}")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a saved model."""
    values = _read_json(folder / CONFIG)
    try:
        check_sizes(values, str(folder / CONFIG))
    except InvalidOption as error:
        raise ModelLoadError(str(error)) from error
    return values


def read_labels(folder: Path) -> dict[str, Any]:
    """Read the ``labels.json`` of a saved model: classes, preprocessing, training; empty where there is none."""
    values = _read_json(folder / LABELS) if (folder / LABELS).exists() else {}
    classes = values.get("classes", {})
    named = isinstance(classes, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in classes.values()
    )
    parts = (values.get("trained"), values.get("preprocessing"))
    if not named or not all(one is None or isinstance(one, dict) for one in parts):
        raise ModelLoadError(
            f"{folder / LABELS} is damaged: expected class names by column, and objects for preprocessing and training"
        )
    return values


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} could not be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} is not a file of a model; expected a JSON object")
    return values


def load_saved(path: str | Path) -> nn.Module:
    """Load the model of a directory or of a run directory, in eval mode, with the names of its classes.

    Weights saved in half precision to save space are converted to float32.
    """
    folder = model_folder(Path(path).expanduser())
    model = saved_library(folder).restore(folder, read_config(folder))
    if any(value.dtype in (torch.float16, torch.bfloat16) for value in model.parameters()):
        model = model.float()
    setattr(model, LABELS_ATTRIBUTE, read_labels(folder))
    return model


@checked
def class_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the class names of a trained model, by label column.

    They are known for models that training saved and `load_model` or ``load_trained`` loaded, for copies of them and
    for modules that contain one. For any other model the dict is empty.

    Example:
        >>> model = vitrail.load_model("vitrail:runs/student")  # doctest: +SKIP
        >>> vitrail.class_names(model)  # doctest: +SKIP
        {'label': ('cat', 'dog')}
    """
    labels: dict[str, Any] = next(
        (vars(part)[LABELS_ATTRIBUTE] for part in model.modules() if LABELS_ATTRIBUTE in vars(part)), {}
    )
    return {question: tuple(classes) for question, classes in labels.get("classes", {}).items()}


def target_specs(model: nn.Module) -> dict[str, TargetSpec]:
    """Return what a trained model predicts by label column, for columns that hold no classes.

    They are known for the same models as `class_names`. The values of a regression are mean + std · output.
    """
    labels: dict[str, Any] = next(
        (vars(part)[LABELS_ATTRIBUTE] for part in model.modules() if LABELS_ATTRIBUTE in vars(part)), {}
    )
    return read_targets(labels)


def read_targets(labels: Mapping[str, Any]) -> dict[str, TargetSpec]:
    """Return the targets in the content of a ``labels.json``."""
    return {column: TargetSpec(**values) for column, values in labels.get("targets", {}).items()}


def saved_library(folder: Path) -> Library:
    """Return the library of a saved model, as named in its ``config.json``."""
    from vitrail.adapters.registry import library_of

    return library_of(read_config(folder))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a saved model."""
    return read_tensors(folder / WEIGHTS)
