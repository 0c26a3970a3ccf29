"""The training configuration: every option, declared once."""
# ruff: noqa: RUF009 (`option` returns a dataclass field)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.adapters.registry import split_name
from vitrail.adapters.saved import named
from vitrail.errors import InvalidOption
from vitrail.models import MODELS
from vitrail.tokens import TokenSpec
from vitrail.training.config._yaml import read_yaml, to_yaml
from vitrail.training.config.options import (
    Kind,
    Option,
    choice,
    flag,
    integer,
    mapping,
    number,
    option,
    options_of,
    sizes,
    suggest,
    text,
)
from vitrail.training.config.presets import PRESETS, batch_for, ema_for, lr_for
from vitrail.training.config.syntax import MergePlan, read_interval, read_merge, token_roles

DATA, MODEL, OBJECTIVE, RECIPE, MACHINE, OUTPUT = "Data", "Model", "Objective", "Recipe", "Machine", "Output"

NO_LABELS = "none"
"""Value of ``labels`` for training without labels."""

DISTILLATION_WEIGHTS = {"hard": 0.5, "soft": 0.1, "features": 0.5}
"""Default weight of the teacher's loss by kind of distillation; the first two are DeiT's."""


def _parse_data(value: Any) -> Any:
    if isinstance(value, str) and not value:
        raise ValueError
    return value


def _parse_validation(value: Any) -> Any:
    if isinstance(value, str):
        if value.lower() in ("none", ""):
            return None
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, int | float) and (isinstance(value, bool) or not 0 < value < 1):
        raise ValueError
    return value


def _parse_tasks(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list | tuple):
        raise ValueError
    return tuple(value)


