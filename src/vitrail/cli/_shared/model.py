"""Loading models by name, with errors that suggest options of the command line."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vitrail
from vitrail.adapters import LIBRARIES, find, hub, image_model, size_options
from vitrail.adapters.registry import library, sized, split_name
from vitrail.adapters.saved import is_saved, model_folder, named, target_specs
from vitrail.cli._shared.media import MEDIA, Medium, check_accepted
from vitrail.data import InputSpec
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedModel, VitrailError
from vitrail.surgery.saving import add_saved_tokens
from vitrail.training.objective.targets import Target, assign_targets


@dataclass(frozen=True)
class Loaded:
    """A loaded model; ``size`` is the requested one, ``questions`` the tasks it answers, if its classes have names."""

    name: str
    model: nn.Module
    spec: InputSpec
    layout: vitrail.TokenLayout
    device: torch.device
    weights: str
    size: tuple[int, ...] | None
    questions: tuple[Target, ...] = ()

    @property
    def medium(self) -> Medium:
        """What the model's inputs are."""
        return MEDIA[self.spec.modality]


def load(
    name: str,
    command: str,
    *,
    random: bool = False,
    size: tuple[int, ...] | None = None,
    device: str | None = None,
    seed: int = 0,
) -> Loaded:
    """Load a model by name for a command and an input size; random weights depend on ``seed`` only."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InvalidOption("--device cuda: no CUDA device is available. Use --device cpu, or leave it out.")
    place = torch.device(device or ("cuda" if available else "cpu"))
    options = size_options(name, size)
    torch.manual_seed(seed)
    origin, rest = split_name(name)
    unreachable = hub.unreachable() if origin and origin.uses_hub(rest, not random) else None
    try:
        with hub.quiet(offline=unreachable is not None), origin.quiet() if origin else nullcontext():
            model = vitrail.load_model(name, pretrained=not random, **options)
            if is_saved(name) and not random:
                add_saved_tokens(model, model_folder(named(name)))
    except ModelLoadError as error:
        raise ModelLoadError(_explain(name, error, random, options, unreachable)) from error
    model = image_model(model)
    found = find(model)
    spec = found.adapter.input_spec(found.trunk)
    check_accepted(name, spec, command)
    resized, layout = sized(found, size, name)
    names = vitrail.class_names(model)
    questions = assign_targets(model, names, target_specs(model)) if names else ()
    weights, chosen = "random" if random else "pretrained", None if size is None else resized.size
    return Loaded(name, model.to(place), replace(spec, size=resized.size), layout, place, weights, chosen, questions)


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
    obstacle = _obstacle(name)
    if obstacle is None and options and _obstacle(name, options):
        return f"{name} cannot be built for inputs of another size ({why}). Leave --image-size out."
    if isinstance(obstacle, UnsupportedModel):  # weights would not help
        return f"{name}: {obstacle}"
    network = isinstance(cause, OSError) and not Path(rest).is_dir()
    if random and not (network and unreachable):
        return str(error)
    missing, step = "it could not be loaded", f"name a directory, like {origin.directory}"
    if obstacle is None:
        missing, step = "its trained weights could not be loaded", "add --random-weights to use random ones"
    if network:
        why, step = f"{unreachable} cannot be reached" if unreachable else why, f"check the network, or {step}"
    return f"{name}: {missing} ({why}). {step[0].upper()}{step[1:]}."


def _guess(name: str) -> str | None:
    """Return the full name of a model whose prefix was left out, where one fits."""
    for one in (one for one in map(library, LIBRARIES) if one.looks_like(name)):
        if one.uses_hub(name, pretrained=False) or _obstacle(f"{one.prefix}:{name}") is None:
            return f"{one.prefix}:{name}"
    return None


def _obstacle(name: str, options: dict[str, Any] | None = None) -> VitrailError | None:
    """Return why a model cannot be merged even with random weights, or None; uses neither memory nor network."""
    with hub.quiet(offline=True), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            find(vitrail.load_model(name, pretrained=False, **(options or {})))
        except VitrailError as error:
            return error
    return None
