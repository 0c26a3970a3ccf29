"""Loading models by name, with errors that suggest options of the command line."""

from __future__ import annotations

import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

import vitrail
from vitrail.adapters import Found, find
from vitrail.adapters.saved import is_saved, model_folder, named, read_labels
from vitrail.data import Preprocessing
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedInput, UnsupportedModel, VitrailError
from vitrail.models import ViT

if TYPE_CHECKING:
    from vitrail.training.objective.targets import Question


@dataclass(frozen=True)
class Loaded:
    """A loaded model; ``questions`` are the tasks it answers, if its classes have names."""

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    layout: vitrail.TokenLayout
    device: torch.device
    random: bool
    questions: tuple[Question, ...] = ()

    @property
    def weights(self) -> str:
        """Origin of the weights: random or pretrained."""
        return "random" if self.random else "pretrained"


def load(
    name: str,
    *,
    random: bool,
    size: tuple[int, ...] | None = None,
    device: str | None = None,
    seed: int = 0,
    shown: bool = True,
) -> Loaded:
    """Load a model by name for an input size; random weights depend on ``seed`` only.

    With ``shown=False`` the model need not accept images, only tensors of their shape.
    """
    place = _device(device)
    options: dict[str, Any] = {} if size is None or not name.startswith("timm:") else {"img_size": size}
    torch.manual_seed(seed)
    unreachable = _unreachable_hub() if _asks_the_hub(name, random) else None
    try:
        with _quiet_hub(offline=unreachable is not None), _quiet_bars(name):
            model = vitrail.load_model(name, pretrained=not random, **options)
    except ModelLoadError as error:
        raise ModelLoadError(_explain(name, error, random, options, unreachable)) from error
    found = find(model)
    _check_takes_pictures(name, found, shown)
    expected = found.adapter.preprocessing(found.trunk)
    if size is not None:
        expected = replace(expected, size=size)
    try:
        layout = found.adapter.layout(found.trunk, expected.size)
    except ValueError as error:
        raise _wrong_size(name, expected.size) from error
    if size is not None and (size[0] % layout.grid[1] or size[1] % layout.grid[2]):
        raise _wrong_size(name, size)
    return Loaded(name, model.to(place), expected, layout, place, random, _questions(model))


def _check_takes_pictures(name: str, found: Found, shown: bool) -> None:
    """Refuse a model that was made for other arrays: spectrograms, clips, numbers on a scale of their own."""
    told = read_labels(model_folder(named(name))).get("preprocessing") if is_saved(name) else None
    trunk = found.trunk
    shape: tuple[int, ...] = (3, *found.adapter.preprocessing(trunk).size)
    if isinstance(trunk, ViT):
        shape = (trunk.config.in_chans, *trunk.config.image)
    numbers = False
    if told:
        from vitrail.data.augment.normalize import Normalising, read_expects

        expects = read_expects(told)
        shape = (len(expects.mean), *shape[1:])
        numbers = isinstance(expects, Normalising) and not expects.of_bytes
    if len(shape) == 3 and shape[0] == 3 and not (numbers and shown):
        return
    kind = " of floating point numbers" if numbers else ""
    looks = "vitrail.record" if len(shape) > 3 else "vitrail.record or vitrail.inspect"
    raise UnsupportedInput(
        f"{name} takes arrays{kind}, {' × '.join(map(str, shape))}, and this command is for models that take pictures. "
        "From Python, measure it with vitrail.training.evaluation.pass_ on Arrays, merged or not, look inside with "
        f"{looks}, and export it with vitrail.export.export; vitrail.training.load_trained gives the model, and its "
        "labels.preprocessing normalises arrays for it."
    )


def _questions(model: nn.Module) -> tuple[Question, ...]:
    """Say which of a model's outputs are which classes, where these have names."""
    names = vitrail.class_names(model)
    if not names:
        return ()
    from vitrail.training.objective.targets import ask as ask_for

    return ask_for(model, names)