def _parse_tokens(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _parse_compile(value: Any) -> Any:
    if isinstance(value, bool):  # as YAML reads on and off
        return "whole" if value else "off"
    return _COMPILE.parse("augment" if value == "pictures" else value)  # its name before 0.3


def _parse_interval(value: Any) -> Any:
    read_interval(value, 1)
    return value


_COMPILE = choice("whole", "blocks", "augment", "off")
_INTERVAL = Kind("a number of epochs, or text such as '2 epochs' or '200 steps'", "EVERY", _parse_interval)


@dataclass(frozen=True)
class Config:
    """A training run. Options that are None are derived from the preset, the model, the data or the machine.

    >>> Config(data="photos", preset="tiny").resolved(1000).batch_size
    64
    """

    data: Any = option(
        DATA, Kind("a path or a dataset", "DATA", _parse_data), MISSING, resumable=True,
        help="Training data: a folder with one subfolder per class, parquet files, shards (wds:…), hf:OWNER/NAME, "
        "torchvision:NAME:ROOT; from Python also a dataset or `Arrays`.",
    )  # fmt: skip
    validation: Any = option(
        DATA, Kind("a fraction between 0 and 1, data, or none", "DATA", _parse_validation), 0.1, resumable=True,
        help="Held-out data, the fraction of the training data to hold out, or none for no evaluation.",
    )  # fmt: skip
    labels: str | None = option(
        DATA, text("COLUMN"), None, "Column with the class labels; none (with recipe=dino) ignores labels."
    )
    tasks: tuple[str, ...] = option(
        DATA, Kind("column names separated by commas", "COLUMNS", _parse_tasks), (), "Columns to learn as tasks."
    )
    share: float = option(DATA, number(0, 1, above=True), 1.0, "Fraction of the training data to use.")
    side: int | None = option(DATA, integer(1), None, "Size in pixels at which decoded images are kept.")
    keep_data: str = option(
        DATA, choice("auto", "device", "workers"), "auto", resumable=True,
        help="Decode once and keep images in memory (device), or read them with workers.",
    )  # fmt: skip
    max_unreadable: float = option(
        DATA, number(0, 1), 0.01, "Fraction of images that may be unreadable.", resumable=True
    )

    model: str = option(
        MODEL, text("MODEL"), "vit_tiny_patch16",
        help="A Vitrail model, timm:NAME, hf:REPO, torchvision:NAME, or a run or model directory to fine-tune.",
    )  # fmt: skip
    options: dict[str, Any] = option(MODEL, mapping(), {}, "More options of the model's constructor.")
    pretrained: bool | None = option(MODEL, flag(), None, "Start from the library's pretrained weights.")
    image_size: Any = option(MODEL, sizes(), None, "Input size in pixels.")
    patch_size: int | tuple[int, ...] | None = option(MODEL, sizes(), None, "Patch size in pixels.")
    tokens: Any = option(
        MODEL, Kind("text such as 'cls,register=4', or token specs", "TOKENS", _parse_tokens), None,
        help="Special tokens of a Vitrail model, such as cls,distillation,register=4.",
    )  # fmt: skip
    heads: str = option(
        MODEL, choice("tokens", "shared"), "tokens", "One token per task, or one class token shared by all tasks."
    )
    weighting: str = option(OBJECTIVE, choice("fixed", "uncertainty"), "fixed", "Fixed or learned task weights.")
    task_weights: dict[str, float] = option(OBJECTIVE, mapping(), {}, "Fixed weight of each task.")
    teacher: str | None = option(
        OBJECTIVE, text("MODEL"), None, "Teacher model: a run directory, timm:NAME or hf:REPO.", resumable=True
    )
    distillation: str | None = option(
        OBJECTIVE, choice("hard", "soft", "features"), None, "What to learn from the teacher; hard by default."
    )
    distillation_weight: float | None = option(
        OBJECTIVE, number(0, 1, above=True), None, "Weight of the teacher's loss; 0.5, or 0.1 for soft, by default."
    )
    temperature: float | None = option(
        OBJECTIVE, number(0, above=True), None, "Temperature of soft distillation; 3 by default."
    )
    feature_weight: float = option(
        OBJECTIVE, number(0), 0.0, "Weight of a feature loss in addition to hard or soft distillation."
    )
    merge: Any = option(
        OBJECTIVE, Kind("text such as 'r=8,over_epochs=10', or a mapping", "MERGE", read_merge), None,
        help="Merge tokens during training, such as r=8,from_epoch=0,over_epochs=10.",
    )  # fmt: skip
    recipe: str = option(
        OBJECTIVE, choice("labels", "dino"), "labels", "Learn from labels, or without them by self-distillation."
    )
    recipe_options: dict[str, Any] = option(
        OBJECTIVE, mapping(), {}, "Options of recipe=dino, such as {prototypes: 1024, patches: 1}."
    )

    preset: str = option(RECIPE, choice(*PRESETS), "small", "Defaults for the recipe.")
    epochs: int | None = option(RECIPE, integer(1), None, "Number of epochs.")
    batch_size: int | None = option(RECIPE, integer(1), None, "Global batch size, over all ranks.")
    accumulate: int = option(
        RECIPE, integer(1), 1, "Gradient accumulation: parts that a batch is computed in.", resumable=True
    )
    optimizer: str = option(RECIPE, choice("adamw", "muon"), "adamw", "Optimizer; muon updates hidden layers.")
    lr: float | None = option(RECIPE, number(0, above=True), None, "Peak learning rate.")
    min_lr: float = option(RECIPE, number(0, 1), 0.01, "Final learning rate as a fraction of the peak.")
    weight_decay: float | None = option(RECIPE, number(0), None, "Weight decay.")
    warmup_epochs: int | None = option(RECIPE, integer(0), None, "Epochs of linear warm-up.")
    clip: float = option(RECIPE, number(0), 1.0, "Maximum gradient norm; 0 disables clipping.")
    ema: float | None = option(RECIPE, number(0, 1, below=True), None, "Decay of the weights' EMA; 0 disables it.")
    drop_path: float | None = option(
        RECIPE, number(0, 1, below=True), None, "Drop path (stochastic depth) rate of the last block."
    )
    smoothing: float | None = option(RECIPE, number(0, 1, below=True), None, "Label smoothing.")
    mixup: float | None = option(RECIPE, number(0), None, "Mixup alpha; 0 disables it.")
    cutmix: float | None = option(RECIPE, number(0), None, "CutMix alpha; 0 disables it.")
    mixing: float = option(RECIPE, number(0, 1), 1.0, "Fraction of images to which Mixup or CutMix applies.")
    augment: str | None = option(
        RECIPE, choice("none", "flip", "light", "medium", "strong"), None, "Strength of the augmentation."
    )
    crop_min: float | None = option(
        RECIPE, number(0, 1, above=True), None, "Smallest area of a random crop, as a fraction of the image."
    )
    erasing: float | None = option(RECIPE, number(0, 1), None, "Probability of random erasing.")
    plain_epochs: int = option(RECIPE, integer(0), 0, "Final epochs without augmentation and mixing, except for flips.")
    repeats: int | None = option(RECIPE, integer(1), None, "Repeated augmentation: views of an image per batch.")
    seed: int = option(RECIPE, integer(0), 0, "Random seed.")

    device: str | None = option(
        MACHINE, choice("cpu", "cuda"), None, "Device; CUDA if available by default.", resumable=True
    )
    dtype: str | None = option(
        MACHINE, choice("fp32", "bf16", "bf16-weights"), None,
        help="float32, bfloat16 autocast (default on CUDA), or bfloat16 throughout with float32 master weights.",
    )  # fmt: skip
    compile: str | None = option(
        MACHINE, replace(_COMPILE, parse=_parse_compile), None, resumable=True,
        help="Compile the whole step, the model's blocks, only the augmentation, or nothing.",
    )  # fmt: skip
    graphs: bool | None = option(
        MACHINE, flag(), None, "Capture the step as a CUDA graph; default on a single GPU.", resumable=True
    )
    shard: str = option(
        MACHINE, choice("ddp", "fsdp"), "ddp", "Data parallel, or fully sharded for large models.", resumable=True
    )
    workers: int | None = option(MACHINE, integer(0), None, "Data loader workers.", resumable=True)

    out: str | None = option(OUTPUT, text("DIR"), None, "Run directory.", short="-o", resumable=True)
    evaluate_every: Any = option(
        OUTPUT, _INTERVAL, None, "Evaluation interval; 20 evaluations per run by default.", resumable=True
    )
    save_every: Any = option(
        OUTPUT, _INTERVAL, None, "Checkpoint interval; 20 checkpoints per run by default.", resumable=True
    )
    keep: int = option(OUTPUT, integer(1), 2, "Checkpoints to keep.", resumable=True)
    log_every: int = option(OUTPUT, integer(1), 50, "Steps between log lines.", resumable=True)
    tensorboard: bool = option(OUTPUT, flag(), False, "Also log to TensorBoard.", resumable=True)

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            object.__setattr__(self, name, declared.check(getattr(self, name)))
        _check_model(self)
        _check_distillation(self)
        _check_patch_drop(self)
        _check_bf16_weights(self)
        _check_tasks(self)
        _check_recipe(self)
        _check_schedule(self)

    @property
    def own(self) -> bool:
        """Whether ``model`` names a Vitrail model."""
        return self.model in MODELS

    @property
    def half(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.dtype in ("bf16", "bf16-weights")

    @property
    def folder(self) -> Path:
        """Run directory."""
        name = self.model.replace(":", "-").replace("/", "-").strip(".-")
        return Path(self.out) if self.out else Path("runs") / f"{name}-{self.preset}"

    def resolved(self, count: int, *, cuda: bool = False) -> Config:
        """Return a config with every option that preset, number of training samples and machine decide filled in."""
        preset = PRESETS[self.preset]
        values = {name: preset[name] for name in preset if getattr(self, name) is None and name not in ("lr", "ema")}
        if not self.own:
            values.update(image_size=self.image_size, patch_size=self.patch_size)
        batch = self.batch_size or batch_for(self.preset, count, self.repeats or preset["repeats"])
        epochs = self.epochs or preset["epochs"]
        if self.warmup_epochs is None:
            values["warmup_epochs"] = min(preset["warmup_epochs"], epochs // 5)
        if self.ema is None:
            values["ema"] = preset["ema"] if preset["ema"] == 0 else ema_for(epochs * max(count // batch, 1))
        if self.recipe != "labels":
            values.update(dict.fromkeys(("mixup", "cutmix", "smoothing"), 0.0))
            values["crop_min"] = self.crop_min or 0.4  # of global views; local views have their own crops
        derived: dict[str, Any] = {
            "out": str(self.folder),
            "batch_size": batch,
            "lr": lr_for(self.preset, batch),
            "dtype": "bf16" if cuda else "fp32",
            "compile": ("blocks" if self.own else "augment") if cuda else "off",  # convnets take minutes to compile
            "device": "cuda" if cuda else "cpu",
            "evaluate_every": max(1, epochs // 20),
            "save_every": max(1, epochs // 20),
        }
        if self.teacher is not None:
            kind = self.distillation or "hard"
            derived |= {"distillation": kind, "distillation_weight": DISTILLATION_WEIGHTS[kind]}
            if kind == "soft":
                derived["temperature"] = 3.0
        values |= {name: value for name, value in derived.items() if getattr(self, name) is None}
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML or JSON."""
        return {name: _plain(getattr(self, name)) for name in OPTIONS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Return a config from plain values, as `to_dict` returns them; missing options take their defaults."""
        for name in values:
            if name not in OPTIONS:
                raise InvalidOption(f"unknown training option {name!r}{suggest(str(name), OPTIONS)}")
        if values.get("data") is None:
            raise InvalidOption("data is missing: give the training data, data= (--data)")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Config:
        """Return the config in a YAML file; ``changes`` take precedence over it."""
        return cls.from_dict({**read_yaml(path), **changes})

    def to_yaml(self) -> str:
        """Return the config as YAML."""
        return to_yaml(self.to_dict())


OPTIONS = options_of(Config)
"""Every training option by name: type, default, allowed values, help text, spelling."""


def default_text(declared: Option) -> str:
    """Return an option's default as help and docs show it; empty if there is none."""
    if declared.name in PRESETS["small"]:
        return "by preset"
    return "" if declared.default in (None, MISSING, (), {}) else str(declared.default).lower()


def options_table() -> str:
    """Return the table of options in ``docs/training.md``."""
    lines = []
    for group in dict.fromkeys(one.group for one in OPTIONS.values()):
        lines += [f"| {group} | default | values | |", "| --- | --- | --- | --- |"]
        for one in (one for one in OPTIONS.values() if one.group == group):
            mark = "" if one.resumable else " *"
            lines.append(
                f"| `{one.flags[-1].split('/')[0]}`{mark} | {default_text(one)} | {one.kind.expected} | {one.help} |"
            )
        lines.append("")
    return "\n".join(lines)


Config.__doc__ = f"{Config.__doc__}\n\nOptions:\n" + "\n".join(f"- {one.name}: {one.help}" for one in OPTIONS.values())


def _plain(value: Any) -> Any:
    if isinstance(value, TokenSpec | MergePlan):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else f"<{type(value).__name__}>"


def _check_model(config: Config) -> None:
    """Check that the model can be found and takes the tokens, patch size and weights it is given."""
    name = config.model
    folder = named(name).is_dir() or name.startswith("local-dir:")
    if not config.own and not folder and split_name(name)[0] is None:
        known = sorted(MODELS)
        raise InvalidOption(
            f"model={name!r}: expected a run or model directory, timm:NAME, hf:REPO, or one of "
            f"{', '.join(known)}{suggest(name, known)}"
        )
    if not config.own:
        for field in ("tokens", "patch_size"):
            if getattr(config, field) is not None:
                raise InvalidOption(f"{field} is for Vitrail models built by name; model={name!r} has its own")
    elif config.pretrained:
        raise InvalidOption(f"pretrained: {name!r} has no pretrained weights; to fine-tune, give a directory as model")


def _check_distillation(config: Config) -> None:
    """Check that distillation has a teacher, and that a temperature is used."""
    if config.teacher is None:
        roles = [] if config.tokens is None else token_roles(config.tokens)
        if config.tokens is None and config.own:
            roles = [spec.role.value for spec in MODELS[config.model].tokens]
        if "distillation" in roles:
            raise InvalidOption(
                f"{'model' if config.tokens is None else 'tokens'}: a distillation token needs a teacher. Give one "
                "(a run directory, timm:NAME, hf:REPO), or tokens without it, such as tokens='cls'"
            )
        for name in ("distillation", "distillation_weight", "temperature", "feature_weight"):
            if getattr(config, name):
                raise InvalidOption(f"{name}={getattr(config, name)!r} needs a teacher")
    if config.temperature is not None and config.distillation != "soft":
        raise InvalidOption(f"temperature needs distillation='soft'; got distillation={config.distillation!r}")


def _check_patch_drop(config: Config) -> None:
    """Check that no loss compares patches one by one while some are dropped."""
    compared = {
        "distillation='features'": config.distillation == "features",
        "feature_weight": config.feature_weight > 0,
        **{f"recipe_options: {name}": bool(config.recipe_options.get(name)) for name in ("patches", "reconstruct")},
    }
    for name, used in compared.items():
        if used and config.options.get("patch_drop"):
            raise InvalidOption(f"{name} needs every patch, but options: patch_drop drops some; give one of them")


def _check_bf16_weights(config: Config) -> None:
    """Check that nothing else handles the weights that ``dtype=bf16-weights`` casts."""
    others = {
        f"recipe={config.recipe}": config.recipe != "labels",
        "shard=fsdp": config.shard == "fsdp",  # casts weights itself
        "compile=whole": config.compile == "whole",  # weights are swapped around the model, in Python
    }
    for name, used in others.items():
        if used and config.dtype == "bf16-weights":
            raise InvalidOption(f"dtype=bf16-weights does not work with {name}; use dtype=bf16, or leave {name} out")


def _check_tasks(config: Config) -> None:
    """Check the names, heads and weights of tasks."""
    tasks = config.tasks
    for task in tasks:
        if not isinstance(task, str) or not task.isidentifier():
            raise InvalidOption(f"tasks: {task!r} cannot name a token; expected letters, digits and underscores")
    if len(set(tasks)) < len(tasks):
        raise InvalidOption(f"tasks={list(tasks)}: expected each column once")
    if tasks and config.labels is not None:
        raise InvalidOption(f"labels={config.labels!r} and tasks={list(tasks)}: give one of them")
    if config.heads == "shared":
        if not tasks:
            raise InvalidOption("heads='shared' needs tasks")
        if config.tokens is not None and set(token_roles(config.tokens)) & {*tasks, "task"}:
            raise InvalidOption("heads='shared' uses one class token for all tasks, but tokens has task tokens")
    for name in config.task_weights:
        if name not in tasks:
            raise InvalidOption(f"task_weights: {name!r} is not a task{suggest(name, tasks)}")
    if config.task_weights and config.weighting == "uncertainty":
        raise InvalidOption("task_weights are fixed, but weighting='uncertainty' learns them; give one of them")


def _check_recipe(config: Config) -> None:
    """Check that training without labels gets no options that need labels."""
    if config.recipe == "labels":
        if config.recipe_options:
            raise InvalidOption("recipe_options need recipe='dino'")
        if config.labels == NO_LABELS:
            raise InvalidOption("labels='none' needs recipe='dino', which trains without labels")
        return
    name = f"recipe={config.recipe!r}"
    if not config.own:
        raise InvalidOption(f"{name} needs a Vitrail model built by name; got model={config.model!r}")
    for field in ("teacher", "merge", "tasks", "mixup", "cutmix", "smoothing", "plain_epochs"):
        if getattr(config, field):
            raise InvalidOption(f"{name} trains without labels and does not take {field}")
    if config.augment in ("none", "flip"):
        raise InvalidOption(f"augment={config.augment!r}: {name} needs views that differ; use light or stronger")
    if config.shard == "fsdp":
        raise InvalidOption(f"shard='fsdp' does not support {name}; use ddp")


def _check_schedule(config: Config) -> None:
    """Check epochs, gradient accumulation and the optimizer's sharding."""
    for name in ("warmup_epochs", "plain_epochs"):
        if config.epochs is not None and (getattr(config, name) or 0) > config.epochs:
            raise InvalidOption(f"{name}={getattr(config, name)} exceeds epochs={config.epochs}")
    if config.batch_size is not None and config.batch_size % config.accumulate:
        raise InvalidOption(f"accumulate={config.accumulate} does not divide batch_size={config.batch_size}")
    if config.optimizer == "muon" and config.shard == "fsdp":
        raise InvalidOption("optimizer=muon needs whole matrices, which shard=fsdp splits; use ddp, or adamw")
