"""Saving and loading models: ``config.json`` and ``model.safetensors``, as on the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from vitrail._atomic_files import write_bytes
from vitrail._checks import check_sizes
from vitrail._reading import read_text
from vitrail.errors import ModelLoadError
from vitrail.models.weights_file import read_tensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LABELS = "labels.json"
"""File beside a trained model with its class names, input specification and training settings."""
LABELS_ATTRIBUTE = "_vitrail_labels"
"""Attribute of a loaded model that holds the content of its labels file."""
ARCHITECTURE = "vitrail.ViT"


class Fit(NamedTuple):
    """Result of loading weights, as torch's ``load_state_dict`` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def check_fit(
    kind: str, own: Mapping[str, Tensor], states: Mapping[str, Tensor], strict: bool = True, hint: str = ""
) -> Fit:
    """Raise if a state_dict does not fit a model's own, listing all differences.

    Without ``strict``, keys may be missing or unexpected as long as one matches; shapes must still agree. ``hint`` is
    appended to the message about keys.
    """
    missing = [name for name in own if name not in states]
    unexpected = [name for name in states if name not in own]
    misshapen = [
        f"{name} is {tuple(states[name].shape)}, expected {tuple(value.shape)}"
        for name, value in own.items()
        if name in states and states[name].shape != value.shape
    ]
    if misshapen or (strict and (missing or unexpected)):
        wrong = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in wrong.items() if names)
        todo = f"Build the model with the options of the weights{'' if misshapen else hint}"
        raise ModelLoadError(f"the weights do not fit this {kind}; {listed}. {todo}")
    if len(missing) == len(own) and own:
        raise ModelLoadError(
            f"no key matches {kind}, which has {', '.join(list(own)[:3])}, ...; got "
            f"{', '.join(unexpected[:3]) or 'none'}, ..."
        )
    return Fit(missing, unexpected)


def load_states(model: nn.Module, states: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> None:
    """Load a state_dict, or raise with all differences and load nothing."""
    check_fit(type(model).__name__, model.state_dict(), states, strict)
    model.load_state_dict(dict(states), strict=False, assign=assign)


def write_folder(
    folder: Path, config: dict[str, Any], states: Mapping[str, Tensor], labels: Mapping[str, Any] | None = None
) -> None:
    """Write a model's files, each atomically."""
    from safetensors.torch import save

    tensors = {name: value.detach().to("cpu").contiguous().clone() for name, value in states.items()}
    text = json.dumps({"architecture": ARCHITECTURE, **config}, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The config last: a directory that has one is complete.
        write_bytes(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
        if labels:
            write_labels(folder, labels)
        write_bytes(folder / CONFIG, text.encode())
    except OSError as error:
        raise ModelLoadError(
            f"could not write to {folder} ({error.strerror or error}); choose a writable directory with free space"
        ) from error


def write_labels(folder: Path, labels: Mapping[str, Any]) -> None:
    """Write the labels file."""
    text = json.dumps(labels, indent=2, ensure_ascii=False) + "\n"
    write_bytes(folder / LABELS, text.encode())


def read_folder(name: str | Path, **hub: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read config and weights from a directory or a repository of the Hugging Face Hub."""
    files = {file: find_file(name, file, hub) for file in (CONFIG, WEIGHTS)}
    try:
        values = json.loads(read_text(files[CONFIG]))
        check_sizes(values, str(files[CONFIG]))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"could not read the files of {name}: {error}") from error
    if not isinstance(values, dict) or values.pop("architecture", None) != ARCHITECTURE:
        raise ModelLoadError(
            f"{files[CONFIG]} is not the config of a Vitrail model; expected a JSON object with "
            f'"architecture": "{ARCHITECTURE}", as save_pretrained writes it'
        )
    return values, read_tensors(files[WEIGHTS])


def push_folder(folder: Path, repository: str, private: bool | None = None, token: Any = None, **options: Any) -> str:
    """Upload a directory to a repository of the Hugging Face Hub, created if needed; return its URL."""
    library = _hub("uploading to the Hub")
    if str(repository).count("/") != 1:
        raise ModelLoadError(f"a repository is named owner/name; got {repository!r}")
    try:
        hub = library.HfApi(token=token)
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, **options)
    except Exception as error:
        raise ModelLoadError(f"could not upload {repository} to the Hub: {error}") from error
    return str(address)


def find_file(name: str | Path, file: str, hub: dict[str, Any]) -> Path:
    """Return a file of a model in a directory, or of a repository of the Hugging Face Hub, downloaded."""
    text = str(name)
    local = Path(text.removeprefix("local-dir:")).expanduser()
    if local.is_dir():
        path = local / file
        if not path.is_file():
            raise ModelLoadError(f"{local} has no {file}; expected a directory written by save_pretrained")
        return path
    repository = text.removeprefix("hf-hub:").removeprefix("hf:")
    beside = len(local.parts) > 1 and local.parent.is_dir()  # probably a misspelled directory
    meant = text.startswith(("local-dir:", ".", "~")) or local.is_absolute() or (beside and repository == text)
    if meant or repository.count("/") != 1:
        raise ModelLoadError(
            f"{local} is not a directory; expected one written by save_pretrained, or owner/name on the Hub"
        )
    library = _hub(f"{local} is not a directory; loading from the Hub")
    try:
        return Path(library.hf_hub_download(repository, file, **hub))
    except Exception as error:
        problem = f"{text} is not a directory, and {file} could not be downloaded from the Hub: {error}"
        raise ModelLoadError(problem) from error


def _hub(what: str) -> Any:
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise ModelLoadError(f"{what} needs huggingface_hub: `pip install huggingface_hub`") from error
