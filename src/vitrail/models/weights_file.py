"""Files of weights, read without running the code that a pickle may hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ModelLoadError

SAFE = ".safetensors"
PICKLED = (".bin", ".pth", ".pt")
"""Endings of files that torch pickles; of these, tensors are read and nothing else."""

PREFERRED = (f"model{SAFE}", f"pytorch_model{SAFE}", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
"""Names of the file with the weights in a model directory, in order; otherwise the first by ending and name."""

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state")
"""Keys under which checkpoints keep their state_dict."""

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_lock = threading.Lock()
_inside = 0
_before: dict[str, str | None] = {}


@contextmanager
def only_weights() -> Iterator[None]:
    """Let ``torch.load`` read tensors alone inside, whatever a library asks it for.

    Libraries load weights themselves, and some of their versions unpickle whatever the file holds. torch has an
    environment variable for this, which is restored once the last thread leaves.
    """
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            _before.update({name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)})
            os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for name, value in _before.items():
                    os.environ.pop(name, None)
                    if value is not None:
                        os.environ[name] = value


def find_weights(folder: Path) -> Path:
    """Return the file with the weights of a model directory."""
    named = [folder / name for name in PREFERRED]
    others = [file for ending in (SAFE, *PICKLED) for file in sorted(folder.glob(f"*{ending}"))]
    found = next((file for file in (*named, *others) if file.is_file()), None)
    if found is None:
        raise ModelLoadError(f"{folder} has no weights; expected a file such as {', '.join(PREFERRED[:3])}")
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a state_dict from safetensors, or from a pickle whose tensors are read and nothing else."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == SAFE:
            # copies, which are aligned as PyTorch aligns its own: mapped tensors round differently
            return {name: value.clone() for name, value in load_file(path).items()}
        stored: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} could not be read: {error}") from error
    except Exception as error:  # torch raises what unpickling damaged files raises
        first = " ".join(str(error).split())[:200]
        raise ModelLoadError(
            f"{path} holds more than tensors, or is damaged ({first}); code in a weights file is never run. Convert it "
            "to safetensors where you trust it"
        ) from error
    for name in WRAPPERS:
        if isinstance(stored, Mapping) and isinstance(stored.get(name), Mapping):
            stored = stored[name]
            break
    if not isinstance(stored, Mapping) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise ModelLoadError(f"{path} has no state_dict; expected tensors by name")
    return {str(name).removeprefix("module."): value for name, value in stored.items()}
