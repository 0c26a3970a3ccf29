"""Models in folders: ours, and those of libraries as training saves them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.errors import ModelLoadError
from vitrail.models.saving import CONFIG, WEIGHTS

PLACES = (".", "best", "last")
"""Where in a folder a model is looked for: the folder of a run has its best and its last one."""


def model_folder(path: Path) -> Path:
    """Find the model in a folder: the folder itself, or the best or last model of a run."""
    for place in PLACES:
        if (path / place / CONFIG).is_file():
            return path / place if place != "." else path
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


def load_saved(path: str | Path) -> nn.Module:
    """Load the model of a folder, or of a run's folder, in evaluation mode."""
    from vitrail.models import ViT

    folder = model_folder(Path(path).expanduser())
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
