"""Trained merging methods: saved beside the model that they were trained with, and loaded by its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail._arguments import checked
from vitrail._atomic_files import write_bytes
from vitrail.adapters.saved import PLACES, named
from vitrail.errors import InvalidOption, ModelLoadError, UntrainedMethod
from vitrail.merging import METHODS, Method, as_method
from vitrail.merging.methods.learned import PREFIX, LearnedMethod

FILE = "method.safetensors"
"""File beside a trained model with the weights of its merging method, and the method's name and options."""


def save_method(method: Method, path: str | Path, states: Mapping[str, Tensor] | None = None) -> None:
    """Write a learned method, without the model, to a safetensors file.

    The file also has the names and shapes of the parameters of the model's blocks: the method is refused by others.

    Args:
        path: the file, or a directory, which gets the file ``method.safetensors``.
        states: weights to write instead of the current ones, such as averaged ones.
    """
    from safetensors.torch import save

    if not isinstance(method, LearnedMethod) or METHODS.get(method.name) is not type(method):
        raise InvalidOption(f"save_method writes registered methods with parameters, such as DTEM; got {method.label}")
    given = method.state_dict() if states is None else states
    if not int(given.get("passes", 1)):
        raise UntrainedMethod(
            f"method {method.label} was never trained, so there is nothing to save; train it in training mode, with "
            "gradients, and save it then"
        )
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in given.items()}
    settings = json.dumps({"name": method.name, **method.options})
    target = Path(path) / FILE if Path(path).is_dir() else Path(path)
    metadata = {"format": "pt", "vitrail_method": settings, "vitrail_blocks": json.dumps(method.trained_on)}
    try:
        write_bytes(target, save(tensors, metadata=metadata))
    except OSError as error:
        raise ModelLoadError(f"could not write {target} ({error.strerror or error})") from error


@checked
def load_method(path: str | Path) -> LearnedMethod:
    """Return a trained method, to be applied by ``vitrail.merge(model, method=...)``.

    Args:
        path: a run or model directory of ``vitrail train``, or a file of :func:`save_method`.
    """
    from safetensors import SafetensorError, safe_open

    file = method_file(path)
    if file is None:
        raise ModelLoadError(
            f"{path} has no trained merging method; expected a run trained with one, such as merge='r=8,method=dtem', "
            f"or a file of save_method"
        )
    try:
        with safe_open(file, framework="pt") as stored:
            metadata = stored.metadata() or {}
            settings = json.loads(metadata.get("vitrail_method", "null"))
            blocks = json.loads(metadata.get("vitrail_blocks", "null"))
            states = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (not a dict)
        found = METHODS[settings.pop("name")]
        assert issubclass(found, LearnedMethod)
        method = found.from_state(states, **settings)
        method.trained_on = None if blocks is None else {name: tuple(shape) for name, shape in blocks.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError, SafetensorError) as error:
        raise ModelLoadError(f"{file} is not a file of save_method ({error})") from error
    method.source = str(path)
    return method


def method_file(path: str | Path) -> Path | None:
    """Return the file of a trained method in a model or run directory, or the file itself; None if there is none."""
    given = named(path)
    candidates = [given / place / FILE for place in PLACES]
    if given.suffix == ".safetensors":
        candidates.insert(0, given)
    return next((file for file in candidates if file.is_file()), None)


def read_method(method: str | Path | Mapping[str, Any] | Method) -> Method:
    """Return a method by name, by name and options, by the path of a trained one, or unchanged."""
    if isinstance(method, Path) or (isinstance(method, str) and _is_path(method)):
        return load_method(method)
    return as_method(method)


def _is_path(text: str) -> bool:
    return text not in METHODS and bool(text.strip()) and named(text).exists()


def is_method(text: str) -> bool:
    """Return whether a text names a registered method or the path of a trained one."""
    return text in METHODS or method_file(text) is not None


def split_states(states: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of a model and those of its merging method, from the state_dict of the merged model."""
    own = {name: value for name, value in states.items() if PREFIX not in name}
    return own, {name.rpartition(PREFIX)[2]: value for name, value in states.items() if PREFIX in name}
