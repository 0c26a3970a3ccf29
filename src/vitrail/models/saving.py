"""Models as files: ``config.json`` and ``model.safetensors``, as the Hugging Face Hub expects them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from vitrail._atomic_files import drafts
from vitrail.errors import ModelLoadError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LABELS = "labels.json"
"""Beside a trained model: the names of its classes, what it expects of a picture, and how it was trained."""
TOLD = "_vitrail_labels"
"""Where a loaded model keeps what its folder says about its classes and its training."""
ARCHITECTURE = "vitrail.ViT"


class Fit(NamedTuple):
    """What did not meet when weights were loaded: the model's names that were not there, and names it does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def check_fit(
    kind: str, own: Mapping[str, Tensor], states: Mapping[str, Tensor], strict: bool = True, hint: str = ""
) -> Fit:
    """Raise where a state_dict does not fit a model's own, and list all that does not.

    Without ``strict``, names may be missing or unexpected, as long as some are there; shapes must still agree.
    ``hint`` says what else there is to do about names.
    """
    missing = [name for name in own if name not in states]
    unexpected = [name for name in states if name not in own]
    misshapen = [
        f"{name} is {tuple(states[name].shape)}, expected {tuple(value.shape)}"
        for name, value in own.items()
        if name in states and states[name].shape != value.shape
    ]
    if misshapen or (strict and (missing or unexpected)):
        wrong = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in wrong.items() if names)
        hint = "" if misshapen else hint
        raise ModelLoadError(
            f"the weights do not fit this {kind}; {listed}. Build the model with the options of the weights{hint}"
        )
    if len(missing) == len(own) and own:
        raise ModelLoadError(
            f"none of these weights is one of this {kind}; it has {', '.join(list(own)[:3])}, ..., and given are "
            f"{', '.join(unexpected[:3]) or 'none'}, ..."
        )
    return Fit(missing, unexpected)


def load_states(model: nn.Module, states: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> None:
    """Load a state_dict, or say all that does not fit and load nothing."""
    check_fit(type(model).__name__, model.state_dict(), states, strict)
    model.load_state_dict(dict(states), strict=False, assign=assign)


def write_folder(
    folder: Path, config: dict[str, Any], states: Mapping[str, Tensor], labels: Mapping[str, Any] | None = None
) -> None:
    """Write a model's files, each out of sight first and then moved to its place; labels where there are any."""
    from safetensors.torch import save

    tensors = {name: value.detach().to("cpu").contiguous().clone() for name, value in states.items()}
    text = json.dumps({"architecture": ARCHITECTURE, **config}, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The config last: a folder that has one is complete.
        write_whole(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
        if labels:
            write_whole(folder / LABELS, labels_text(labels).encode())
        write_whole(folder / CONFIG, text.encode())
    except OSError as error:
        raise ModelLoadError(
            f"{folder} could not be written ({error.strerror or error}); expected a folder with space that may be "
            "written to"
        ) from error


def labels_text(labels: Mapping[str, Any]) -> str:
    """Give what `LABELS` holds."""
    return json.dumps(labels, indent=2, ensure_ascii=False) + "\n"


def read_folder(name: str | Path, **hub: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read config and weights from a folder, or from a repository of the Hugging Face Hub."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    files = {file: _find(name, file, hub) for file in (CONFIG, WEIGHTS)}
    try:
        values = json.loads(files[CONFIG].read_text(encoding="utf-8"))
        states = load(files[WEIGHTS].read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelLoadError(f"the files of {name} could not be read: {error}") from error
    if not isinstance(values, dict) or values.pop("architecture", None) != ARCHITECTURE:
        raise ModelLoadError(
            f"{files[CONFIG]} is not the config of a model of ours; expected a JSON object with "
            f'"architecture": "{ARCHITECTURE}", as save_pretrained writes it'
        )
    return values, states


def push_folder(folder: Path, repository: str, private: bool | None = None, token: Any = None, **options: Any) -> str:
    """Upload a folder to a repository of the Hugging Face Hub, which is made where there is none."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ModelLoadError("to upload to the Hub install it with `pip install huggingface_hub`") from error
    if str(repository).count("/") != 1:
        raise ModelLoadError(f"a repository of the Hub is named owner/name; got {repository!r}")
    try:
        hub = HfApi(token=token)
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, **options)
    except Exception as error:
        raise ModelLoadError(f"the Hub did not take {repository}: {error}") from error
    return str(address)


def _find(name: str | Path, file: str, hub: dict[str, Any]) -> Path:
    text = str(name)
    local = Path(text.removeprefix("local-dir:")).expanduser()
    if local.is_dir():
        path = local / file
        if not path.is_file():
            raise ModelLoadError(f"{local} has no {file}; expected a folder that save_pretrained wrote")
        return path
    repository = text.removeprefix("hf-hub:").removeprefix("hf:")
    beside = len(local.parts) > 1 and local.parent.is_dir()  # then it is a folder's name with a typing error
    meant = text.startswith(("local-dir:", ".", "~")) or local.is_absolute() or (beside and repository == text)
    if meant or repository.count("/") != 1:
        raise ModelLoadError(f"{local} is no folder; expected one that save_pretrained wrote, or owner/name on the Hub")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ModelLoadError(
            f"{local} is no folder here; to read it from the Hub install it with `pip install huggingface_hub`"
        ) from error
    try:
        return Path(hf_hub_download(repository, file, **hub))
    except Exception as error:
        raise ModelLoadError(f"{text} is no folder here, and the Hub did not give its {file}: {error}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file for everybody to read, whole or not at all."""
    with drafts(path) as (draft,):
        draft.write_bytes(data)
        draft.chmod(0o644)
