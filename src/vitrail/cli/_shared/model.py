"""Loading models by name, with errors that suggest options of the command line."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

import vitrail
from vitrail.adapters import LIBRARIES, Found, find, size_options
from vitrail.adapters.registry import library, split_name
from vitrail.adapters.saved import is_saved, model_folder, named, read_labels
from vitrail.data import InputSpec
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedInput, UnsupportedModel, VitrailError
from vitrail.models import ViT

if TYPE_CHECKING:
    from vitrail.training.objective.targets import Target


@dataclass(frozen=True)
class Loaded:
    """A loaded model; ``questions`` are the tasks it answers, if its classes have names."""

    name: str
    model: nn.Module
    preprocessing: InputSpec
    layout: vitrail.TokenLayout
    device: torch.device
    random: bool
    questions: tuple[Target, ...] = ()

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
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InvalidOption("--device cuda: no CUDA device is available. Use --device cpu, or leave it out.")
    place = torch.device(device or ("cuda" if available else "cpu"))
    options = size_options(name, size)
    torch.manual_seed(seed)
    origin, rest = split_name(name)
    unreachable = _unreachable_hub() if origin and origin.uses_hub(rest, not random) else None
    try:
        with _quiet_hub(offline=unreachable is not None), origin.quiet() if origin else nullcontext():
            model = vitrail.load_model(name, pretrained=not random, **options)
    except ModelLoadError as error:
        raise ModelLoadError(_explain(name, error, random, options, unreachable)) from error
    found = find(model)
    _check_takes_images(name, found, shown)
    expected = found.adapter.input_spec(found.trunk)
    if size is not None:
        expected = replace(expected, size=size)
    try:
        layout = found.adapter.layout(found.trunk, expected.size)
    except ValueError:
        layout = None
    if layout is None or (size is not None and (size[0] % layout.grid[1] or size[1] % layout.grid[2])):
        raise InvalidOption(
            f"--size {expected.size[0]}x{expected.size[1]} is not a whole number of patches of {name}. Choose a "
            "multiple of its patch size (often 16 or 14) in each direction, or leave --size out."
        )
    questions: tuple[Target, ...] = ()
    if names := vitrail.class_names(model):
        from vitrail.training.objective.targets import assign_targets

        questions = assign_targets(model, names)
    return Loaded(name, model.to(place), expected, layout, place, random, questions)


def _check_takes_images(name: str, found: Found, shown: bool) -> None:
    """Raise if a model takes other arrays than images: spectrograms, clips, unnormalized numbers."""
    told = read_labels(model_folder(named(name))).get("preprocessing") if is_saved(name) else None
    trunk = found.trunk
    shape: tuple[int, ...] = (3, *found.adapter.input_spec(trunk).size)
    if isinstance(trunk, ViT):
        shape = (trunk.config.in_chans, *trunk.config.image)
    numbers = False
    if told:
        expects = InputSpec.from_dict(told)
        shape = (len(expects.mean), *shape[1:])
        numbers = expects.is_array and not expects.of_bytes
    if len(shape) == 3 and shape[0] == 3 and not (numbers and shown):
        return
    kind = " of floating point numbers" if numbers else ""
    looks = "vitrail.record" if len(shape) > 3 else "vitrail.record or vitrail.inspect"
    raise UnsupportedInput(
        f"{name} takes arrays{kind}, {' × '.join(map(str, shape))}, and this command is for models that take images. "
        "From Python, measure it with vitrail.training.evaluate on Arrays, merged or not, look inside with "
        f"{looks}, and export it with vitrail.export.export; vitrail.training.load_trained gives the model, and its "
        "labels.preprocessing normalizes arrays for it."
    )


def _explain(name: str, error: ModelLoadError, random: bool, options: dict[str, Any], unreachable: str | None) -> str:
    """Return why a model could not be loaded and what to do, in terms of the command line."""
    origin, rest = split_name(name)
    cause = error.__cause__
    if origin is None:
        guess = None if ":" in name else _guess(name)
        return f"{str(error).rstrip('.')}. Did you mean {guess}?" if guess else str(error)
    if origin.is_missing_directory(rest):
        return f"{name}: there is no directory {rest}. Name one ({origin.directory}), or a model on the Hub."
    if cause is None or isinstance(cause, ImportError):
        return str(error)
    why = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
    obstacle = _obstacle(name, options)
    if obstacle is not None and options:  # is it the size?
        other = _obstacle(name)
        if other is None:
            return f"{name} cannot be built for inputs of another size ({why}). Leave --size out."
        obstacle = other
    if isinstance(obstacle, UnsupportedModel):  # weights would not help
        return f"{name}: {obstacle}"
    network = isinstance(cause, OSError) and not Path(rest).is_dir()
    if network and unreachable:
        what = "it is" if obstacle else "its trained weights are"
        why = f"{name}: {what} not on this machine, and {unreachable} cannot be reached. Check the network, or"
        step = f"name a directory, like {origin.directory}" if obstacle else "add --random-weights"
        return f"{why} {step}."
    if random:
        return str(error)
    if obstacle is None:
        step = "Check the network, or add" if network else "Add"
        return f"{name}: its trained weights could not be loaded ({why}). {step} --random-weights to use random ones."
    return f"{name} could not be loaded: {why}. Name a directory instead, like {origin.directory}."


def _guess(name: str) -> str | None:
    """Return the full name of a model whose prefix was left out, where one fits."""
    likely = [one for one in map(library, LIBRARIES) if one.looks_like(name)]
    for one in likely:
        if one.uses_hub(name, pretrained=False) or _obstacle(f"{one.prefix}:{name}") is None:
            return f"{one.prefix}:{name}"
    return None


def _obstacle(name: str, options: dict[str, Any] | None = None) -> VitrailError | None:
    """Return why a model cannot be merged even with random weights, or None; uses neither memory nor network."""
    with _quiet_hub(offline=True), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            find(vitrail.load_model(name, pretrained=False, **(options or {})))
        except VitrailError as error:
            return error
    return None


def _unreachable_hub(seconds: float = 3.0) -> str | None:
    """Return the Hub's host if it cannot be reached; its own library would retry for most of a minute.

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
    """Silence the Hub library's retries; with ``offline``, do not let it connect."""
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