def _explain(name: str, error: ModelLoadError, random: bool, options: dict[str, Any], unreachable: str | None) -> str:
    """Say why a model could not be loaded and what to do, in the words of the command line."""
    library, colon, rest = name.partition(":")
    cause = error.__cause__
    if not colon:
        guess = _guess(name)
        return f"{str(error).rstrip('.')}. Did you mean {guess}?" if guess else str(error)
    if cause is None or isinstance(cause, ImportError):
        return str(error)
    if library == "hf" and _is_path(rest) and not Path(rest).is_dir():
        return f"{name}: there is no folder {rest}. Name one written by save_pretrained, or a model on the Hub."
    why = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
    obstacle = _obstacle(name, options)
    if obstacle is not None and "img_size" in options:  # is it the size?
        other = _obstacle(name)
        if other is None:
            height, width = options["img_size"]
            return f"{name} cannot be built for pictures of {height} × {width} pixels ({why}). Leave --size out."
        obstacle = other
    if isinstance(obstacle, UnsupportedModel):  # weights would not help
        return f"{name}: {obstacle}"
    anew = obstacle is None
    network = isinstance(cause, OSError) and not Path(rest).is_dir()
    if random and not (network and unreachable):
        return str(error)
    if network and unreachable:
        what = "its trained weights are" if anew else "it is"
        why = f"{name}: {what} not on this machine, and {unreachable} cannot be reached."
    elif anew:
        why = f"{name}: its trained weights could not be loaded ({why})."
    elif library == "timm":
        return f"{name} could not be built: {why}."
    else:
        return str(error)
    if anew:
        steps = "Check the network, or add" if network else "Add"
        return f"{why} {steps} --random-weights to go on without trained ones."
    return f"{why} Check the network, or name a folder written by save_pretrained, like hf:FOLDER."


def _is_path(name: str) -> bool:
    """Whether a name can only be a folder's: on the Hub there are owners and models, and nothing else."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _guess(name: str) -> str | None:
    """Guess the full name of a model whose library was left out."""
    if re.fullmatch(r"[\w.-]+", name) and _obstacle(f"timm:{name}") is None:
        return f"timm:{name}"
    if _obstacle(f"hf:{name}") is None if Path(name).is_dir() else re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return f"hf:{name}"
    return None


def _obstacle(name: str, options: dict[str, Any] | None = None) -> VitrailError | None:
    """Say what keeps a model from being merged even with random weights; tried without memory or network."""
    with _quiet_hub(offline=True), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            find(vitrail.load_model(name, pretrained=False, **(options or {})))
        except VitrailError as error:
            return error
    return None


def _asks_the_hub(name: str, random: bool) -> bool:
    """Whether loading a model may fetch something; timm's models are built without asking."""
    library, _, rest = name.partition(":")
    if library == "timm":
        return rest.startswith(("hf-hub:", "hf_hub:")) if random else not rest.startswith("local-dir:")
    return library == "hf" and not Path(rest).is_dir()


def _unreachable_hub(seconds: float = 3.0) -> str | None:
    """Give the Hub's host if no connection to it can be made.

    Its own library would find out only after many tries, most of a minute; how often it tries cannot be set.
    Behind a proxy, only the proxy knows.
    """
    try:
        settings: Any = import_module("huggingface_hub.constants")
        url = urlsplit(settings.ENDPOINT)
        if settings.HF_HUB_OFFLINE or url.hostname is None or {"https", "http", "all"} & getproxies().keys():
            return None
        socket.create_connection((url.hostname, url.port or (80 if url.scheme == "http" else 443)), seconds).close()
    except OSError:
        return url.hostname
    except (ImportError, AttributeError):  # no such library, or a much older or newer one: do as usual
        return None
    return None


@contextmanager
def _quiet_hub(offline: bool) -> Iterator[None]:
    """Keep the Hub's library from announcing each retry, and from asking at all where there is no network."""
    try:
        settings: Any = import_module("huggingface_hub.constants")
        log: Any = import_module("huggingface_hub.utils.logging")  # sets its level when it is imported, so before us
        before = settings.HF_HUB_OFFLINE, log.get_verbosity()
    except (ImportError, AttributeError):
        yield
        return
    try:
        settings.HF_HUB_OFFLINE = before[0] or offline
        if "HF_HUB_VERBOSITY" not in os.environ:
            log.set_verbosity(log.ERROR)
        yield
    finally:
        settings.HF_HUB_OFFLINE = before[0]
        log.set_verbosity(before[1])


@contextmanager
def _quiet_bars(name: str) -> Iterator[None]:
    """Keep transformers from drawing how far it is where nobody watches: in a file each step would be a line."""
    try:
        log: Any = import_module("transformers.utils.logging") if name.startswith("hf:") else None
    except ImportError:
        log = None
    if log is None or sys.stderr.isatty() or not log.is_progress_bar_enabled():
        yield
        return
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.enable_progress_bar()


def _wrong_size(name: str, size: tuple[int, ...]) -> InvalidOption:
    return InvalidOption(
        f"--size {size[0]}x{size[1]} is not a whole number of patches of {name}. Choose a multiple of its patch size "
        "(often 16 or 14) in each direction, or leave --size out."
    )


def _device(name: str | None) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InvalidOption("--device cuda: no CUDA device is available. Use --device cpu, or leave it out.")
    return torch.device(name or ("cuda" if available else "cpu"))
