"""Models to train: by name, from a library, or from a folder, with heads for the classes at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import load_model
from vitrail.adapters.saved import named
from vitrail.data.augment.normalize import Expects, Normalising
from vitrail.data.spec import MEAN, STD, Preprocessing
from vitrail.errors import InvalidOption, ModelLoadError
from vitrail.models import MODELS, ViT
from vitrail.models.position import resample
from vitrail.models.registry import model_config
from vitrail.tokens import Role, TokenSpec
from vitrail.training.config import Config
from vitrail.training.config.syntax import read_tokens
from vitrail.training.input_size import adapted, own_form
from vitrail.training.objective.teacher import expected_by
from vitrail.training.run_directory import Labels, load_trained

Classes = Mapping[str, Sequence[str]]
Size = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Built:
    """A model to train, what its folder's config says about it, and what it expects of a picture or an array."""

    model: nn.Module
    architecture: dict[str, Any]
    preprocessing: Expects


def build(config: Config, classes: Classes) -> Built:
    """Build the model of a resolved config, with heads for these classes; for the data's own size, where it has one."""
    own = own_form(config.data)
    if own is None:
        return _build(config, classes)
    standard = Normalising((0.0,) * own.channels, (1.0,) * own.channels)
    return replace(_build(adapted(config, own), classes), preprocessing=standard)


def _build(config: Config, classes: Classes) -> Built:
    if config.own:
        model: nn.Module = ViT(own_config(config, classes))
        return Built(model, {}, _expected(model, config.image_size))
    if config.model.startswith("timm:"):
        return build_timm(config.model, _timm_options(config, classes), bool(config.pretrained), config.image_size)
    if config.model.startswith("hf:"):
        return _build_hf(config, classes)
    model, labels = load_trained(config.model)
    return _go_on(config, model, labels, classes)


def own_config(config: Config, classes: Classes) -> Any:
    """Say what a model of ours is made of: the tokens that were asked for, heads for the classes."""
    base = MODELS[config.model]
    counts = {name: len(names) for name, names in classes.items()}
    tasks = {name: counts[name] for name in config.tasks}
    if config.tokens is not None:
        tokens = read_tokens(config.tokens, tasks)
    elif tasks and config.heads == "tokens":
        tokens = read_tokens(",".join(tasks), tasks)
    else:
        tokens = base.tokens
    if base.class_attention:
        tokens = tuple(_gathering(spec) for spec in tokens)
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


def _gathering(spec: TokenSpec) -> TokenSpec:
    """Let a token that answers enter where class attention begins; registers are among the patches from the start."""
    if spec.role is Role.REGISTER or spec.enters == -1:
        return spec
    return replace(spec, enters=-1, position=False)


def _timm_options(config: Config, classes: Classes) -> dict[str, Any]:
    options = {"num_classes": _outputs(classes), **config.options}
    if config.drop_path:
        options["drop_path_rate"] = config.drop_path
    if config.image_size is not None:
        options["img_size"] = config.image_size
    return options


def build_timm(name: str, options: dict[str, Any], pretrained: bool, size: Size) -> Built:
    """Build a model of timm's; a size and drop path are options only of the models that have them."""
    options = dict(options)
    while True:
        try:
            model = load_model(name, pretrained=pretrained, **options)
            break
        except ModelLoadError as error:
            refused = next(
                (one for one in ("img_size", "drop_path_rate") if one in options and one in str(error)), None
            )
            if refused is None:
                raise
            del options[refused]
    told = {"architecture": name, "options": options, **({} if size is None else {"image_size": size})}
    return Built(model, told, _expected(model, size))


def _build_hf(config: Config, classes: Classes) -> Built:
    """Build a classifier of transformers'; a repository's or folder's weights unless it is said otherwise."""
    try:
        from transformers import AutoConfig, AutoModelForImageClassification
    except ImportError as error:
        raise ModelLoadError(
            f"{config.model} needs transformers; install it with `pip install vitrail[transformers]`"
        ) from error
    names = [name for column in classes.values() for name in column]
    named = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    options = {**named, **config.options, **({} if config.image_size is None else {"image_size": config.image_size})}
    if "in_chans" in options:
        options["num_channels"] = options.pop("in_chans")
    source = config.model.removeprefix("hf:")
    try:
        told = AutoConfig.from_pretrained(source, **options)
        if config.pretrained is False:
            model = AutoModelForImageClassification.from_config(told)
        else:
            model = AutoModelForImageClassification.from_pretrained(source, config=told, ignore_mismatched_sizes=True)
    except Exception as error:
        raise ModelLoadError(f"transformers could not build {source!r}: {str(error).rstrip('.')}") from error
    return Built(model, {"architecture": "hf"}, _expected(model, config.image_size))


