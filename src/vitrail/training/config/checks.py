"""What the fields of a config may be, one by one and together. Every error names the field."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.adapters.registry import split_name
from vitrail.adapters.saved import named
from vitrail.errors import InvalidOption
from vitrail.models import MODELS
from vitrail.tokens import TokenSpec
from vitrail.training.config.presets import PRESETS
from vitrail.training.config.syntax import nearest
from vitrail.training.optim.optimizer import OPTIMIZERS

if TYPE_CHECKING:
    from vitrail.training.config.config import Config

CHOICES = {
    "preset": tuple(PRESETS),
    "keep_data": ("auto", "device", "workers"),
    "heads": ("tokens", "shared"),
    "weighting": ("fixed", "uncertainty"),
    "distillation": ("hard", "soft", "features"),
    "augment": ("none", "flip", "light", "medium", "strong"),
    "device": ("cpu", "cuda"),
    "dtype": ("fp32", "bf16", "bf16-weights"),
    "compile": ("whole", "blocks", "pictures", "off"),
    "shard": ("ddp", "fsdp"),
    "optimizer": tuple(OPTIMIZERS),
    "recipe": ("labels", "dino"),
}
WHOLE = {
    **dict.fromkeys(("side", "epochs", "batch_size", "accumulate", "repeats"), 1),
    **dict.fromkeys(("keep", "log_every"), 1),
    **dict.fromkeys(("warmup_epochs", "plain_epochs", "seed", "workers"), 0),
}
SIZES = ("image_size", "patch_size")
NUMBERS: dict[str, tuple[float, float, str]] = {
    "share": (0, 1, "a share above 0, at most 1"),
    "crop_min": (0, 1, "a share above 0, at most 1"),
    "max_unreadable": (-1, 1, "a share from 0 to 1"),
    "min_lr": (-1, 1, "a share from 0 to 1"),
    "erasing": (-1, 1, "a share from 0 to 1"),
    "mixing": (-1, 1, "a share from 0 to 1"),
    "distillation_weight": (0, float("inf"), "a number above 0"),
    "temperature": (0, float("inf"), "a number above 0"),
    "lr": (0, float("inf"), "a number above 0"),
    **dict.fromkeys(
        ("weight_decay", "clip", "mixup", "cutmix", "feature_weight"), (-1, float("inf"), "a number, 0 or more")
    ),
    **dict.fromkeys(("ema", "drop_path", "smoothing"), (-1, 1, "a share, 0 or more and less than 1")),
}
"""Above which a number is, up to which, and how that is said; where 0 is allowed, the lower bound is −1."""

NO_LABELS = "none"
"""What is given as labels where there are none."""

_TEXTS = ("model", "out", "labels", "teacher")
_FLAGS = ("pretrained", "tensorboard", "graphs")
_MAPPINGS = ("options", "task_weights", "recipe_options")


def check_value(name: str, value: Any) -> Any:
    """Check one field by itself, and give its value: numbers written as text (YAML's ``1e-3``) become numbers."""
    if isinstance(value, Path):
        value = str(value)
    if name in _MAPPINGS:
        _expect(name, value, isinstance(value, Mapping), "a mapping of names to values")
        return dict(value)
    if name == "data":
        _expect(name, value, value is not None and value != "", "a folder, files, or a data set")
    if value is None or name not in (*CHOICES, *WHOLE, *SIZES, *NUMBERS, *_TEXTS, *_FLAGS):
        return value
    if name in CHOICES:
        if name == "compile" and isinstance(value, bool):  # YAML reads on and off so
            value = "whole" if value else "off"
        hint = nearest(value, CHOICES[name]) if isinstance(value, str) else ""
        _expect(name, value, value in CHOICES[name], f"one of {', '.join(CHOICES[name])}{hint}")
    elif name in _TEXTS:
        _expect(name, value, isinstance(value, str) and bool(value), "text")
    elif name in _FLAGS:
        _expect(name, value, isinstance(value, bool), "true or false")
    elif name in WHOLE:
        _expect(name, value, _whole(value, WHOLE[name]), f"a whole number, {WHOLE[name]} or more")
    elif name in SIZES:
        several = isinstance(value, list | tuple) and len(value) in (2, 3) and all(_whole(one, 1) for one in value)
        _expect(name, value, several or _whole(value, 1), "a whole number, 1 or more, or two or three of them")
        value = tuple(value) if several else value
    else:
        value = _number(name, value)
    return value


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(name: str, value: Any) -> float:
    low, high, expected = NUMBERS[name]
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    right = number and (value >= 0 if low < 0 else value > low) and value <= high
    if "less than 1" in expected:
        right = right and value < 1
    _expect(name, value, right, expected)
    return float(value)


def _expect(name: str, value: Any, right: bool, expected: str) -> None:
    if not right:
        raise InvalidOption(f"{name}={value!r}; expected {expected}")


def check_together(config: Config) -> None:
    """Check fields against each other, as far as that needs neither data nor model."""
    _check_model(config)
    _check_validation(config.validation)
    names = [] if config.tokens is None else _roles(config.tokens)
    distilled = "distillation" in names or (
        config.tokens is None
        and config.own
        and any(s.role.value == "distillation" for s in MODELS[config.model].tokens)
    )
    if distilled and config.teacher is None:
        raise InvalidOption(
            f"{'tokens' if names else 'model'}: a distillation token learns from a teacher, and teacher is not given. "
            "Name one (a folder of a run, timm:NAME, hf:REPO), or choose tokens without it, like tokens='cls'"
        )
    if config.teacher is None:
        for name in ("distillation", "distillation_weight", "temperature"):
            if getattr(config, name) is not None:
                raise InvalidOption(f"{name}={getattr(config, name)!r} needs a teacher, and teacher is not given")
    if config.temperature is not None and config.distillation not in (None, "soft"):
        raise InvalidOption(f"temperature is for distillation='soft'; got distillation={config.distillation!r}")
    if config.temperature is not None and config.distillation is None:
        raise InvalidOption("temperature is for distillation='soft'; say so, or leave it out")
    _check_dropped(config)
    _check_rounded(config)
    _check_tasks(config)
    _check_recipe(config)
    if config.optimizer == "muon" and config.shard == "fsdp":
        raise InvalidOption("optimizer=muon needs whole matrices, and shard=fsdp cuts them up; use ddp, or adamw")
    for name in ("warmup_epochs", "plain_epochs"):
        if config.epochs is not None and (getattr(config, name) or 0) > config.epochs:
            raise InvalidOption(f"{name}={getattr(config, name)} is more than epochs={config.epochs}")
    if config.batch_size is not None and config.batch_size % config.accumulate:
        raise InvalidOption(f"accumulate={config.accumulate} does not divide batch_size={config.batch_size}")


def _check_dropped(config: Config) -> None:
    """Refuse to compare patches one by one where some of them are left out."""
    compared = {
        "distillation='features'": config.distillation == "features",
        "feature_weight": config.feature_weight > 0,
        **{f"recipe_options: {name}": bool(config.recipe_options.get(name)) for name in ("patches", "reconstruct")},
    }
    for name, asked in compared.items():
        if asked and config.options.get("patch_drop"):
            raise InvalidOption(f"{name} needs every patch, and options: patch_drop leaves some out; give one of them")


def _check_rounded(config: Config) -> None:
    """Refuse to round weights where something else takes care of them."""
    others = {
        f"recipe={config.recipe}": config.recipe != "labels",
        "shard=fsdp": config.shard == "fsdp",  # it rounds weights itself
        "compile=whole": config.compile == "whole",  # rounding is done around the model, by Python
    }
    for name, asked in others.items():
        if asked and config.dtype == "bf16-weights":
            raise InvalidOption(f"dtype=bf16-weights does not go with {name}; give dtype=bf16, or leave {name} out")


def _check_model(config: Config) -> None:
    name = config.model
    folder = named(name).is_dir() or name.startswith("local-dir:")
    if not config.own and not folder and split_name(name)[0] is None:
        known = sorted(MODELS)
        raise InvalidOption(
            f"model={name!r}; expected a folder of a run or of a model, timm:NAME, hf:REPO, or one of "
            f"{', '.join(known)}{nearest(name, known)}"
        )
    if not config.own:
        for field, value in (("tokens", config.tokens), ("patch_size", config.patch_size)):
            if value is not None:
                raise InvalidOption(f"{field} is for our own models, built by name; model={name!r} brings its own")
    if config.own and config.pretrained:
        raise InvalidOption(f"pretrained: there are no weights for {name!r}; name a folder as model to go on from it")


def _check_validation(value: Any) -> None:
    if isinstance(value, int | float) and not (0 < value < 1 and not isinstance(value, bool)):
        raise InvalidOption(f"validation={value!r}; expected a share between 0 and 1, a path like data, or none")


def _check_tasks(config: Config) -> None:
    tasks = config.tasks
    for task in tasks:
        if not isinstance(task, str) or not task.isidentifier():
            raise InvalidOption(f"tasks: {task!r} cannot name a token; expected columns named by letters and digits")
    if len(set(tasks)) < len(tasks):
        raise InvalidOption(f"tasks={list(tasks)}; expected each column once")
    if tasks and config.labels is not None:
        raise InvalidOption(f"labels={config.labels!r} and tasks={list(tasks)}; give one of them")
    if not tasks and config.heads == "shared":
        raise InvalidOption("heads='shared' is for several tasks, and tasks is empty")
    if config.heads == "shared" and config.tokens is not None and set(_roles(config.tokens)) & {*tasks, "task"}:
        raise InvalidOption("heads='shared' is one class token for all tasks, and tokens has tokens of tasks")
    for name in config.task_weights:
        if name not in tasks:
            raise InvalidOption(f"task_weights: {name!r} is none of the tasks{nearest(name, tasks)}")
    if config.task_weights and config.weighting == "uncertainty":
        raise InvalidOption("task_weights are fixed ones, and weighting='uncertainty' learns them; give one")


def _check_recipe(config: Config) -> None:
    if config.recipe == "labels":
        if config.recipe_options:
            raise InvalidOption("recipe_options are for recipe='dino'; labels need none")
        if config.labels == NO_LABELS:
            raise InvalidOption("labels='none' is for recipe='dino', which learns without them")
        return
    if not config.own:
        raise InvalidOption(
            f"recipe={config.recipe!r} is for our own models, built by name; got model={config.model!r}"
        )
    for name in ("teacher", "merge", "tasks", "mixup", "cutmix", "smoothing", "plain_epochs"):
        if getattr(config, name):
            raise InvalidOption(f"recipe={config.recipe!r} learns without labels; it takes no {name}")
    if config.augment in ("none", "flip"):
        raise InvalidOption(f"augment={config.augment!r}: recipe={config.recipe!r} learns from views that differ")
    if config.shard == "fsdp":
        raise InvalidOption(f"shard='fsdp' is not for recipe={config.recipe!r} yet; use ddp")


def _roles(tokens: Any) -> list[str]:
    """Name the tokens and roles that were asked for, without reading them in earnest."""
    if isinstance(tokens, str):
        return [part.partition("=")[0].strip() for part in tokens.split(",")]
    found = []
    for spec in tokens if isinstance(tokens, list | tuple) else ():
        if isinstance(spec, TokenSpec):
            found.append(spec.role.value)
        elif isinstance(spec, Mapping):
            found.append(str(spec.get("role")))
    return found
