"""Models to train: by name, from a library, or from a directory, with heads for the given classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.adapters import ModelRequest, load_model
from vitrail.adapters.registry import declared_spec, library_of, split_name
from vitrail.adapters.saved import named
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import InvalidOption, ModelLoadError
from vitrail.models import MODELS, ViT
from vitrail.models.registry import model_config
from vitrail.tokens import Role
from vitrail.training.config import Config
from vitrail.training.config.syntax import read_tokens
from vitrail.training.input_size import own_form
from vitrail.training.run_directory import Labels, load_trained

Classes = Mapping[str, Sequence[str]]
Size = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Built:
    """A model to train, the ``config.json`` of a library's model, and the input specification."""

    model: nn.Module
    architecture: dict[str, Any]
    preprocessing: InputSpec


def build(config: Config, classes: Classes) -> Built:
    """Build the model of a resolved config with heads for these classes, for the data's own size where it has one."""
    own = own_form(config.data)
    if own is None:
        return _build(config, classes)
    standard = InputSpec.of_arrays((0.0,) * own.channels, (1.0,) * own.channels)
    adapted = replace(config, image_size=own.sizes, options={**config.options, "in_chans": own.channels})
    return replace(_build(adapted, classes), preprocessing=standard)


def _build(config: Config, classes: Classes) -> Built:
    if config.own:
        return _built((ViT(own_config(config, classes)), {}), config.image_size)
    request = ModelRequest(
        {column: tuple(names) for column, names in classes.items()},
        config.pretrained,
        config.image_size,
        config.drop_path,
        config.options,
    )
    library, name = split_name(config.model)
    if library is not None and not named(config.model).is_dir():
        return _built(library.build(name, request), config.image_size)
    return _go_on(config, request)


def _built(made: tuple[nn.Module, dict[str, Any]], size: Size) -> Built:
    model, architecture = made
    return Built(model, architecture, _expected(model, size))


def own_config(config: Config, classes: Classes) -> Any:
    """Return the configuration of one of our models: the requested tokens, and heads for the classes."""
    base = MODELS[config.model]
    counts = {name: len(names) for name, names in classes.items()}
    tasks = {name: counts[name] for name in config.tasks}
    if config.tokens is not None:
        tokens = read_tokens(config.tokens, tasks)
    elif tasks and config.heads == "tokens":
        tokens = read_tokens(",".join(tasks), tasks)
    else:
        tokens = base.tokens
    if base.class_attention:  # tokens with a head enter where it begins; registers are among the patches from the start
        tokens = tuple(
            spec if spec.role is Role.REGISTER or spec.enters == -1 else replace(spec, enters=-1, position=False)
            for spec in tokens
        )
    answered = {spec.name for spec in tokens if spec.role is Role.TASK}
    options: dict[str, Any] = {
        "tokens": tokens,
        "num_classes": 0
        if config.recipe != "labels"
        else sum(count for name, count in counts.items() if name not in answered),
        "drop_path": config.drop_path or 0.0,
        **{name: getattr(config, name) for name in ("image_size", "patch_size") if getattr(config, name) is not None},
    }
    twice = sorted(set(options) & set(config.options))
    if twice:
        raise InvalidOption(f"options: {', '.join(twice)} has a field of its own; give it there")
    try:
        return model_config(config.model, **options, **config.options)
    except InvalidOption as error:
        raise InvalidOption(f"model={config.model!r}: {error}") from error


def _go_on(config: Config, request: ModelRequest) -> Built:
    """Start from a trained model: the same with heads for the new classes, kept where the classes are the same."""
    model, labels = load_trained(config.model)
    expects = labels.preprocessing
    if expects is not None and expects.is_array and own_form(config.data) is None:
        raise InvalidOption(f"model={config.model!r} was trained on arrays; give Arrays as data, not images")
    library = library_of(labels.architecture)
    same = request.classes == labels.classes
    made = library.rebuild(model, labels.folder, labels.architecture, request, keep_heads=same)
    if expects is None or expects.is_array:
        return _built(made, config.image_size)
    built = _built(made, config.image_size or expects.size[0])
    if built.preprocessing.is_array:
        return built
    return replace(built, preprocessing=replace(expects, size=built.preprocessing.size))


def _expected(model: nn.Module, size: Size) -> InputSpec:
    found = declared_spec(model) or InputSpec((224, 224), MEAN, STD)
    axes = len(found.size)
    return replace(found, size=(size,) * axes if isinstance(size, int) else size[-axes:]) if size else found


def load_teacher(name: str) -> tuple[nn.Module, Labels]:
    """Load a teacher: a run directory, a saved model, or a model of a library by name."""
    if named(name).is_dir():
        return load_trained(name)
    if ":" not in name:
        raise ModelLoadError(
            f"teacher={name!r}: there is no such directory; expected a run directory, or a name like timm:NAME"
        )
    try:
        model = load_model(name)
    except ModelLoadError as error:
        raise ModelLoadError(f"teacher={name!r}: {error}") from error
    return model, Labels({}, _expected(model, None), {}, {}, Path(name))
