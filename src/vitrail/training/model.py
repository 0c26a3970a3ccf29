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
from vitrail.data.dataset import Dataset
from vitrail.data.sources.arrays import Arrays
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import InvalidOption, ModelLoadError
from vitrail.models import MODELS, ViT
from vitrail.models.registry import model_config
from vitrail.tokens import Role
from vitrail.training.config import Config
from vitrail.training.config.syntax import read_tokens
from vitrail.training.run_directory import Labels, load_trained

Classes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Built:
    """A model to train, the ``config.json`` of a library's model, and the input specification."""

    model: nn.Module
    architecture: dict[str, Any]
    preprocessing: InputSpec


def build(config: Config, classes: Classes) -> Built:
    """Build the model of a resolved config with heads for these classes, for the data's own size where it has one.

    A trained model is rebuilt for the new classes; its heads are kept where the classes are the same.
    """
    arrays = config.data.tensor_spec if isinstance(config.data, Arrays | Dataset) else None
    if arrays is not None:
        own = {**config.options, "in_chans": arrays.channels}
        config = replace(config, image_size=arrays.sizes, options=own)
    size = config.image_size
    trained_on: InputSpec | None = None
    architecture: dict[str, Any]
    names = {column: tuple(each) for column, each in classes.items()}
    request = ModelRequest(names, config.pretrained, size, config.drop_path, config.options)
    library, name = split_name(config.model)
    model: nn.Module
    if config.own:
        model, architecture = ViT(own_config(config, classes)), {}
    elif library is not None and not named(config.model).is_dir():
        model, architecture = library.build(name, request)
    else:
        trained, labels = load_trained(config.model)
        trained_on = labels.preprocessing
        if arrays is None and trained_on is not None and trained_on.is_array:
            raise InvalidOption(f"model={config.model!r} was trained on arrays; give Arrays as data, not images")
        model, architecture = library_of(labels.architecture).rebuild(
            trained, labels.folder, labels.architecture, request, keep_heads=names == labels.classes
        )
    if arrays is not None:
        standard = InputSpec.of_arrays((0.0,) * arrays.channels, (1.0,) * arrays.channels)
        return Built(model, architecture, standard)
    expected = _expected(model, size or (trained_on.size[0] if trained_on else None))
    if trained_on is not None and not expected.is_array:
        expected = replace(trained_on, size=expected.size)
    return Built(model, architecture, expected)


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
    own_tasks = {spec.name for spec in tokens if spec.role is Role.TASK}
    options: dict[str, Any] = {
        "tokens": tokens,
        "num_classes": sum(counts[name] for name in counts if name not in own_tasks)
        if config.recipe == "labels"
        else 0,
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


def _expected(model: nn.Module, size: int | None) -> InputSpec:
    sides = (size, size) if size else None
    found = declared_spec(model) or InputSpec(sides or (224, 224), MEAN, STD)
    return replace(found, size=sides) if sides else found


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