def _go_on(config: Config, model: nn.Module, labels: Labels, classes: Classes) -> Built:
    """Begin from a trained model: the same with heads for the new classes, which are kept where they are the same."""
    if isinstance(labels.preprocessing, Normalising) and own_form(config.data) is None:
        raise InvalidOption(f"model={config.model!r} was trained on arrays; give Arrays as data, not pictures")
    same = {name: tuple(names) for name, names in classes.items()} == labels.classes
    options = {name: value for name, value in {"drop_path": config.drop_path}.items() if value is not None}
    if isinstance(model, ViT):
        changes = {**options, **config.options}
        if config.image_size is not None:
            changes["image_size"] = config.image_size
        if changes.get("in_chans", model.config.in_chans) != model.config.in_chans:
            raise InvalidOption(f"in_chans={changes['in_chans']}: {config.model} has {model.config.in_chans} channels")
        tasks = [spec.name for spec in model.config.tokens if spec.role is Role.TASK]
        changes["num_classes"] = sum(len(names) for name, names in classes.items() if name not in tasks)
        changes["tokens"] = tuple(
            replace(spec, classes=len(classes[spec.name])) if spec.name in tasks and spec.name in classes else spec
            for spec in model.config.tokens
        )
        fresh = ViT(replace(model.config, **changes))
        _take_over(fresh, model.state_dict(), heads=same, prefix="heads.")
        if model.pos_embed is not None and fresh.pos_embed is not None:
            _take_positions(model, fresh)
        return Built(fresh, {}, _expected(fresh, config.image_size))
    told = labels.architecture
    if not str(told.get("architecture", "")).startswith("timm:"):
        return _build_hf(replace(config, model=f"hf:{labels.folder}"), classes)
    expects = labels.preprocessing if isinstance(labels.preprocessing, Preprocessing) else None
    size = config.image_size or (expects.size[0] if expects else None)
    settings = {**told.get("options", {}), **_timm_options(config, classes)}
    built = build_timm(told["architecture"], settings, False, size)
    _take_over(built.model, model.state_dict(), heads=same, prefix="")
    if expects is not None and isinstance(built.preprocessing, Preprocessing):
        return replace(built, preprocessing=replace(expects, size=built.preprocessing.size))
    return built


def _take_over(model: nn.Module, states: Mapping[str, Tensor], *, heads: bool, prefix: str) -> None:
    """Load what fits by name and shape; heads only where they are for the same classes."""
    own = model.state_dict()
    fits = {name: value for name, value in states.items() if name in own and own[name].shape == value.shape}
    if not heads and prefix:
        fits = {name: value for name, value in fits.items() if not name.startswith(prefix)}
    if not fits:
        raise ModelLoadError(f"none of the weights fits this {type(model).__name__}")
    model.load_state_dict(fits, strict=False)
    if not heads and not prefix and hasattr(model, "reset_classifier"):
        model.reset_classifier(model.num_classes)  # type: ignore[operator]


@torch.no_grad()
def _take_positions(old: ViT, new: ViT) -> None:
    """Bring learned positions to another grid, as the model itself does for inputs of another size."""
    assert old.pos_embed is not None
    assert new.pos_embed is not None
    front = old._num_positioned
    patches = resample(old.pos_embed[:, front:], old.config.grid, new.config.grid)
    new.pos_embed.copy_(torch.cat([old.pos_embed[:, :front], patches], 1))


def _outputs(classes: Classes) -> int:
    return sum(map(len, classes.values()))


def _expected(model: nn.Module, size: Size) -> Preprocessing:
    sides: Any = (size, size) if isinstance(size, int) else size and size[-2:]
    found = expected_by(model) or Preprocessing(sides or (224, 224), MEAN, STD)
    return replace(found, size=sides) if sides else found


def load_teacher(name: str) -> tuple[nn.Module, Labels]:
    """Load a model to learn from: a folder of a run or a model, ``timm:NAME``, ``hf:REPO``."""
    if named(name).is_dir():
        return load_trained(name)
    if ":" not in name:
        raise ModelLoadError(f"teacher={name!r}: there is no such folder; expected that of a run, timm:NAME or hf:REPO")
    try:
        model = load_model(name)
    except ModelLoadError as error:
        raise ModelLoadError(f"teacher={name!r}: {error}") from error
    return model, Labels({}, _expected(model, None), {}, {}, Path(name))
