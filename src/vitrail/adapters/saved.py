"""Models in folders: ours, those of libraries as training saves them, and those that come with the package."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ModelLoadError
from vitrail.models.saving import CONFIG, LABELS, TOLD, WEIGHTS

PREFIX = "vitrail:"

PLACES = (".", "best", "last")
"""Where in a folder a model is looked for: the folder of a run has its best and its last one."""

EMBEDDED = {"tiny": Path(__file__).parents[1] / "weights" / "tiny"}
"""Trained models that come with the package, ``vitrail:NAME``, and their folders."""


def named(model: str | Path) -> Path:
    """Give the folder that a name means, with the prefix of our models or without it.

    The names of embedded models mean these, whatever folders there are; ``vitrail:local-dir:tiny`` is a folder.
    """
    name = str(model).removeprefix(PREFIX)
    if name != str(model) and name in EMBEDDED:
        return EMBEDDED[name]
    return Path(name.removeprefix("local-dir:")).expanduser()


def is_saved(model: str | Path) -> bool:
    """Say whether a name means a folder with a model, of a run or of its own."""
    return any((named(model) / place / CONFIG).is_file() for place in PLACES)


def model_folder(path: Path) -> Path:
    """Find the model in a folder: the folder itself, or the best or last model of a run."""
    for place in PLACES:
        if (path / place / CONFIG).is_file():
            return path / place if place != "." else path
    for name, folder in EMBEDDED.items():
        if folder == path:
            raise ModelLoadError(
                f"{PREFIX}{name} is not part of this installation: {folder} has no {CONFIG}. Install a version of "
                "Vitrail that comes with it, or name the folder of a run"
            )
    raise ModelLoadError(f"{path} holds no model; expected a folder of a run, or one with {CONFIG} and {WEIGHTS}")


def read_config(folder: Path) -> dict[str, Any]:
    """Read what a model folder says about its model."""
    try:
        told = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder / CONFIG} could not be read: {error}") from error
    if not isinstance(told, dict):
        raise ModelLoadError(f"{folder / CONFIG} is not the config of a model; expected a JSON object")
    return told


def read_labels(folder: Path) -> dict[str, Any]:
    """Read what a model folder says about the model's classes and training; nothing where it says nothing."""
    try:
        values = json.loads((folder / LABELS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder / LABELS} could not be read: {error}") from error
    return values if isinstance(values, dict) else {}


def load_saved(path: str | Path) -> nn.Module:
    """Load the model of a folder, or of a run's folder, in evaluation mode; it knows the names of its classes.

    Weights in half precision are a way to save space: the model itself is in float32.
    """
    folder = model_folder(Path(path).expanduser())
    model = _load(folder)
    if any(value.dtype in (torch.float16, torch.bfloat16) for value in model.parameters()):
        model = model.float()
    setattr(model, TOLD, read_labels(folder))
    return model


def class_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Give the names of the classes that a trained model answers with, by the column of labels that it learnt.

    They are known of models that training saved and `load_model` or ``load_trained`` loaded, of their copies and of
    what is wrapped around them; of any other model nothing is known, and the dict is empty.

    Example:
        >>> model = vitrail.load_model("vitrail:runs/student")  # doctest: +SKIP
        >>> vitrail.class_names(model)  # doctest: +SKIP
        {'label': ('cat', 'dog')}
    """
    told: dict[str, Any] = next((vars(part)[TOLD] for part in model.modules() if TOLD in vars(part)), {})
    return {question: tuple(classes) for question, classes in told.get("classes", {}).items()}


def _load(folder: Path) -> nn.Module:
    from vitrail.models import ViT

    told = read_config(folder)
    architecture = str(told.get("architecture", ""))
    if architecture.startswith("timm:"):
        timm = import_module("vitrail.adapters.timm")
        model: nn.Module = timm.load(architecture.removeprefix("timm:"), False, **told.get("options", {}))
        model.load_state_dict(_weights(folder), strict=True)
        return model.eval()
    if "model_type" in told:
        loaded: nn.Module = import_module("vitrail.adapters.transformers").load(str(folder))
        return loaded
    return ViT.from_pretrained(folder)


def _weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{folder / WEIGHTS} could not be read: {error}") from error
